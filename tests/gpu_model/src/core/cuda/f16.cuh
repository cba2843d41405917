#pragma once

#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/f16.cuh.
namespace fovea::internal::cuda {

inline uint32_t f16_code(float value) {
  const uint32_t sign = __float_as_uint(value) >> 16 & 0x8000;
  const uint32_t size = __float_as_uint(value) & 0x7FFFFFFF;
  if (size > 0x7F800000) return 0x7FFF;
  if (size >= 0x477FF000) return sign | 0x7C00;
  // Below 2^-14 a code counts units of 2^-24.
  if (size < 0x38800000)
    return sign | static_cast<uint32_t>(std::nearbyint(__uint_as_float(size) * 0x1p24f));
  return sign | (size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13;
}
inline float f16_value(uint32_t code) {
  const uint32_t size = code & 0x7FFF;
  const float value = size >= 0x7C00  ? __uint_as_float(size << 13 | 0x7F800000)
                      : size >= 0x400 ? __uint_as_float((size << 13) + 0x38000000)
                                      : static_cast<float>(size) * 0x1p-24f;
  return (code & 0x8000) != 0 ? -value : value;
}

inline uint32_t f16_pair(float low, float high) { return f16_code(low) | f16_code(high) << 16; }
inline float2 f16_values(uint32_t pair) {
  return make_float2(f16_value(pair & 0xFFFF), f16_value(pair >> 16));
}

}  // namespace fovea::internal::cuda
