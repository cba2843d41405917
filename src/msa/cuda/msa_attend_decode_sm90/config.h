#pragma once

#include <cstdint>
#include <type_traits>

#include "src/core/cuda/cluster.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/msa/cuda/msa_attend_kernels.cuh"

// Few rows, bf16, compute capability 9.0. A block has two warpgroups, each of which takes a part of
// the list of a row and KV head, 64 tokens at a time, which it brings itself: nothing waits for
// another warpgroup before the sums meet.
//
// The budget of a block, of which a multiprocessor takes two, for 128 channels:
//
//   shared     ring of 3 halves of tiles [64][128] bf16, twice    98,304
//              weights [16][64] bf16, twice                        4,096
//              queries [16][128] bf16                              4,096
//              states, votes, lists                                2,500
//              of 115,712 bytes
//   registers  256 threads of 128
//
// of which up to 192 KiB a multiprocessor are under way, where about 32 KiB hide the latency of
// memory at its full rate.
namespace fovea::internal::msa::decode {

inline constexpr int kGroups = 2;  // of warps, in a block
inline constexpr int kGroupThreads = 128;
inline constexpr int kThreads = kGroups * kGroupThreads;
inline constexpr int kGroupWarps = kGroupThreads / kWarpThreads;
inline constexpr int kTileTokens = kGroupWarps * kStepKeys;
inline constexpr int kWeightBytes = kMaxGroup * cuda::kPanelRowBytes;  // of a tile
inline constexpr int kMaxDim = 128;
inline constexpr int kMaxParts = 16;  // blocks of the largest cluster
inline constexpr int kBlocksOfSm = 2;
inline constexpr int kFour = 4;  // channels of a thread of the fold

// Keys or values of a tile, [64 tokens][kDim], panels as wgmma.cuh has them.
template <int kDim>
struct Half {
  static constexpr int kPanels = kDim / cuda::kPanelColumns;
  static constexpr int kPanelBytes = kTileTokens * cuda::kPanelRowBytes;
  alignas(1024) uint8_t rows[kPanels * kPanelBytes];
};

// What a warpgroup leaves behind, where its ring was. Lanes that store a column at a time meet
// all banks.
template <int kDim>
struct Sums {
  float values[kMaxGroup][kDim + 4];
};

// What is left of a row and its list before its products.
struct RowList {
  int32_t end_token;  // the row sees no token from this one on
  int num_steps;
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
  // Keys and values of the tiles in turn; odd, so that a half is followed into its place by one of
  // the other kind.
  static constexpr int kHalves = kDim == kMaxDim ? 3 : 5;
  union {
    Half<kDim> ring[kHalves];
    Left<kDim> left;  // once all of them are done
  };
  alignas(1024) uint8_t weights[kWeightBytes];  // [16 heads][64 tokens]
  float2 state[kMaxGroup];                      // reference of the weights, in units of log2; sum
  float warp_largest[kGroupWarps][kMaxGroup];
  float warp_sum[kGroupWarps][kMaxGroup];
  bool votes[2][kGroupWarps];  // tiles in turn: whether a logit is too large for its reference
};

struct Nothing {};

// The list of the row follows.
template <int kDim, int kParts>
struct BlockMemory {
  // The largest clusters have a multiprocessor to a block, and room for what is sent beside rings
  // that others still read.
  static constexpr bool kSentApart = kParts == kMaxParts;
  static constexpr int kQueryPanel = kMaxGroup * cuda::kPanelRowBytes;
  GroupMemory<kDim> groups[kGroups];
  alignas(1024) uint8_t queries[Half<kDim>::kPanels * kQueryPanel];  // [16 heads][kDim]
  std::conditional_t<kSentApart, Sent<kDim>, Nothing> apart;
  __device__ Sent<kDim>& sent() {
    if constexpr (kSentApart) {
      return apart;
    } else {
      return groups[0].left.sent;
    }
  }
  cuda::Inbox inbox;
  RowList list;
};

}  // namespace fovea::internal::msa::decode
