#pragma once

#include <cstdint>

// The budget of a block of sparse_mla over bf16 rows on compute capability 9.0: one block a
// multiprocessor.
//
//   registers  3 warpgroups of 128 threads at 168 (the launch), 504 for a thread of each: two of
//              heads 216 (128 sums of values, 32 of logits, 16 of weights), keys 72
//   shared     queries [64][576] bf16, 9 panels of 64 columns         73,728
//              2 tiles of keys [64][576] bf16, 9 panels each         147,456
//              results on their way out, 1 KB a warp                   8,192
//              references, sums, masks and barriers                    2,200
//              of 232,448 bytes; rows of 512 channels leave the last panel of queries out
//
// The weights of a tile are in its last panel: the rope channels, which only the logits read, or
// nothing where rows have 512 channels.
namespace fovea::internal::sparse_rows_sm90 {

inline constexpr int kHeads = 64;
inline constexpr int kKeys = 64;
inline constexpr int kValueDim = 512;
inline constexpr int kTilePanels = 9;
inline constexpr int kWeightPanel = 8;
inline constexpr int kHalfPanels = 4;  // of the values of one warpgroup
inline constexpr int kHalfChannels = kHalfPanels * 64;

inline constexpr int kGroupThreads = 128;
inline constexpr int kThreads = 3 * kGroupThreads;
inline constexpr int kHeadRegisters = 216;
inline constexpr int kKeyRegisters = 72;
inline constexpr int kKeyWarps = kGroupThreads / 32;
inline constexpr int kWarpKeys = kKeys / kKeyWarps;

// Barriers of the block by number.
inline constexpr int kAllRoles = 0;
inline constexpr int kEvenWeights = 1;
inline constexpr int kOddWeights = 2;
inline constexpr int kEvenGroup = 3;
inline constexpr int kOddGroup = 4;
inline constexpr int kBothGroups = 5;
inline constexpr int kEvenScales = 6;

}  // namespace fovea::internal::sparse_rows_sm90
