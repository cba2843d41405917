#pragma once

#include <cstdint>

#include "src/core/cuda/mma.cuh"

/// Copies from global into shared memory that a thread starts and waits for later, and the barriers
/// that go with them.
namespace fovea::internal::cuda {

/// kBytes (4 or 16) at addresses that they divide; zeros, without reading, where not present.
template <int kBytes>
__device__ inline void copy_async(void* to, const void* from, bool present) {
  static_assert(kBytes == 4 || kBytes == 16);
  const int bytes = present ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
  }
}

/// Ends a group of the thread's copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits for the thread's groups except the kPending latest.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Waits for all of the thread's copies, groups or not; a barrier makes those of the others
/// visible.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// __syncthreads() among `threads` threads, whole warps, that name the same barrier, 1..15.
__device__ inline void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Counts the warp in at such a barrier without waiting. The barrier orders what it read and wrote
/// before, no fence is needed.
__device__ inline void arrive_some(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fovea::internal::cuda
