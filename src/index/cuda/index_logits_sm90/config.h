#pragma once

#include <cstdint>

// The budget of a block of index_logits on compute capability 9.0, by what a block takes: `rows`
// rows for each of `groups` warpgroups, which read the same keys.
//
//   rows x groups            1 x 1   2 x 1    4 x 1    4 x 2
//   sums of products            32      64      128      128   registers of a thread
//   head weights                 -       -       64       64   (the others read shared memory)
//   all, at most                80     128      255      255
//   blocks an SM                 6       4        2        1
//   queries                  8,192  16,384   32,768   65,536   bytes of shared memory
//   tiles of keys           24,576  32,768   32,768   65,536   3 or 4 of 8,192 a warpgroup
//   scales, weights, rest    1,600   2,200    2,700    4,600
//
// Few rows are limited by memory: blocks are there to have keys under way. Many rows are limited by
// tensor cores and what weighs their products.
namespace fovea::internal::index_sm90 {

inline constexpr int kHeads = 64;
inline constexpr int kDim = 128;
inline constexpr int kKeys = 64;  // of one product, 16 a warp
inline constexpr int kSteps = kDim / 32;
inline constexpr int kQueryBytes = kHeads * kDim;
inline constexpr int kTileBytes = kKeys * kDim;
inline constexpr int kGroupThreads = 128;

template <int kRows_, int kGroups_>
struct Config {
  static constexpr int kRows = kRows_;  // of a warpgroup
  static constexpr int kGroups = kGroups_;
  static constexpr int kBlockRows = kRows * kGroups;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kBlocksPerSm = kRows == 1 ? 6 : kRows == 2 ? 4 : kGroups == 1 ? 2 : 1;
  // Tiles of keys of a warpgroup: one in use, the others under way.
  static constexpr int kStages = kRows == 1 ? 3 : 4;
  // Rows whose products are one series: two series, one after the other, where there are four rows.
  static constexpr int kSeriesRows = kRows == 1 ? 1 : 2;
  static constexpr int kSeries = kRows / kSeriesRows;
};

}  // namespace fovea::internal::index_sm90
