#pragma once

#include <cstdint>

// The budget of a block of topk_select on compute capability 9.0: one block a multiprocessor, a
// cluster of 2 to 16 blocks a row.
//
//   registers  1024 threads at 64 (the launch)
//   shared     values of the block's part of the row, 8192 groups of 4 logits   131,072
//              candidates (key, position) of the part, 4096 + 4096               65,536
//              keys of the sample of the whole row, 4096                         16,384
//              histogram, 2048 counters                                           8,192
//              counts of the cluster's blocks and what steps hand round             < 512
//              of 232,448 bytes
//
// When the values are no longer needed, the first block has the cluster's candidates there; when no
// candidates were kept, the sums of all blocks' histograms and the result stand in their place.
namespace fovea::internal::topk_sm90 {

inline constexpr int kThreads = 1024;
inline constexpr int kMaxBlocks = 16;
inline constexpr int64_t kBlockGroups = 8192;
inline constexpr int64_t kMaxTopk = 4096;
inline constexpr int64_t kMaxCandidates = kMaxTopk + 4096;

}  // namespace fovea::internal::topk_sm90
