#pragma once

#include <cstdint>

#include "src/core/cuda/mbarrier.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/mla/cuda/listed_keys.cuh"
#include "src/mla/cuda/sparse_mla_launch.cuh"
#include "src/mla/cuda/sparse_mla_rows_sm90/config.h"
#include "src/mla/cuda/sparse_mla_sm90/places.cuh"

// What a launch is given, and the shared memory of a block.
namespace fovea::internal::sparse_rows_sm90 {

using cuda::Mbarrier;
using latent::kNegInf;
using latent::Target;
using sparse_sm90::kNoPlace;
using sparse_sm90::RowPlaces;

inline constexpr int kPanelBytes = kHeads * cuda::kPanelRowBytes;

// A unit of work are 64 heads of one row.
struct Params : latent::RowParams {
  RowPlaces places[2];  // of the segments
  int64_t num_units;
  unsigned num_blocks;  // block b takes the units b, b + num_blocks, ...

  explicit Params(const latent::RowParams& row) : RowParams(row) {
    for (int i = 0; i < 2; ++i) places[i] = RowPlaces(segments[i], layouts[i].aligned);
  }
};

// A tile of keys: panels of 64 channels.
using Tile = uint8_t[kTilePanels][kPanelBytes];

// Of a head, in units of the dots.
struct HeadScale {
  float largest;
  float reference;  // what weights are relative to
};

// Results of a warp on their way out, 16 heads x 32 channels: pieces of 8 channels, in an order
// that gives eight heads, and two heads with all pieces, different banks.
struct StagedResults {
  alignas(16) uint8_t bytes[16 * 64];

  __device__ uint8_t* piece(int head, int i) {
    return bytes + 64 * head + ((i ^ head / 2 % 4) << 4);
  }
};

// Even tiles of a list are in place 0, odd ones in place 1. Each comes in two halves, which are
// used up one after the other: `left` are the channels 0..255. The rope channels, whose place is
// that of the weights, come with the half that the other warpgroup's weights are multiplied with.
enum Half { kEvenLeft, kEvenRight, kOddLeft, kOddRight, kHalves };
__device__ inline constexpr int place_of(int half) { return half / 2; }
__device__ inline constexpr bool is_left(int half) { return half % 2 == 0; }
__device__ inline constexpr bool has_rope(int half) {
  return half == kEvenRight || half == kOddLeft;
}

template <int kHeadDim>
struct SharedMemory {
  static constexpr int kPanels = kHeadDim / cuda::kPanelColumns;
  alignas(1024) uint8_t q[kPanels][kPanelBytes];
  alignas(1024) Tile tiles[2];
  StagedResults staged[2 * kGroupThreads / 32];  // of each warp
  HeadScale scales[2][kHeads];                   // after the latest tile of each warpgroup
  float sums[2][2][kHeads];                      // by the parity of the unit, of each warpgroup
  alignas(8) uint16_t present[2][kKeyWarps];     // a bit a key
  int num_tiles;                                 // of the unit in hand
  Mbarrier q_full, q_free;
  Mbarrier full[kHalves], free[kHalves];
};

}  // namespace fovea::internal::sparse_rows_sm90
