#pragma once

#include <cuda_runtime.h>

#include <string>

#include "fovea/device.h"
#include "fovea/error.h"

/// CUDA errors as fovea errors.
namespace fovea::internal::cuda {

/// Throws Error(kDevice) "<what>: <name> (<text>)" unless `status` is success.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a sticky error stays, any other must not surface in a later call
  throw Error(ErrorCode::kDevice, std::string(what) + ": " + cudaGetErrorName(status) + " (" +
                                      cudaGetErrorString(status) + ")");
}

inline cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace fovea::internal::cuda
