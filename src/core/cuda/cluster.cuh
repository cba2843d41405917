#pragma once

#include <cstdint>

#include "src/core/cuda/error.cuh"
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

/// A barrier of the cluster in two halves; every thread of every block calls both, in turn. What a
/// thread wrote before it arrived, others see behind their wait.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// What block `rank` of the cluster has where this block has `own`, in shared memory. That block
/// must have started and not ended: between two barriers of the cluster.
__device__ inline uint32_t cluster_address(const void* own, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}
__device__ inline float2 load_from_cluster(const float2* own, uint32_t rank) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(cluster_address(own, rank))
               : "memory");
  return value;
}
__device__ inline float4 load_from_cluster(const float4* own, uint32_t rank) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(cluster_address(own, rank))
               : "memory");
  return value;
}
__device__ inline uint2 load_from_cluster(const uint2* own, uint32_t rank) {
  uint2 value;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(cluster_address(own, rank))
               : "memory");
  return value;
}

/// Writes where block `rank` has `own`; seen behind a barrier of the cluster.
__device__ inline void store_to_cluster(uint32_t* own, uint32_t rank, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cluster_address(own, rank)), "r"(value)
               : "memory");
}

/// Clusters of more than 8 blocks, up to 16, which not every GPU of the generation promises.
template <class Kernel>
void allow_large_clusters(Kernel* kernel) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "cudaFuncSetAttribute");
}

}  // namespace fovea::internal::cuda
