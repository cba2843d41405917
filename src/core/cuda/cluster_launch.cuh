#pragma once

#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "src/core/cuda/launch.cuh"

/// Kernels that run in clusters of blocks where the GPU has them, and in plain blocks elsewhere:
/// the number of a cluster's blocks is the launch's, not the kernel's.
namespace fovea::internal::cuda {

/// Blocks that a cluster may have wherever there are clusters, and the most on the GPUs that have.
inline constexpr unsigned kPortableClusterBlocks = 8, kMostClusterBlocks = 16;

/// Whether the code that the device runs knows clusters: what GPUs after compute capability 9.0 run
/// has been compiled for 8.0.
inline bool has_clusters(int ordinal) { return device_facts(ordinal).compute_major == 9; }

/// By every thread of every block of a cluster: behind it each sees what the others have written
/// before it, in device memory too. Compute capability 9.0.
__device__ inline void meet_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

/// As launch(); `cluster_blocks` neighbours on x run at the same time. They divide the grid.
template <class... Params, class... Args>
void launch_in_clusters(const char* op, void (*kernel)(Params...), const LaunchShape& shape,
                        unsigned cluster_blocks, Stream stream, Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  const auto raise = [&](cudaFuncAttribute attribute, int value) {
    return raise_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
  };
  cudaError_t status = cudaSuccess;
  if (shape.shared_bytes > size_t{48} << 10) {
    status =
        raise(cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
  }
  if (status == cudaSuccess && cluster_blocks > kPortableClusterBlocks) {
    status = raise(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (status == cudaSuccess && kernel_launch_fails()) status = cudaErrorLaunchOutOfResources;
  if (status == cudaSuccess) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = cluster_blocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = native(stream);
    config.attrs = &cluster;
    config.numAttrs = 1;
    status = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  }
  if (status == cudaSuccess) return;
  const std::string what = std::string(op) + ": the launch of " + std::to_string(shape.grid.x) +
                           " blocks in clusters of " + std::to_string(cluster_blocks) + " with " +
                           std::to_string(shape.shared_bytes) + " bytes of shared memory";
  check(status, what.c_str());
}

}  // namespace fovea::internal::cuda
