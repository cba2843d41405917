#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "fovea/device.h"
#include "src/core/cuda/error.cuh"
#include "src/core/cuda/kernel_limits.cuh"
#include "src/core/cuda_runtime.h"
#include "src/core/kernel_fault.h"

/// How kernels are started.
namespace fovea::internal::cuda {

/// Grid and block of one launch. Both depend on bounds only, never on lengths.
struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  /// The launch need not wait for the end of the one before it in the stream, only for
  /// let_next_launch_start() of all its blocks (compute capability 9.0). Each block calls
  /// wait_for_last_launch() before it reads what that one writes, and before it ends.
  bool starts_early = false;
};

/// Lets a launch that starts early start, beside what is left of this one.
__device__ inline void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the launch before this one is over and what it has written can be seen.
__device__ inline void wait_for_last_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Grids are limited to 2^31 - 1 blocks on x and 65535 on y and z: rows go to x.
inline unsigned grid_blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

/// Starts `kernel`; a launch of no block does nothing. Dynamic shared memory above 48 KiB is asked
/// for. Throws Error(kDevice) that names the operator, the kernel's shape and the cause.
template <class... Params, class... Args>
void launch(const char* op, void (*kernel)(Params...), const LaunchShape& shape, Stream stream,
            Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  cudaError_t status = cudaSuccess;
  if (shape.shared_bytes > size_t{48} << 10) {
    status = raise_attribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shape.shared_bytes));
  }
  if (status == cudaSuccess && kernel_launch_fails()) status = cudaErrorLaunchOutOfResources;
  if (status == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = native(stream);
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = shape.starts_early ? 1 : 0;
    status = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  }
  if (status == cudaSuccess) return;
  cudaGetLastError();
  const auto text = [](const dim3& d) {
    return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
  };
  throw Error(ErrorCode::kDevice,
              std::string(op) + ": the launch of " + text(shape.grid) + " blocks of " +
                  text(shape.block) + " threads with " + std::to_string(shape.shared_bytes) +
                  " bytes of shared memory failed: " + cudaGetErrorName(status) + " (" +
                  cudaGetErrorString(status) + ")");
}

}  // namespace fovea::internal::cuda
