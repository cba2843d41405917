#pragma once

#include <cuda_runtime.h>

/// What a kernel must be allowed before some launches.
namespace fovea::internal::cuda {

/// Raises an attribute of `kernel` on the current device to `value`, unless it was raised so far
/// before. Never lowers one: a launch of another thread may count on it. Thread-safe, and next to
/// nothing for a kernel that is known, where asking the driver takes longer than many a launch.
cudaError_t raise_attribute(const void* kernel, cudaFuncAttribute attribute, int value);

}  // namespace fovea::internal::cuda
