// Vector form of src/core/v4_row.h: the same bytes. Included after src/core/fp8_tile_simd.h by
// *_cpu.cc files, once per instruction set, hence the guard of the same kind.

#include <cstring>

#include "src/core/row_layout.h"

#if defined(FOVEA_CORE_V4_ROW_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CORE_V4_ROW_SIMD_H_
#undef FOVEA_CORE_V4_ROW_SIMD_H_
#else
#define FOVEA_CORE_V4_ROW_SIMD_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

/// pack_v4_row with vectors.
HWY_INLINE void pack_v4_row_simd(const bf16_t* x, uint8_t* data, uint8_t* scale_codes) {
  const bf16_t* from[kV4NumTiles];
  uint8_t* to[kV4NumTiles];
  float scales[kV4NumTiles];
  for (int64_t tile = 0; tile < kV4NumTiles; ++tile) {
    from[tile] = x + tile * kV4TileDim;
    to[tile] = data + tile * kV4TileDim;
  }
  quantize_tiles_simd(from, kV4TileDim, latent_tile_scale, ScaleMode::kPow2, to, scales);
  for (int64_t tile = 0; tile < kV4NumTiles; ++tile)
    scale_codes[tile] = ue8m0_from_float(scales[tile]);
  scale_codes[kV4NumTiles] = 0;
  std::memcpy(data + kV4LatentDim, x + kV4LatentDim, sizeof(bf16_t) * kV4RopeDim);
}

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
