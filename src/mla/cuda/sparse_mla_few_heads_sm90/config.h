#pragma once

#include <cstdint>

#include "src/core/row_layout.h"

// The budget of a block of sparse_mla for few heads on compute capability 9.0: one block a
// multiprocessor, two groups of four warps that have a step of 32 keys each in turn.
//
//   registers  3 warpgroups of 128 threads at 168 (the launch), 504 for a thread of each: 232 twice
//              (64 sums of values, 64 of values of 32 keys, 36 of queries, 16 logits, 16 codes), 40
//              where rows are brought
//   shared     packed rows of 256 keys                                 167,936
//              logits of the channels of each warp, of 2 groups         16,384
//              weights, states, barriers                                 4,000
//              of 232,448 bytes
namespace fovea::internal::sparse_few_heads_sm90 {

inline constexpr int kHeads = 16;
inline constexpr int kStepKeys = 32;
inline constexpr int kKeyBlocks = kStepKeys / 8;  // of a step; a warp weighs one each
inline constexpr int kValueDim = 512;

inline constexpr int kGroups = 2;
inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupWarps = kGroupThreads / 32;
inline constexpr int kThreads = kGroups * kGroupThreads;
inline constexpr int kGroupRegisters = 232;
inline constexpr int kBringRegisters = 40;

// Packed rows are brought by a warpgroup of their own, a quarter of a step's a warp.
constexpr int all_threads(bool packed) { return kThreads + (packed ? kGroupThreads : 0); }
inline constexpr int kBringKeys = kStepKeys / kGroupWarps;
inline constexpr int kPlaces = 8;  // of rows of a step
static_assert(kPlaces % kGroups == 0);

// Of a warp: its channels of the values and of the others.
inline constexpr int kWarpChannels = kValueDim / kGroupWarps;
inline constexpr int kWarpSteps = kWarpChannels / 16;
inline constexpr int kRopeChannels = static_cast<int>(kV32RopeDim) / kGroupWarps;

// Barriers of the block by number; 1 and 2 are those of the groups.
inline constexpr int kBothGroups = 3;
inline constexpr int kStart = 4;  // the barriers of rows, for those that bring them

// A row is an odd number of 16-byte units: lanes of neighbouring rows meet all banks.
inline constexpr int kRowBytes = static_cast<int>(kV32RowBytes);
static_assert(kRowBytes % 32 == 16);

}  // namespace fovea::internal::sparse_few_heads_sm90
