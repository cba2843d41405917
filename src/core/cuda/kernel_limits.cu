#include "src/core/cuda/kernel_limits.cuh"

#include <array>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace fovea::internal::cuda {
namespace {

// Of one kernel: (device, attribute) -> value.
using Limits = std::map<std::pair<int, cudaFuncAttribute>, int>;

struct Known {
  std::mutex mutex;
  std::unordered_map<const void*, Limits> kernels;
};

// Never destroyed: a thread may be in a launch while the process ends.
Known& known() {
  static auto* const instance = new Known;
  return *instance;
}

// What the thread has seen to be raised: nothing ever lowers it.
struct Seen {
  const void* kernel = nullptr;
  int ordinal = 0;
  cudaFuncAttribute attribute{};
  int value = 0;
};
constexpr size_t kNumSeen = 64;
thread_local std::array<Seen, kNumSeen> seen;

}  // namespace

cudaError_t raise_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  int ordinal = 0;
  if (const cudaError_t status = cudaGetDevice(&ordinal); status != cudaSuccess) return status;
  Seen& place =
      seen[(reinterpret_cast<uintptr_t>(kernel) / 16 + static_cast<size_t>(attribute)) % kNumSeen];
  if (place.kernel == kernel && place.ordinal == ordinal && place.attribute == attribute &&
      place.value >= value) {
    return cudaSuccess;
  }
  // Held while the driver is asked: a lower value of another thread cannot come after this one.
  const std::lock_guard<std::mutex> lock(known().mutex);
  int& limit = known().kernels[kernel][{ordinal, attribute}];
  if (limit < value) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, attribute, value);
    if (status != cudaSuccess) return status;
    limit = value;
  }
  place = {kernel, ordinal, attribute, limit};
  return cudaSuccess;
}

}  // namespace fovea::internal::cuda
