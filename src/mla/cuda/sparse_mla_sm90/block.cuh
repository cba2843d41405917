#pragma once

#include <cstdint>

#include "src/core/cuda/mbarrier.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/mla/cuda/listed_keys.cuh"
#include "src/mla/cuda/sparse_mla_launch.cuh"
#include "src/mla/cuda/sparse_mla_sm90/config.h"
#include "src/mla/cuda/sparse_mla_sm90/places.cuh"

// What a launch is given, and the shared memory of a block.
namespace fovea::internal::sparse_sm90 {

using cuda::Mbarrier;
using latent::kLog2E;
using latent::kNegInf;
using latent::logit_unit;
using latent::Outputs;
using latent::Queries;
using latent::RowLayout;
using latent::RowTurn;
using latent::Scores;
using latent::Target;

inline constexpr int kPanelBytes = kHeads * cuda::kPanelRowBytes;

struct Params : latent::RowParams {
  RowPlaces places[2];  // of the segments

  explicit Params(const latent::RowParams& row) : RowParams(row) {
    for (int i = 0; i < 2; ++i) places[i] = RowPlaces(segments[i], layouts[i].aligned);
  }
};

// A tile of keys: panels of 64 channels.
using Tile = uint8_t[kTilePanels][kPanelBytes];

// The place of 8 channels of a tile's key: piece `piece` of panel `panel`.
__device__ inline uint4* tile_piece(Tile& tile, int panel, int key, int piece) {
  return reinterpret_cast<uint4*>(tile[panel] + cuda::panel_offset(key, piece));
}

// Sums on their way out, where the tiles were: a warpgroup's 64 heads x 256 channels. Rows are 264
// floats apart, for stores of two by eight rows at a time.
struct StagedValues {
  float x[kHeads][kHalfChannels + 8];
};

// What a block has of its row.
struct BlockRow {
  int num_tiles;   // -1: the row has no such part
  bool is_result;  // no other part
};

template <int kHeadDim>
struct SharedMemory {
  static constexpr int kPanels = kHeadDim / cuda::kPanelColumns;
  alignas(1024) uint8_t q[kPanels][kPanelBytes];
  alignas(1024) Tile tiles[kStages];
  alignas(1024) uint8_t weights[kPanelBytes];
  float factors[kHeads];  // what is left of the old sums, and at the end of all
  BlockRow row;
  const float* rotation;                           // of the row; null: none
  alignas(8) uint8_t present[kStages][kKeyWarps];  // a bit a key
  // Halves of a tile: channels 0..255, and the others with those that only logits read.
  Mbarrier left_full[kStages], right_full[kStages], left_free[kStages], right_free[kStages];

  // Where the tiles were, once all of them are used up.
  __device__ StagedValues& staged(int group) {
    static_assert(2 * sizeof(StagedValues) <= sizeof(tiles));
    return reinterpret_cast<StagedValues*>(tiles)[group];
  }
};

}  // namespace fovea::internal::sparse_sm90
