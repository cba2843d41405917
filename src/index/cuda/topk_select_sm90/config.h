#pragma once

#include <cstdint>

// The budget of a block of topk_select on compute capability 9.0: one block a multiprocessor, one
// or a cluster of 2 to 16 blocks a row.
//
//   registers  512 threads at 128 or 1024 at 64 (the launch)
//   shared     histograms: of the part, of all parts for a share of the bins, of the row, 2048
//              counters each; of the entries of one bin, 256                     25,600
//              entries of one bin of the row: keys, which of them are selected    4,224
//              what steps hand round                                            < 1 KiB
//              values of the block's part of the row, up to 8192 groups of 4    131,072
//              of 232,448 bytes
//
// And of a block that has whole rows, one of 1024 threads or two of 512 on a multiprocessor:
//
//   registers  64
//   shared     bins of candidates, then a bitmap of the row           8,464 (64K columns) or 16,912
//              candidates, K + 4096 of 1024 threads or K + 2048 of 512    49,152 or 32,768
//              what steps hand round                                    1 KiB
//              units of 16 values a thread, two of each warp          131,072 or 65,536
//              of 232,448 or 115,712 bytes
namespace fovea::internal::topk_sm90 {

// Of a block; fewer where its part is short.
inline constexpr int kMaxThreads = 1024;
inline constexpr int kFewThreads = 512;
inline constexpr int kMaxBlocks = 16;
// Entries of a thread have a bit each in a word.
inline constexpr int64_t kThreadGroups = 8;
inline constexpr int64_t kBlockGroups = kThreadGroups * kMaxThreads;
// Entries of a row in the range of keys that is looked at one by one.
inline constexpr uint32_t kRangeEntries = 1024;
// Their histogram, which a warp adds up by itself.
inline constexpr int kRangeDigitBits = 8;
inline constexpr int kRangeBins = 1 << kRangeDigitBits;
// Of a block that reads whole rows: units that a warp has room for.
inline constexpr uint32_t kSlots = 2;
inline constexpr uint32_t kMaxWarps = 32;

}  // namespace fovea::internal::topk_sm90
