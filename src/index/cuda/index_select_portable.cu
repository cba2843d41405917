#include "src/core/cuda/launch.cuh"
#include "src/index/index_select_driver.h"

namespace fovea::internal {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    fill_chunk(const __grid_constant__ IndexSelectRows rows, int64_t begin, int64_t end,
               IndexSelectChunk chunk) {
  const int64_t t = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t < end) rows.fill(t, begin, chunk);
}

}  // namespace

void fill_index_select_chunk_cuda(const IndexSelectRows& rows, int64_t begin, int64_t end,
                                  const Device& device, const IndexSelectChunk& chunk,
                                  Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  cuda::launch("index_select", fill_chunk,
               {dim3(cuda::grid_blocks(end - begin, kThreads)), dim3(kThreads)}, stream, rows,
               begin, end, chunk);
}

}  // namespace fovea::internal
