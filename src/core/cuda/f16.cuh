#pragma once

#include <cuda_fp16.h>

#include <cstdint>

/// Pairs of halves.
namespace fovea::internal::cuda {

/// f16(low) | f16(high) << 16, each rounded to nearest even; what is too large becomes infinite.
__device__ inline uint32_t f16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// The values of a pair, the low one first.
__device__ inline float2 f16_values(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

}  // namespace fovea::internal::cuda
