#include "src/core/cuda/kernel_limits.cuh"

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

}  // namespace

cudaError_t raise_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  int ordinal = 0;
  if (const cudaError_t status = cudaGetDevice(&ordinal); status != cudaSuccess) return status;
  // Held while the driver is asked: a lower value of another thread cannot come after this one.
  const std::lock_guard<std::mutex> lock(known().mutex);
  int& limit = known().kernels[kernel][{ordinal, attribute}];
  if (limit >= value) return cudaSuccess;
  const cudaError_t status = cudaFuncSetAttribute(kernel, attribute, value);
  if (status == cudaSuccess) limit = value;
  return status;
}

}  // namespace fovea::internal::cuda
