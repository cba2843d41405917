#pragma once

#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/cluster.cuh.
namespace fovea::internal::cuda {

inline uint32_t cluster_rank() { return test::gpu::cluster_rank(); }
inline void cluster_arrive() { test::gpu::arrive_cluster(); }
inline void cluster_wait() { test::gpu::wait_cluster(); }
template <class T>
T load_from_cluster(const T* own, uint32_t rank) {
  test::gpu::need_alignment(own, sizeof(T));
  T value;
  std::memcpy(&value, test::gpu::of_cluster(own, rank), sizeof(T));
  return value;
}
inline void store_to_cluster(uint32_t* own, uint32_t rank, uint32_t value) {
  std::memcpy(const_cast<void*>(test::gpu::of_cluster(own, rank)), &value, sizeof(value));
}
template <class Kernel>
void allow_large_clusters(Kernel*) {}

}  // namespace fovea::internal::cuda
