#pragma once

#include <cstdint>

// The budget of a block of topk_select on compute capability 9.0: one block a multiprocessor, a
// cluster of 2 to 16 blocks a row.
//
//   registers  512 threads at 128 (the launch)
//   shared     keys and positions of the row's candidates, 8192 + 8192           65,536
//              histogram, 2048 counters                                           8,192
//              counts of the cluster's blocks and what steps hand round           < 1 KiB
//              values of the block's part of the row, up to 8192 groups of 4    131,072
//              of 232,448 bytes
//
// Before there are candidates their keys' place has the sample of the row; where none are kept, the
// sums of all blocks' histograms and the result.
namespace fovea::internal::topk_sm90 {

inline constexpr int kThreads = 512;
inline constexpr int kMaxBlocks = 16;
inline constexpr int64_t kBlockGroups = 8192;
inline constexpr int64_t kMaxTopk = 4096;
inline constexpr int64_t kMaxCandidates = kMaxTopk + 4096;

}  // namespace fovea::internal::topk_sm90
