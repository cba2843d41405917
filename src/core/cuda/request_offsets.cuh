#pragma once

#include <cstdint>

#include "src/core/cuda/scan.cuh"

/// Which rows and keys belong to a request, from untrusted offsets.
namespace fovea::internal {

// The offsets of up to two lists of requests.
struct OffsetParams {
  const int32_t* from[2];
  int32_t* to[2];
  int64_t extent[2];
  int64_t count;
};

inline constexpr int kOffsetThreads = 1024;

// Offsets cut to [0, extent] and raised to their predecessors, a block for each list. A template,
// so that several files may have it.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    clean_offsets(const __grid_constant__ OffsetParams params) {
  __shared__ int32_t warps[kThreads / cuda::kWarpThreads];
  const int32_t* const from = params.from[blockIdx.x];
  int32_t* const to = params.to[blockIdx.x];
  const auto extent = static_cast<int32_t>(params.extent[blockIdx.x]);
  const int lane = threadIdx.x % cuda::kWarpThreads;
  const int warp = threadIdx.x / cuda::kWarpThreads;
  int32_t carried = 0;
  for (int64_t base = 0; base < params.count; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    int32_t value = i < params.count ? min(max(from[i], 0), extent) : 0;
    for (int step = 1; step < cuda::kWarpThreads; step *= 2) {
      const int32_t other = __shfl_up_sync(0xFFFFFFFF, value, step);
      if (lane >= step) value = max(value, other);
    }
    if (lane == cuda::kWarpThreads - 1) warps[warp] = value;
    __syncthreads();
    int32_t all = carried;
    for (int w = 0; w < kThreads / cuda::kWarpThreads; ++w) {
      if (w < warp) value = max(value, warps[w]);
      all = max(all, warps[w]);
    }
    if (i < params.count) to[i] = max(value, carried);
    carried = all;
    __syncthreads();
  }
}

}  // namespace fovea::internal
