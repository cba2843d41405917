#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/numeric.h"

/// Tiles of e4m3 codes with one scale: the rules every codec follows, in plain loops. A tile is a
/// run of channels that share a scale (64 in v4, 128 in v32 and i132, 512 in r512).
/// src/core/fp8_tile_simd.h gives the same bits in vectors.
///
///   code = e4m3(x / scale), an IEEE fp32 division;  value = bf16(code * scale), an fp32 product
///
/// NaN becomes the code 0x7F; an infinity becomes the largest code of its sign; neither enters the
/// largest magnitude from which the scale follows.
namespace fovea::internal {

/// Largest magnitude among the finite elements; 0 when there is none.
FOVEA_HOST_DEVICE inline float tile_amax(const bf16_t* x, int64_t count) {
  float amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(bf16_to_float(x[i]));
    if (std::isfinite(magnitude)) amax = std::max(amax, magnitude);
  }
  return amax;
}

/// Scale of a latent tile (v32). fp32 mode: a zero tile has scale 1, so that nothing divides 0 by
/// 0. Power-of-two mode: scales start at 2^-13, the smallest one above the floor of 1e-4.
FOVEA_HOST_DEVICE inline float latent_tile_scale(float amax, ScaleMode mode) {
  const float scale = amax / kE4m3Max;
  if (mode == ScaleMode::kPow2) return round_up_to_pow2(std::max(scale, 1e-4f));
  return amax == 0 ? 1.0f : scale;
}

/// Scale of an index tile (i132, index queries): the floor of 1e-4 applies to amax, in both modes.
FOVEA_HOST_DEVICE inline float index_tile_scale(float amax, ScaleMode mode) {
  const float scale = std::max(amax, 1e-4f) / kE4m3Max;
  return mode == ScaleMode::kPow2 ? round_up_to_pow2(scale) : scale;
}

/// Scale of a whole row (r512) with the type it is stored in: codes are quotients by the rounded
/// scale, as readers multiply with that one. A zero row has a positive scale. The mode is ignored.
FOVEA_HOST_DEVICE inline float row_scale_fp32(float amax, ScaleMode) {
  return std::max(amax, 1e-12f) / kE4m3Max;
}
FOVEA_HOST_DEVICE inline float row_scale_bf16(float amax, ScaleMode mode) {
  return bf16_to_float(bf16_from_float(row_scale_fp32(amax, mode)));
}

/// How a format derives a tile's scale.
using TileScaleRule = float (*)(float amax, ScaleMode mode);

/// codes[i] = e4m3(x[i] / scale), saturating.
inline void encode_tile(const bf16_t* x, int64_t count, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = e4m3_from_float(bf16_to_float(x[i]) / scale);
}

/// Encodes a tile and returns its scale.
inline float quantize_tile(const bf16_t* x, int64_t count, TileScaleRule rule, ScaleMode mode,
                           uint8_t* codes) {
  const float scale = rule(tile_amax(x, count), mode);
  encode_tile(x, count, scale, codes);
  return scale;
}

/// out[i] = bf16(codes[i] * scale). Any NaN (code 0x7F or 0xFF, or a scale that is not finite)
/// gives the bf16 0x7FC0, whose bits would otherwise depend on the processor.
inline void dequantize_tile(const uint8_t* codes, int64_t count, float scale, bf16_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = e4m3_to_float(codes[i]) * scale;
    out[i] = std::isnan(value) ? bf16_t{0x7FC0} : bf16_from_float(value);
  }
}

}  // namespace fovea::internal
