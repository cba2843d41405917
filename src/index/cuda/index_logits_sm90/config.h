#pragma once

#include <cstdint>

// The budget of a block of index_logits on compute capability 9.0, by what a block takes: `rows`
// rows for each of `groups` warpgroups, which read the same keys.
//
//   rows x groups            1 x 1   2 x 1    4 x 1    4 x 2
//   sums of products            36     136      136      136   registers of a thread
//   head weights                 -      34       68       68   (one row: shared memory)
//   all, at most                80     255      255      255
//   blocks an SM                 6       2        2        1
//   queries                  9,216  17,408   34,816   69,632   bytes of shared memory
//   tiles of keys           24,576  65,536   32,768   65,536   of 8,192; ragged 131,072
//   scales, weights, rest    3,700   5,500    5,000   11,700
//
// One row is limited by memory: blocks are there to have keys under way. More rows are limited by
// instructions and by power: their products are always under way.
namespace fovea::internal::index_sm90 {

inline constexpr int kHeads = 64;
inline constexpr int kDim = 128;
inline constexpr int kKeys = 64;  // of one product, 16 a warp
inline constexpr int kSteps = kDim / 32;
inline constexpr int kFoldedTerms = 4;  // see fold_queries
inline constexpr int kFoldedColumns = 2 * kFoldedTerms;
inline constexpr int kQueryBytes = kHeads * kDim;
inline constexpr int kTileBytes = kKeys * kDim;
inline constexpr int kGroupThreads = 128;

template <int kRows_, int kGroups_,
          int kTiles_ = kRows_ == 1   ? 1
                        : kRows_ == 2 ? 4
                                      : 2>
struct Config {
  static constexpr int kRows = kRows_;  // of a warpgroup
  static constexpr int kGroups = kGroups_;
  static constexpr int kBlockRows = kRows * kGroups;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kBlocksPerSm = kRows == 1 ? 6 : kGroups == 1 ? 2 : 1;
  static constexpr int kTiles = kTiles_;  // of a turn
  // Tiles in shared memory, and how many are brought before they are needed.
  static constexpr int kStages = kRows == 1 ? 3 : kTiles * (kGroups == 1 ? 2 : 4);
  static constexpr int kAhead = kGroups == 1 ? kStages - kTiles : 2 * kTiles;
  static_assert(kAhead % kTiles == 0 && kStages % kTiles == 0);
  // Pages of keys come by bulk copies. One row is as fast without, and begins
  // earlier.
  static constexpr bool kBulkPages = kGroups == 1 && kRows > 1;
  // Rows whose products are one series, and the series of a tile.
  static constexpr int kSeriesRows = kRows == 1 ? 1 : 2;
  static constexpr int kSeries = kRows / kSeriesRows;
  // Columns of a product: heads of the rows, and what fold_queries makes of them.
  static constexpr int kColumns = kSeriesRows * kHeads + kFoldedColumns;
  static constexpr int kSeriesBytes = kColumns * kDim;
};

}  // namespace fovea::internal::index_sm90
