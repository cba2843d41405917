#pragma once

#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/mbarrier.cuh.
namespace fovea::internal::cuda {

struct Mbarrier {
  uint64_t state;  // arrivals of a phase, those that came, the phase under way
};

inline void mbarrier_init(Mbarrier& barrier, int arrivals) {
  test::gpu::need_alignment(&barrier, 8);
  barrier.state = static_cast<uint64_t>(arrivals) << 48;
}
inline void mbarrier_arrive(Mbarrier& barrier) {
  const uint64_t arrivals = barrier.state >> 48, came = (barrier.state >> 32 & 0xFFFF) + 1;
  const uint32_t phase = static_cast<uint32_t>(barrier.state) + (came == arrivals ? 1 : 0);
  barrier.state = arrivals << 48 | (came == arrivals ? 0 : came << 32) | phase;
}
inline void mbarrier_wait(Mbarrier& barrier, int64_t phase) {
  const auto under_way = [&] { return static_cast<int64_t>(static_cast<uint32_t>(barrier.state)); };
  test::gpu::wait_until([&] { return under_way() > phase; });
  if (under_way() > phase + 1) throw std::logic_error("a barrier is two phases ahead of a thread");
}

inline void sync_roles(int barrier, int threads) { test::gpu::wait_block(barrier, threads); }

template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

}  // namespace fovea::internal::cuda
