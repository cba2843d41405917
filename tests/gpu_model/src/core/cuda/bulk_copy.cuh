#pragma once

#include "src/core/cuda/cached_copy.cuh"
#include "src/core/cuda/mbarrier.cuh"

// Model of src/core/cuda/bulk_copy.cuh. Copies are done when they start.
namespace fovea::internal::cuda {

inline void copy_bulk(void* to, const void* from, int bytes, Mbarrier& full, CachePolicy) {
  test::gpu::need_alignment(to, 16);
  test::gpu::need_alignment(from, 16);
  if (bytes % 16 != 0) throw std::logic_error("a copy of no multiple of 16 bytes");
  std::memcpy(to, from, static_cast<size_t>(bytes));
  full.bytes_ahead += bytes;
  end_phase(full);
}
inline void prefetch_bulk(const void* from, int bytes) {
  test::gpu::need_alignment(from, 16);
  if (bytes <= 0 || bytes % 16 != 0) throw std::logic_error("bytes of a prefetch");
}
inline void show_barriers_to_copies() {}

}  // namespace fovea::internal::cuda
