#pragma once

#include "src/core/cuda/mma.cuh"
#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/async_copy.cuh.
namespace fovea::internal::cuda {

template <int kBytes>
void copy_async(void* to, const void* from, bool present) {
  test::gpu::start_copy(to, from, kBytes, present);
}
inline void commit_copies() { test::gpu::end_copy_group(); }
template <int kPending>
void wait_copies() {
  test::gpu::finish_copies(kPending);
}
inline void wait_for_copies() { test::gpu::finish_copies(); }
inline void sync_some(int barrier, int threads) { test::gpu::wait_block(barrier, threads); }
inline void arrive_some(int barrier, int threads) { test::gpu::arrive_block(barrier, threads); }

}  // namespace fovea::internal::cuda
