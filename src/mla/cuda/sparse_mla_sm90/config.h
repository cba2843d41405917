#pragma once

#include <cstdint>

// The budget of a block of sparse_mla on compute capability 9.0: one block a multiprocessor.
//
//   registers  4 warpgroups of 128 threads at 128 (the launch), 512 for a thread of each: logits
//              208 (128 sums of values, 32 of logits, 16 of weights), values 160 (128 sums), keys
//              72 twice
//   shared     queries [64][576] bf16, 9 panels of 64 columns         73,728
//              2 tiles of keys [64][576] bf16, 9 panels each         147,456
//              weights [64][64] bf16, 1 panel                          8,192
//              factors, masks and barriers                               360
//              of 232,448 bytes; rows of 512 channels leave the last panel of queries out
namespace fovea::internal::sparse_sm90 {

inline constexpr int kHeads = 64;
inline constexpr int kKeys = 64;
inline constexpr int kValueDim = 512;
inline constexpr int kTilePanels = 9;
inline constexpr int kRopePanel = 8;
inline constexpr int kHalfPanels = 4;  // of the values of one warpgroup
inline constexpr int kHalfChannels = kHalfPanels * 64;
inline constexpr int kStages = 2;

inline constexpr int kGroupThreads = 128;
inline constexpr int kThreads = 4 * kGroupThreads;
inline constexpr int kLogitRegisters = 208;
inline constexpr int kValueRegisters = 160;
inline constexpr int kKeyRegisters = 72;
inline constexpr int kKeyWarps = 8;
inline constexpr int kWarpKeys = kKeys / kKeyWarps;

// Barriers of the block by number.
inline constexpr int kAllRoles = 0;
inline constexpr int kWeightsReady = 1;
inline constexpr int kWeightsRead = 2;
inline constexpr int kConsumers = 3;

}  // namespace fovea::internal::sparse_sm90
