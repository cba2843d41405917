#pragma once

#include <cstdint>

#include "src/core/cuda/mma.cuh"

/// What warps with different tasks need (compute capability 9.0, code for sm_90a): barriers in
/// shared memory that are waited for by phase, and registers that warpgroups hand to each other.
namespace fovea::internal::cuda {

/// Eight bytes of shared memory, aligned. A phase ends with the arrival that completes `arrivals`;
/// phases count from 0.
struct Mbarrier {
  uint64_t state;
};

/// By one thread, before __syncthreads().
__device__ inline void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

/// What the thread has read and written comes before whatever follows a wait for this phase.
__device__ inline void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

/// Arrives, and lets the phase end no earlier than `bytes` of `copy_to_block` (cluster.cuh) have
/// come.
__device__ inline void mbarrier_arrive_expecting(Mbarrier& barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

/// Arrives when all copies that the thread has started so far (async_copy.cuh) have come.
__device__ inline void mbarrier_arrive_with_copies(Mbarrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}

/// Waits until phase `phase` is over. It must be the one under way or the last before it: barriers
/// know odd from even only.
__device__ inline void mbarrier_wait(Mbarrier& barrier, int64_t phase) {
  const uint32_t parity = static_cast<uint32_t>(phase) & 1;
  uint32_t over = 0;
  while (over == 0) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(over)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
  }
}

/// Sets the registers of each thread of the warpgroup that calls it; a multiple of 8. Together the
/// warpgroups of a block may hold what they had at the launch; one that takes waits for it.
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// sync_some() (async_copy.cuh) from several places of the program: warps with different tasks wait
/// for each other.
__device__ inline void sync_roles(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fovea::internal::cuda
