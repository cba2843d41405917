#pragma once

#include <cstdint>

// The budget of a block of index_logits on compute capability 9.0, by what a block takes: `rows`
// rows for each of `groups` warpgroups, which read the same keys.
//
//   rows x groups      1 x 1   2 x 1   4 x 1   4 x 2
//   sums of products      32      64     128     128   registers of a thread
//   head weights          16      32      64      64
//   keys, in use, asked   32      32      32      32
//   all, at most         102     168     255     255
//   blocks an SM           5       3       2       1
//   shared, queries    8,192  16,384  32,768  65,536   [rows][64 heads][128 channels] of one byte
//
// Few rows are limited by memory: blocks are there to have keys under way, 8 KB each. Many rows are
// limited by tensor cores: two warpgroups with two products each keep them busy, and the queries of
// 8 rows let the second-level cache rest (8 bytes a clock and SM; keys for 2 rows would take 32).
namespace fovea::internal::index_sm90 {

inline constexpr int kHeads = 64;
inline constexpr int kDim = 128;
inline constexpr int kKeys = 64;  // of one product, 16 a warp
inline constexpr int kSteps = kDim / 32;
inline constexpr int kQueryBytes = kHeads * kDim;
inline constexpr int kGroupThreads = 128;

template <int kRows_, int kGroups_>
struct Config {
  static constexpr int kRows = kRows_;  // of a warpgroup
  static constexpr int kGroups = kGroups_;
  static constexpr int kBlockRows = kRows * kGroups;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kBlocksPerSm = kRows == 1 ? 5 : kRows == 2 ? 3 : kGroups == 1 ? 2 : 1;
  // Rows whose products are one series: two series, one after the other, where there are four rows.
  static constexpr int kSeriesRows = kRows == 1 ? 1 : 2;
  static constexpr int kSeries = kRows / kSeriesRows;
};

}  // namespace fovea::internal::index_sm90
