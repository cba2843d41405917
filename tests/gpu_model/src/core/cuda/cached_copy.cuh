#pragma once

#include "src/core/cuda/async_copy.cuh"
#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/cached_copy.cuh.
namespace fovea::internal::cuda {

struct CachePolicy {};
inline CachePolicy cache_policy_once() { return {}; }
inline void copy_async(void* to, const void* from, bool present, CachePolicy) {
  test::gpu::start_copy(to, from, 16, present);
}
inline void prefetch(const void*) {}
inline void load_here(int) {}

}  // namespace fovea::internal::cuda
