#include "src/core/cuda/launch.cuh"
#include "tests/support/spin_kernel.h"

namespace fovea::test {
namespace {

constexpr uint64_t kTimeoutNs = 20'000'000'000;

__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void __launch_bounds__(1) spin(SpinFlags* flags) {
  const uint64_t end = now_ns() + kTimeoutNs;
  while (flags->released == 0 && now_ns() < end) __nanosleep(1000);
  flags->ended = 1;
  __threadfence_system();
}

}  // namespace

void start_spinning(const Device& device, Stream stream, SpinFlags* flags) {
  const internal::cuda::DeviceScope scope(device.ordinal);
  internal::cuda::launch("spin", spin, {dim3(1), dim3(1)}, stream, flags);
}

}  // namespace fovea::test
