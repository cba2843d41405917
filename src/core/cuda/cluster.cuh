#pragma once

#include <cstdint>

#include "src/core/cuda/error.cuh"
#include "src/core/cuda/kernel_limits.cuh"
#include "src/core/cuda/mbarrier.cuh"
#include "src/core/cuda/mma.cuh"

/// Clusters of thread blocks, compute capability 9.0: blocks that run at the same time and read
/// each other's shared memory. A kernel names their number with __cluster_dims__.
namespace fovea::internal::cuda {

/// The place of the block among those of its cluster, which is one-dimensional.
__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// A barrier of the cluster in two halves; every thread of every block calls both, in turn. It
/// orders nothing but what an Inbox needs.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Where block `rank` of the cluster has what this block has at `own`, in shared memory.
__device__ inline uint32_t cluster_address(const void* own, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}

/// Counts what blocks of the cluster send into the shared memory of this one, phase after phase.
struct Inbox {
  uint64_t state;
};

/// By one thread, before it comes to a barrier of the cluster, behind which others may send.
__device__ inline void init_inbox(Inbox& inbox) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&inbox)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// By one thread: the phase under way ends when `bytes` have arrived in it, from all blocks
/// together, also before this call.
__device__ inline void expect(Inbox& inbox, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&inbox)),
      "r"(bytes)
      : "memory");
}
/// Both.
__device__ inline void open_inbox(Inbox& inbox, int bytes) {
  init_inbox(inbox);
  expect(inbox, bytes);
}

/// Stores `value` in block `rank`, which may be this one, where this one has `own`; nobody waits
/// for it but who waits for that block's inbox.
__device__ inline void send(const float2& value, float2* own, const Inbox& inbox, uint32_t rank) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(cluster_address(own, rank)),
      "f"(value.x), "f"(value.y), "r"(cluster_address(&inbox, rank))
      : "memory");
}
__device__ inline void send(const float4& value, float4* own, const Inbox& inbox, uint32_t rank) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(cluster_address(own, rank)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(cluster_address(&inbox, rank))
      : "memory");
}
__device__ inline void send(const uint4& value, uint4* own, const Inbox& inbox, uint32_t rank) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(cluster_address(own, rank)),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(cluster_address(&inbox, rank))
      : "memory");
}
__device__ inline void send(uint32_t value, uint32_t* own, const Inbox& inbox, uint32_t rank) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
          cluster_address(own, rank)),
      "r"(value), "r"(cluster_address(&inbox, rank))
      : "memory");
}

/// Waits until everything has arrived in phase `phase`, counted from 0, the one under way or the
/// last before it. The block may end behind it, also where what it has sent is still under way.
__device__ inline void wait_for_inbox(const Inbox& inbox, int phase = 0) {
  uint32_t over = 0;
  while (over == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(over)
        : "r"(shared_address(&inbox)), "r"(phase & 1)
        : "memory");
  }
}

/// By the thread that has called mbarrier_init(), before a barrier of the cluster: others may use
/// those barriers.
__device__ inline void show_barriers_to_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// mbarrier_arrive() at the barrier that block `rank` has where this block has `own`. It tells that
/// products have read what copy_to_block() then writes over; it does not show ordinary stores to
/// that block, which would take a fence of the cluster, more than a thousand cycles.
__device__ inline void mbarrier_arrive(Mbarrier& own, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(&own, rank))
               : "memory");
}
/// Copies `bytes` of shared memory (a multiple of 16, like the address) to the same place of block
/// `rank`, and counts them at its barrier `full`. What ordinary stores wrote needs
/// shared_stores_before_wgmma() of their threads before; products behind `full` see the copy.
__device__ inline void copy_to_block(const void* own, int bytes, Mbarrier& full, uint32_t rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(cluster_address(own, rank)),
      "r"(shared_address(own)), "r"(bytes), "r"(cluster_address(&full, rank))
      : "memory");
}

/// From an address of this block's shared memory to the same place of block `rank`, wherever it is.
__device__ inline uint32_t distance_to_block(const void* own, uint32_t rank) {
  return cluster_address(own, rank) - shared_address(own);
}
/// Stores `value` in the block at that distance where this one has `own`, and counts its bytes at
/// that block's barrier `full`; seen behind a wait for it.
__device__ inline void send_at_distance(const uint4& value, void* own, Mbarrier& full,
                                        uint32_t distance) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(shared_address(own) + distance),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(shared_address(&full) + distance)
      : "memory");
}

/// Clusters of more than 8 blocks, up to 16, which not every GPU of the generation promises.
template <class Kernel>
void allow_large_clusters(Kernel* kernel) {
  check(raise_attribute(reinterpret_cast<const void*>(kernel),
                        cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "cudaFuncSetAttribute");
}

}  // namespace fovea::internal::cuda
