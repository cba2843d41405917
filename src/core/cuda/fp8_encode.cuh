#pragma once

#include <cstdint>

#include "fovea/numeric.h"

/// fp32 to e4m3 codes, several at a time, with the codes of numeric.h.
namespace fovea::internal::cuda {

#if __CUDA_ARCH__ >= 900
/// e4m3(low) | e4m3(high) << 8.
__device__ inline uint32_t e4m3_code_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

/// codes[i] = e4m3 of the i-th value: nearest even, saturating, NaN gives 0x7F.
__device__ inline void e4m3_codes(float x0, float x1, float x2, float x3, uint8_t (&codes)[4]) {
#if __CUDA_ARCH__ >= 900
  const uint32_t low = e4m3_code_pair(x0, x1);
  const uint32_t high = e4m3_code_pair(x2, x3);
  codes[0] = static_cast<uint8_t>(low);
  codes[1] = static_cast<uint8_t>(low >> 8);
  codes[2] = static_cast<uint8_t>(high);
  codes[3] = static_cast<uint8_t>(high >> 8);
#else
  codes[0] = e4m3_from_float(x0);
  codes[1] = e4m3_from_float(x1);
  codes[2] = e4m3_from_float(x2);
  codes[3] = e4m3_from_float(x3);
#endif
}

}  // namespace fovea::internal::cuda
