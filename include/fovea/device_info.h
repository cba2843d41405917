#pragma once

#include <cstdint>
#include <string>

#include "fovea/device.h"
#include "fovea/export.h"

namespace fovea {

/// A GPU as the driver describes it, and the code of this library that runs there.
struct GpuInfo {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int num_sms = 0;
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  int clock_mhz = 0;       ///< The highest of the multiprocessors; 0: unknown.
  int driver_version = 0;  ///< CUDA version that the driver supports, e.g. 13000.
  /// The virtual architecture that the loaded kernels were compiled from and the architecture of
  /// their machine code, e.g. 90 and 90, or 80 and 90 when the driver compiled the PTX of 8.0
  /// because there is no machine code for this GPU or CUDA_FORCE_PTX_JIT=1 forbids it.
  int ptx_version = 0;
  int binary_version = 0;
};

/// Throws Error(kUnsupported) for a device that is not a GPU of this machine and Error(kDevice)
/// when kernels of this build cannot be loaded there.
FOVEA_API GpuInfo gpu_info(const Device& device);

}  // namespace fovea
