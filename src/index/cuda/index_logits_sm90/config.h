#pragma once

#include <cstdint>

// The budget of a block of index_logits on compute capability 9.0, by what a block takes: `rows`
// rows for each of `groups` warpgroups, which read the same keys.
//
//   rows x groups            1 x 1   2 x 1    4 x 1    4 x 2
//   sums of products            32     128      128      128   registers of a thread
//   head weights                 -      32       64       64   (one row: shared memory)
//   all, at most                80     255      255      255
//   blocks an SM                 6       2        2        1
//   queries                  8,192  16,384   32,768   65,536   bytes of shared memory
//   tiles of keys           24,576  65,536   32,768   65,536   of 8,192
//   scales, weights, rest    1,600   3,400    2,900    4,900
//
// One row is limited by memory: blocks are there to have keys under way. More rows are limited by
// instructions and by power: their products are always under way.
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
  static constexpr int kBlocksPerSm = kRows == 1 ? 6 : kGroups == 1 ? 2 : 1;
  static constexpr int kTiles = kRows == 1 ? 1 : kRows == 2 ? 4 : 2;  // of a turn
  // Tiles in shared memory, and how many are brought before they are needed.
  static constexpr int kStages = kRows == 1 ? 3 : kRows == 2 ? 8 : kGroups == 1 ? 4 : 8;
  static constexpr int kAhead = kGroups == 1 ? kStages - kTiles : 2 * kTiles;
  static_assert(kAhead % kTiles == 0 && kStages % kTiles == 0);
  // Pages of keys come by bulk copies. One row is as fast without, and begins
  // earlier.
  static constexpr bool kBulkPages = kGroups == 1 && kRows > 1;
  // Rows whose products are one series, and the series of a tile.
  static constexpr int kSeriesRows = kRows == 1 ? 1 : 2;
  static constexpr int kSeries = kRows / kSeriesRows;
};

}  // namespace fovea::internal::index_sm90
