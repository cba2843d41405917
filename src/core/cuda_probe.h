#pragma once

#include <cstdint>

#include "fovea/device.h"

/// Small kernels that say what a GPU can do, without CUDA types. A build without CUDA has twins in
/// no_cuda.cc. All need a DeviceScope.
namespace fovea::internal::cuda {

/// See GpuInfo.
struct CodeFacts {
  int ptx_version = 0;
  int binary_version = 0;
  int clock_mhz = 0;
  int driver_version = 0;
};
CodeFacts code_facts(int ordinal);

/// The loops behind measure_ceilings(). Each submits one sample that fills the GPU and returns the
/// operations (a multiply-add is two) or bytes of it. `sink`: 4 bytes on the device, in practice
/// never written.
double submit_fma_chains(int num_sms, float* sink, Stream stream);
/// bf16 products of mma.sync with fp32 sums.
double submit_mma_chains(int num_sms, float* sink, Stream stream);
/// Reads `bytes` (a multiple of 16) `passes` times, past the L1.
double submit_read(int num_sms, const void* data, int64_t bytes, int passes, float* sink,
                   Stream stream);
/// Bytes read plus bytes written.
double submit_copy(int num_sms, const void* from, void* to, int64_t bytes, Stream stream);
/// Reads the listed rows of `row_bytes` (a multiple of 16) each.
double submit_gather(int num_sms, const void* pool, int64_t row_bytes, const int32_t* rows,
                     int64_t num_rows, float* sink, Stream stream);

}  // namespace fovea::internal::cuda
