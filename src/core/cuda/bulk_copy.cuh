#pragma once

#include "src/core/cuda/cached_copy.cuh"
#include "src/core/cuda/mbarrier.cuh"

/// Copies of whole stretches that one thread starts (compute capability 9.0).
namespace fovea::internal::cuda {

/// Copies `bytes` of global memory to shared memory, both at multiples of 16 like their number, and
/// counts them at `full`, which expects them (mbarrier_arrive_expecting). What read that place
/// before must be behind a barrier of the block.
__device__ inline void copy_bulk(void* to, const void* from, int bytes, Mbarrier& full,
                                 CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&full)), "l"(policy.bits)
      : "memory");
}

/// Brings `bytes` of global memory, a multiple of 16 like the address, to the second-level cache.
__device__ inline void prefetch_bulk(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}

/// By the thread that has called mbarrier_init(), before a barrier of the block: copies may count
/// at those barriers.
__device__ inline void show_barriers_to_copies() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace fovea::internal::cuda
