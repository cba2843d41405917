#include "fovea/device_info.h"

#include "src/core/check.h"
#include "src/core/cuda_probe.h"
#include "src/core/cuda_runtime.h"

namespace fovea {

GpuInfo gpu_info(const Device& device) {
  if (device.kind != DeviceKind::kCuda) {
    internal::unsupported("gpu_info", "device = " + to_string(device) + ", expected a GPU");
  }
  const internal::cuda::DeviceFacts& facts = internal::cuda::device_facts(device.ordinal);
  const internal::cuda::DeviceScope scope(device.ordinal);
  const internal::cuda::CodeFacts code = internal::cuda::code_facts(device.ordinal);
  return {facts.name,       facts.compute_major, facts.compute_minor, facts.num_sms,
          facts.l2_bytes,   facts.memory_bytes,  code.clock_mhz,      code.driver_version,
          code.ptx_version, code.binary_version};
}

}  // namespace fovea
