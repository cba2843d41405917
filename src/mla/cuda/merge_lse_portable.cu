#include <cmath>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/sink.h"
#include "src/mla/merge_lse_impl.h"

// A block takes one (row, head); its threads share out the channels. The parts are few, so that
// every thread sums their weights itself, in their order.
namespace fovea::internal {
namespace {

constexpr int kThreads = 128;

template <class T>
struct MergeParams {
  Accessor<const T, 4> out_parts;
  Accessor<const float, 3> lse_parts;
  const float* sink;
  Accessor<T, 3> out;
  Accessor<float, 2> lse;
  int64_t num_parts;
  int64_t num_heads;
  int64_t head_dim;
};

__device__ float to_float(float value) { return value; }
__device__ float to_float(bf16_t value) { return bf16_to_float(value); }
__device__ void store(float value, float* to) { *to = value; }
__device__ void store(float value, bf16_t* to) { *to = bf16_from_float(value); }

template <class T>
__global__ void __launch_bounds__(kThreads) merge(const __grid_constant__ MergeParams<T> params) {
  const int64_t t = blockIdx.x / params.num_heads;
  const int64_t h = blockIdx.x % params.num_heads;
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  float largest = kNegInf;
  for (int64_t p = 0; p < params.num_parts; ++p) {
    const float lse = params.lse_parts(p, t, h);
    if (isfinite(lse)) largest = fmaxf(largest, lse);
  }
  float sum = 0;
  for (int64_t p = 0; p < params.num_parts; ++p) {
    const float lse = params.lse_parts(p, t, h);
    if (isfinite(lse)) sum += expf(lse - largest);
  }
  const float merged = largest == kNegInf ? kNegInf : largest + logf(sum);
  if (threadIdx.x == 0) params.lse(t, h) = merged;
  const float factor = params.sink != nullptr ? sink_factor(params.sink[h], merged) : 1.0f;
  const float scale = largest == kNegInf ? 0.0f : factor / sum;
  for (int64_t d = threadIdx.x; d < params.head_dim; d += kThreads) {
    float value = 0;
    for (int64_t p = 0; p < params.num_parts; ++p) {
      const float lse = params.lse_parts(p, t, h);
      if (!isfinite(lse)) continue;
      value = fmaf(expf(lse - largest) * scale, to_float(params.out_parts(p, t, h, d)), value);
    }
    store(value, &params.out(t, h, d));
  }
}

template <class T>
void run(const MergeLseProblem& problem, const MergeLseTensors& tensors, Stream stream) {
  MergeParams<T> params{};
  params.out_parts = access<const T, 4>(tensors.out_parts);
  params.lse_parts = access<const float, 3>(tensors.lse_parts);
  params.sink = static_cast<const float*>(tensors.sink.data);
  params.out = access<T, 3>(tensors.out);
  params.lse = access<float, 2>(tensors.lse);
  params.num_parts = problem.num_parts;
  params.num_heads = problem.num_heads;
  params.head_dim = problem.head_dim;
  cuda::launch(
      "merge_lse", merge<T>,
      {dim3(cuda::grid_blocks(params.out.shape[0] * problem.num_heads, 1)), dim3(kThreads)}, stream,
      params);
}

}  // namespace

void merge_lse_cuda_portable(const MergeLseProblem& problem, const Device& device,
                             const MergeLseTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  if (problem.dtype == DType::kBf16) {
    run<bf16_t>(problem, tensors, stream);
  } else {
    run<float>(problem, tensors, stream);
  }
}

}  // namespace fovea::internal
