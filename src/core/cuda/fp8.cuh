#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "fovea/dtype.h"

/// e4m3 codes to bf16, several at a time, with the values of numeric.h.
namespace fovea::internal::cuda {

/// Exponent and mantissa of a code, moved to where fp32 has them, make the value times 2^-120,
/// subnormal codes included; the product brings it back exactly. 0x7F and 0xFF are NaN.
__device__ inline float e4m3_value(uint32_t code) {
  const uint32_t magnitude = code & 0x7F;
  const float value = __uint_as_float(magnitude << 20) * 0x1p120f;
  const float signed_value = (code & 0x80) != 0 ? -value : value;
  return magnitude == 0x7F ? __uint_as_float(0x7FC00000) : signed_value;
}

/// bf16(low) | bf16(high) << 16, each rounded to nearest even.
__device__ inline uint32_t bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// The values of two codes, the low one first.
__device__ inline float2 e4m3_values(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;  // every e4m3 value is a half
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
#else
  return make_float2(e4m3_value(codes & 0xFF), e4m3_value(codes >> 8 & 0xFF));
#endif
}

/// Four codes times `scale`, as four bf16.
__device__ inline uint2 decode4(uint32_t codes, float scale) {
  const float2 low = e4m3_values(codes & 0xFFFF);
  const float2 high = e4m3_values(codes >> 16);
  return make_uint2(bf16_pair(low.x * scale, low.y * scale),
                    bf16_pair(high.x * scale, high.y * scale));
}

}  // namespace fovea::internal::cuda
