#pragma once

#include <cstdint>

// The budget of a block of sparse_mla for few heads on compute capability 9.0: one block a
// multiprocessor, two warpgroups that have a tile of 64 keys each in turn.
//
//   registers  3 warpgroups of 128 threads at 168 (the launch), 504 for a thread of each: 232 twice
//              (128 sums of values, 32 of keys on their way to the tensor cores, 16 of rope
//              channels, 8 logits), 40 where rows are brought
//   shared     values of 2 tiles [64][512] bf16, 8 panels each     131,072
//              packed rows of the next 2 tiles, 528 of 656 bytes     67,584
//              queries [16][576] bf16, 9 panels                      18,432
//              weights [16][64] bf16, rounded and rest, of 2 tiles    8,192
//              rows of rope channels, states, barriers                2,900
//              of 232,448 bytes
namespace fovea::internal::sparse_few_heads_sm90 {

inline constexpr int kHeads = 16;
inline constexpr int kKeys = 64;
inline constexpr int kValueDim = 512;
inline constexpr int kValuePanels = 8;
inline constexpr int kQueryPanels = 9;

inline constexpr int kGroups = 2;
inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupWarps = kGroupThreads / 32;
inline constexpr int kThreads = kGroups * kGroupThreads;
inline constexpr int kGroupRegisters = 232;
inline constexpr int kBringRegisters = 40;
inline constexpr int kWarpKeys = kKeys / kGroupWarps;

// Packed rows are brought by a warpgroup of their own.
constexpr int all_threads(bool packed) { return kThreads + (packed ? kGroupThreads : 0); }

// Barriers of the block by number; 1 and 2 are those of the groups.
inline constexpr int kBothGroups = 3;

// Of a v32 row: codes and scales. The rope channels go to registers by themselves.
inline constexpr int kStagedBytes = 528;

}  // namespace fovea::internal::sparse_few_heads_sm90
