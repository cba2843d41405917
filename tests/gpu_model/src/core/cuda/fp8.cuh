#pragma once

#include "fovea/numeric.h"
#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/fp8.cuh.
namespace fovea::internal::cuda {

inline uint32_t bf16_pair(float low, float high) {
  return bf16_from_float(low).bits | static_cast<uint32_t>(bf16_from_float(high).bits) << 16;
}

inline float e4m3_value(uint32_t code) { return e4m3_to_float(static_cast<uint8_t>(code)); }

inline uint2 decode4(uint32_t codes, float scale) {
  float value[4];
  for (int i = 0; i < 4; ++i)
    value[i] = e4m3_to_float(static_cast<uint8_t>(codes >> (8 * i))) * scale;
  return make_uint2(bf16_pair(value[0], value[1]), bf16_pair(value[2], value[3]));
}

}  // namespace fovea::internal::cuda
