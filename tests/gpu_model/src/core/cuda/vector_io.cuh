#pragma once

#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/vector_io.cuh.
namespace fovea::internal::cuda {

template <bool kAligned>
float load_float(const uint8_t* from) {
  if (kAligned) test::gpu::need_alignment(from, 4);
  float value;
  std::memcpy(&value, from, 4);
  return value;
}

inline void prefetch_l2(const void*) {}

inline void load_ahead(uint32_t& to, const void* from) {
  test::gpu::need_alignment(from, 4);
  std::memcpy(&to, from, 4);
}

inline void store_global(float* to, float value) { *to = value; }

inline bool is_aligned(const void* data, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

}  // namespace fovea::internal::cuda
