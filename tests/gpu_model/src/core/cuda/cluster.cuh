#pragma once

#include "src/core/cuda/mbarrier.cuh"
#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/cluster.cuh.
namespace fovea::internal::cuda {

inline uint32_t cluster_rank() { return test::gpu::cluster_rank(); }
inline void cluster_wait() { test::gpu::wait_cluster(); }
inline void cluster_arrive_relaxed() { test::gpu::arrive_cluster(); }

struct Inbox {
  Mbarrier barrier;
};
inline void init_inbox(Inbox& inbox) { mbarrier_init(inbox.barrier, 1); }
inline void expect(Inbox& inbox, int bytes) { mbarrier_arrive_expecting(inbox.barrier, bytes); }
inline void open_inbox(Inbox& inbox, int bytes) {
  init_inbox(inbox);
  expect(inbox, bytes);
}
template <class T>
void send(const T& value, T* own, const Inbox& inbox, uint32_t rank) {
  test::gpu::need_alignment(own, sizeof(T));
  std::memcpy(test::gpu::of_cluster(own, rank), &value, sizeof(T));
  Mbarrier& barrier = static_cast<Inbox*>(test::gpu::of_cluster(&inbox, rank))->barrier;
  barrier.bytes_ahead += sizeof(T);
  end_phase(barrier);
}
inline void wait_for_inbox(const Inbox& inbox, int phase = 0) {
  mbarrier_wait(const_cast<Inbox&>(inbox).barrier, phase);
}
inline void show_barriers_to_cluster() {}
inline Mbarrier& barrier_of(const Mbarrier& own, uint32_t rank) {
  return *static_cast<Mbarrier*>(const_cast<void*>(test::gpu::of_cluster(&own, rank)));
}
inline void mbarrier_arrive(Mbarrier& own, uint32_t rank) {
  mbarrier_arrive(barrier_of(own, rank));
}
inline void copy_to_block(const void* own, int bytes, Mbarrier& full, uint32_t rank) {
  test::gpu::need_alignment(own, 16);
  std::memcpy(const_cast<void*>(test::gpu::of_cluster(own, rank)), own, static_cast<size_t>(bytes));
  Mbarrier& barrier = barrier_of(full, rank);
  barrier.bytes_ahead += bytes;
  end_phase(barrier);
}
inline uint32_t distance_to_block(const void*, uint32_t rank) { return rank; }
inline void send_at_distance(const uint4& value, void* own, Mbarrier& full, uint32_t distance) {
  test::gpu::need_alignment(own, sizeof(value));
  std::memcpy(const_cast<void*>(test::gpu::of_cluster(own, distance)), &value, sizeof(value));
  Mbarrier& barrier = barrier_of(full, distance);
  barrier.bytes_ahead += sizeof(value);
  end_phase(barrier);
}
template <class Kernel>
void allow_large_clusters(Kernel*) {}

}  // namespace fovea::internal::cuda
