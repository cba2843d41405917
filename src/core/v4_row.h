#pragma once

#include <cstdint>
#include <cstring>

#include "fovea/numeric.h"
#include "src/core/fp8_tile.h"
#include "src/core/row_layout.h"

/// Writers of v4 rows, for the rooms that make such rows. src/core/v4_row_simd.h gives the same
/// bytes in vectors.
namespace fovea::internal {

/// Packs 512 channels: power-of-two scales, whatever scale mode a caller has.
inline void pack_v4_row(const bf16_t* x, uint8_t* data, uint8_t* scales) {
  for (int64_t tile = 0; tile < kV4NumTiles; ++tile) {
    scales[tile] =
        ue8m0_from_float(quantize_tile(x + tile * kV4TileDim, kV4TileDim, latent_tile_scale,
                                       ScaleMode::kPow2, data + tile * kV4TileDim));
  }
  scales[kV4NumTiles] = 0;
  std::memcpy(data + kV4LatentDim, x + kV4LatentDim, sizeof(bf16_t) * kV4RopeDim);
}

}  // namespace fovea::internal
