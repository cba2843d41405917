#pragma once

#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/mbarrier.cuh.
namespace fovea::internal::cuda {

struct Mbarrier {
  uint64_t state;       // arrivals of a phase, those that came, the phase under way
  int64_t bytes_ahead;  // that came and were not expected so far; less than 0: expected
};

inline void mbarrier_init(Mbarrier& barrier, int arrivals) {
  test::gpu::need_alignment(&barrier, 8);
  barrier.state = static_cast<uint64_t>(arrivals) << 48;
  barrier.bytes_ahead = 0;
}
inline void end_phase(Mbarrier& barrier) {
  const uint64_t arrivals = barrier.state >> 48, came = barrier.state >> 32 & 0xFFFF;
  if (came > arrivals) throw std::logic_error("more arrivals at a barrier than a phase has");
  if (came < arrivals || barrier.bytes_ahead < 0) return;
  if (barrier.bytes_ahead > 0) throw std::logic_error("more bytes than a barrier expects");
  barrier.state = arrivals << 48 | (static_cast<uint32_t>(barrier.state) + 1U);
}
inline void mbarrier_arrive(Mbarrier& barrier) {
  barrier.state += uint64_t{1} << 32;
  end_phase(barrier);
}
inline void mbarrier_arrive_expecting(Mbarrier& barrier, int bytes) {
  barrier.bytes_ahead -= bytes;
  mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_with_copies(Mbarrier& barrier) {
  test::gpu::finish_copies();
  mbarrier_arrive(barrier);
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
