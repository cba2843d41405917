#pragma once

#include <cstdint>

#include "src/core/cuda/cluster.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/msa/cuda/msa_attend_kernels.cuh"

// Few rows, bf16, compute capability 9.0. A warpgroup takes a part of the list of a row and KV
// head, 64 tokens at a time, which it brings itself: nothing waits for another warpgroup before the
// sums meet.
//
// The budget of a multiprocessor, for 128 channels: two warpgroups, in a block each or in one,
//
//   shared     3 tiles of keys and values [64][128] bf16     98,304
//              queries [16][128] bf16                          4,096
//              weights [16][64] bf16, rounded and rest         4,096
//              states, votes, lists                            1,500
//              twice, of 232,448 bytes
//   registers  2 x 128 threads: no limit
//
// of which up to 192 KiB are under way, where about 32 KiB hide the latency of memory at its full
// rate.
namespace fovea::internal::msa::decode {

inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupWarps = kGroupThreads / kWarpThreads;
inline constexpr int kTileTokens = kGroupWarps * kStepKeys;
inline constexpr int kWeightBytes = kMaxGroup * cuda::kPanelRowBytes;  // of a tile, one of two
inline constexpr int kMaxDim = 128;
inline constexpr int64_t kMaxParts = 16;  // blocks of the largest cluster
inline constexpr int kFour = 4;           // channels of a thread of the fold

// Keys and values [64 tokens][kDim], panels as wgmma.cuh has them.
template <int kDim>
struct Tile {
  static constexpr int kPanels = kDim / cuda::kPanelColumns;
  static constexpr int kPanelBytes = kTileTokens * cuda::kPanelRowBytes;
  alignas(1024) uint8_t keys[kPanels * kPanelBytes];
  alignas(1024) uint8_t values[kPanels * kPanelBytes];
};

// What a warpgroup leaves behind, where its tiles were. Lanes that store a column at a time meet
// all banks.
template <int kDim>
struct Sums {
  float values[kMaxGroup][kDim + 4];
};

// Four channels each of 16 heads; a block adds up an equal share of them for all of its cluster.
template <int kDim>
inline constexpr int kFoldUnits = kMaxGroup* kDim / kFour;

// What blocks of a cluster send each other.
template <int kDim>
struct Sent {
  float4 values[kFoldUnits<kDim>];  // [part][unit of the share]
  float2 states[kFoldUnits<kDim>];
};

template <int kDim>
struct Left {
  Sums<kDim> sums;
  Sent<kDim> sent;
};

template <int kDim>
struct GroupMemory {
  static constexpr int kStages = 3 * kMaxDim / kDim;
  static constexpr int kQueryPanel = kMaxGroup * cuda::kPanelRowBytes;
  union {
    Tile<kDim> tiles[kStages];
    Left<kDim> left;  // once all of them are done
  };
  alignas(1024) uint8_t queries[Tile<kDim>::kPanels * kQueryPanel];  // [16 heads][kDim]
  alignas(1024) uint8_t weights[2][kWeightBytes];                    // [16 heads][64 tokens]
  float2 state[kMaxGroup];  // reference of the weights, in units of log2; sum
  float warp_largest[kGroupWarps][kMaxGroup];
  float warp_sum[kGroupWarps][kMaxGroup];
  bool votes[2][kGroupWarps];  // tiles in turn: whether a logit is too large for its reference
  bool nan[kGroupWarps];
};

// The list of the row follows.
template <int kDim, int kGroups>
struct BlockMemory {
  GroupMemory<kDim> groups[kGroups];
  cuda::Inbox inbox;
  MsaRow row;
  int num_blocks;
};

}  // namespace fovea::internal::msa::decode
