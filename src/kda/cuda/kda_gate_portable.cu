#include <algorithm>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/kda/cuda/kda_rows.cuh"
#include "src/kda/kda_gate_impl.h"
#include "src/kda/kda_math.h"

// A thread per channel, blocks over rows and value heads; memory decides.
namespace fovea::internal {
namespace {

constexpr int kThreads = 256;

struct Params {
  const void* g;
  bool g_is_bf16;
  int64_t g_row, g_head;  // strides in elements
  const float* a_log;
  Accessor<const float, 2> dt_bias;
  Accessor<float, 3> log_decay;
  GateKind kind;
  float lower_bound;
};

__global__ void __launch_bounds__(kThreads) activate(const __grid_constant__ Params params) {
  const int64_t at = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const auto channels = static_cast<uint32_t>(params.log_decay.shape[2]);
  const auto heads = static_cast<uint32_t>(params.log_decay.shape[1]);
  // Rows and heads of a grid are below 2^31, hence this is not more than that times K.
  const int64_t vector = at / channels;
  const auto c = static_cast<uint32_t>(at - vector * channels);
  const int64_t t = vector / heads;
  const auto hv = static_cast<uint32_t>(vector - t * heads);
  if (t >= params.log_decay.shape[0]) return;
  const int64_t from = t * params.g_row + hv * params.g_head + c;
  float a = params.g_is_bf16 ? bf16_to_float(static_cast<const bf16_t*>(params.g)[from])
                             : static_cast<const float*>(params.g)[from];
  if (params.dt_bias) a += params.dt_bias(hv, c);
  const float rate = params.a_log != nullptr ? cuda::finite_rate(params.a_log[hv]) : 1.0f;
  params.log_decay(t, hv, c) = kda_log_decay(params.kind, params.lower_bound, a, rate);
}

}  // namespace

Refusal kda_gate_cuda_supports(const KdaGateProblem& problem) {
  const double elements = static_cast<double>(problem.max_rows) *
                          static_cast<double>(problem.num_value_heads) *
                          static_cast<double>(problem.head_dim_k);
  if (elements / kThreads < std::numeric_limits<int32_t>::max()) return {};
  return "takes at most 2^39 elements, got bounds of " +
         std::to_string(static_cast<int64_t>(std::min(elements, 0x1p62)));
}

void kda_gate_cuda_portable(const KdaGateProblem& problem, const Device& device,
                            const KdaGateTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  Params params{};
  params.g = tensors.g.data;
  params.g_is_bf16 = tensors.g.dtype == DType::kBf16;
  params.g_row = tensors.g.stride[0];
  params.g_head = tensors.g.stride[1];
  params.a_log = static_cast<const float*>(tensors.a_log.data);
  params.dt_bias = access<const float, 2>(tensors.dt_bias);
  params.log_decay = access<float, 3>(tensors.log_decay);
  params.kind = problem.gate.kind;
  params.lower_bound = problem.gate.lower_bound;
  const int64_t elements = tensors.log_decay.num_elements();
  cuda::launch("kda_gate", activate, {dim3(cuda::grid_blocks(elements, kThreads)), dim3(kThreads)},
               stream, params);
}

}  // namespace fovea::internal
