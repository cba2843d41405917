#pragma once

#include "src/core/cuda/launch.cuh"

// Model of src/core/cuda/cluster_launch.cuh.
namespace fovea::internal::cuda {

inline constexpr unsigned kPortableClusterBlocks = 8, kMostClusterBlocks = 16;

// Tests change it.
inline bool model_has_clusters = true;
inline bool has_clusters(int) { return model_has_clusters; }

inline void meet_cluster() {
  test::gpu::arrive_cluster();
  test::gpu::wait_cluster();
}

template <class... Params, class... Args>
void launch_in_clusters(const char* op, void (*kernel)(Params...), const LaunchShape& shape,
                        unsigned cluster_blocks, Stream stream, const Args&... args) {
  if (shape.grid.x % cluster_blocks != 0 || cluster_blocks > kMostClusterBlocks)
    throw std::logic_error("clusters do not divide the grid");
  unsigned& together = test::gpu::settings().cluster_blocks;
  const unsigned before = std::exchange(together, cluster_blocks);
  launch(op, kernel, shape, stream, args...);
  together = before;
}

}  // namespace fovea::internal::cuda
