#include <algorithm>
#include <limits>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/kda/cuda/kda_rows.cuh"
#include "src/kda/cuda/kda_sequences.cuh"
#include "src/kda/cuda/warp_sums.cuh"
#include "src/kda/kda_verify_impl.h"

// A warp takes some rows of V of one state through all draft rows: they stay in its registers, its
// lanes share the channels of K. Only where a tree goes back to an earlier row the registers are
// filled again: from the kept states, or by repeating the path from the committed state with the
// kept u, so that every row has the bits of its path alone.
namespace fovea::internal {
namespace {

using cuda::KdaInput;
using cuda::kWarpThreads;

constexpr char kOp[] = "kda_verify";
constexpr int kWarps = 4;

struct Params {
  KdaInput input;
  Accessor<bf16_t, 3> out;
  StateAccess states;
  StateRoutes routes;
  VerifyScratch kept;
  const int32_t* parent;
  const int32_t* refused;  // null without `check`
  int head_dim_k, head_dim_v;
  int draft_rows;
  int slices;  // blocks that share the rows of V of one state
  bool keeps_states;
};

// kLaneChannels channels a lane and kRows rows of V a warp. kWhole: every lane has all its channels
// side by side and every row exists; otherwise channels are 32 apart and bounds are looked at.
template <int kLaneChannels, int kStateRows, bool kWholeShape>
struct Shape {
  static constexpr int kChannels = kLaneChannels;
  static constexpr int kRows = kStateRows;
  static constexpr bool kWhole = kWholeShape;
};

template <class S>
struct Worker {
  static constexpr int kChannels = S::kChannels;
  static constexpr int kRows = S::kRows;

  const Params& params;
  int64_t request;
  int hv, v0, lane;
  float rate;
  float state[kRows][kChannels];
  float k[kChannels], q[kChannels], log_decay[kChannels];

  __device__ explicit Worker(const Params& p) : params(p) {
    const auto per_request = static_cast<uint32_t>(p.input.value_heads * p.slices);
    request = blockIdx.x / per_request;
    hv = static_cast<int>(blockIdx.x % per_request) / p.slices;
    const int slice = static_cast<int>(blockIdx.x % per_request) % p.slices;
    v0 = (slice * kWarps + static_cast<int>(threadIdx.x) / kWarpThreads) * kRows;
    lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    rate = p.input.rate(hv);
  }

  __device__ int channel(int i) const {
    return S::kWhole ? lane * kChannels + i : lane + i * kWarpThreads;
  }
  __device__ bool has_channel(int i) const { return S::kWhole || channel(i) < params.head_dim_k; }
  __device__ bool has_row(int r) const { return S::kWhole || v0 + r < params.head_dim_v; }
  __device__ int64_t row_of(int t) const { return request * params.draft_rows + t; }
  __device__ float* kept(int t) const { return params.kept.at(request, t, hv); }

  // The channels of a row of fp32, 16 bytes at a time where a lane has four.
  __device__ void load_row(const float* from, float (&to)[kChannels]) const {
    if constexpr (S::kWhole && kChannels == 4) {
      const float4 word = *reinterpret_cast<const float4*>(from + channel(0));
      to[0] = word.x;
      to[1] = word.y;
      to[2] = word.z;
      to[3] = word.w;
    } else if constexpr (S::kWhole) {
      const float2 word = *reinterpret_cast<const float2*>(from + channel(0));
      to[0] = word.x;
      to[1] = word.y;
    } else {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) to[i] = has_channel(i) ? from[channel(i)] : 0.0f;
    }
  }
  __device__ void store_row(const float (&from)[kChannels], float* to) const {
    if constexpr (S::kWhole && kChannels == 4) {
      *reinterpret_cast<float4*>(to + channel(0)) = make_float4(from[0], from[1], from[2], from[3]);
    } else if constexpr (S::kWhole) {
      *reinterpret_cast<float2*>(to + channel(0)) = make_float2(from[0], from[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        if (has_channel(i)) to[channel(i)] = from[i];
      }
    }
  }
  __device__ void load_row(const bf16_t* from, float (&to)[kChannels]) const {
    if constexpr (S::kWhole) {
#pragma unroll
      for (int pair = 0; pair < kChannels / 2; ++pair) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(from + channel(0))[pair];
        to[2 * pair] = __uint_as_float(word << 16);
        to[2 * pair + 1] = __uint_as_float(word & 0xFFFF0000);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        to[i] = has_channel(i) ? bf16_to_float(from[channel(i)]) : 0.0f;
      }
    }
  }

  __device__ void load_committed() {
    const int64_t entry = params.routes.start(request);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (entry < 0 || !has_row(r)) {
#pragma unroll
        for (float& x : state[r]) x = 0;
        continue;
      }
      const int64_t at = params.states.offset(entry, hv, v0 + r, 0);
      if (params.states.is_bf16) {
        load_row(static_cast<const bf16_t*>(params.states.data) + at, state[r]);
      } else {
        load_row(static_cast<const float*>(params.states.data) + at, state[r]);
      }
    }
  }

  // k as used and the log decay of draft row t, for this lane's channels.
  __device__ void load_key(int t) {
    const KdaInput& input = params.input;
    const int64_t row = row_of(t);
    const int head = hv / input.heads_per_key;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      k[i] = log_decay[i] = 0;
      if (!has_channel(i)) continue;
      k[i] = bf16_to_float(input.k(row, head, channel(i)));
      const float raw = input.load_gate(row, hv, channel(i)) + input.bias(hv, channel(i));
      log_decay[i] = kda_log_decay(input.gate, input.lower_bound, raw, rate);
      squares = fmaf(k[i], k[i], squares);
    }
    if (!input.normalise) return;
    const float factor = kda_inverse_norm(cuda::warp_sum(squares));
#pragma unroll
    for (float& x : k) x *= factor;
  }
  __device__ void load_query(int t) {
    const KdaInput& input = params.input;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      q[i] = has_channel(i)
                 ? bf16_to_float(input.q(row_of(t), hv / input.heads_per_key, channel(i)))
                 : 0.0f;
      squares = fmaf(q[i], q[i], squares);
    }
    float factor = input.scale;
    if (input.normalise) factor *= kda_inverse_norm(cuda::warp_sum(squares));
#pragma unroll
    for (float& x : q) x *= factor;
  }

  __device__ void decay_state() {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const float decay = cuda::exp2_fast(log_decay[i] * static_cast<float>(kLog2E));
#pragma unroll
      for (int r = 0; r < kRows; ++r) state[r][i] *= decay;
    }
  }
  __device__ void add_correction(const float (&u)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) state[r][i] = fmaf(k[i], u[r], state[r][i]);
    }
  }

  // The state after draft row `node`; -1: the committed one.
  __device__ void restore(int64_t node) {
    if (node >= 0 && params.keeps_states) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (has_row(r)) load_row(kept(node) + (v0 + r) * params.kept.v_stride, state[r]);
      }
      return;
    }
    load_committed();
    int depth = 0;
    for (int64_t j = node; j >= 0; j = parent_row(params.parent, j)) ++depth;
    for (; depth > 0; --depth) {
      int64_t j = node;
      for (int step = 1; step < depth; ++step) j = parent_row(params.parent, j);
      load_key(static_cast<int>(j));
      decay_state();
      float u[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        u[r] = has_row(r) ? kept(j)[2 * params.head_dim_k + v0 + r] : 0.0f;
      }
      add_correction(u);
    }
  }

  // u and what the query reads of the decayed state, the same in every lane.
  __device__ void correct(int t, float (&u)[kRows], float (&read)[kRows]) {
    const float beta = params.input.load_beta(row_of(t), hv);
    float sums[2 * kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = sums[kRows + r] = 0;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        sums[r] = fmaf(state[r][i], k[i], sums[r]);
        sums[kRows + r] = fmaf(state[r][i], q[i], sums[kRows + r]);
      }
    }
    if constexpr (kRows == 8) {
      // Lane l gets sum l / 2: rows 0..7 of the first product, then of the second.
      const float sum = cuda::sum_transposed16(sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        u[r] = __shfl_sync(0xFFFFFFFF, sum, 2 * r);
        read[r] = __shfl_sync(0xFFFFFFFF, sum, 2 * (kRows + r));
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        u[r] = cuda::warp_sum(sums[r]);
        read[r] = cuda::warp_sum(sums[kRows + r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float value = has_row(r) ? bf16_to_float(params.input.v(row_of(t), hv, v0 + r)) : 0.0f;
      u[r] = beta * (value - u[r]);
    }
  }

  __device__ void keep(int t, const float (&u)[kRows]) {
    float* const to = kept(t);
    if (params.keeps_states) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (has_row(r)) store_row(state[r], to + (v0 + r) * params.kept.v_stride);
      }
      return;
    }
    if (v0 == 0) {
      store_row(k, to);
      store_row(log_decay, to + params.head_dim_k);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (lane == r && has_row(r)) to[2 * params.head_dim_k + v0 + r] = u[r];
    }
    // Other lanes read u where a tree comes back.
    __syncwarp();
  }

  __device__ void step(int t) {
    load_key(t);
    load_query(t);
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) dot = fmaf(q[i], k[i], dot);
    dot = cuda::warp_sum(dot);
    decay_state();
    float u[kRows], read[kRows];
    correct(t, u, read);
    add_correction(u);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (lane == r && has_row(r)) {
        params.out(row_of(t), hv, v0 + r) = bf16_from_float(fmaf(dot, u[r], read[r]));
      }
    }
    keep(t, u);
  }

  __device__ void clear() {
    const float none[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (float& x : state[r]) x = 0;
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) k[i] = log_decay[i] = 0;
    for (int t = 0; t < params.draft_rows; ++t) {
      if (lane < kRows && has_row(lane)) params.out(row_of(t), hv, v0 + lane) = bf16_t{0};
      keep(t, none);
    }
  }
};

template <class S>
__global__ void __launch_bounds__(kWarps* kWarpThreads)
    verify(const __grid_constant__ Params params) {
  if (params.refused != nullptr && *params.refused != 0) return;
  Worker<S> worker(params);
  if (worker.v0 >= params.head_dim_v) return;
  if (params.routes.is_padding(worker.request)) return worker.clear();
  worker.load_committed();
  for (int t = 0; t < params.draft_rows; ++t) {
    const int64_t parent = parent_row(params.parent, t);
    if (parent != t - 1) worker.restore(parent);
    worker.step(t);
  }
}

using Whole128 = Shape<4, 8, true>;
using Whole64 = Shape<2, 8, true>;
using Any = Shape<8, 4, false>;

// Whether lanes can take their channels as one word, in the pool and in what is kept.
bool is_whole(const KdaVerifyProblem& problem, const KdaVerifyTensors& tensors) {
  const KdaLayer& layer = problem.layer;
  const auto aligned = [](const ConstTensorView& view) {
    bool result = cuda::is_aligned(view.data, 16);
    for (int axis = 0; axis + 1 < view.rank; ++axis) {
      result = result && view.stride[static_cast<size_t>(axis)] % 4 == 0;
    }
    return result;
  };
  return (layer.head_dim_k == 64 || layer.head_dim_k == 128) &&
         layer.head_dim_v % Whole128::kRows == 0 && aligned(tensors.state) &&
         aligned(tensors.scratch);
}

}  // namespace

Refusal kda_verify_cuda_supports(const KdaVerifyProblem& problem) {
  const KdaLayer& layer = problem.layer;
  const int64_t slices = (layer.head_dim_v + kWarps * Any::kRows - 1) / (kWarps * Any::kRows);
  const double blocks = static_cast<double>(problem.max_requests) *
                        static_cast<double>(layer.num_value_heads) * static_cast<double>(slices);
  if (blocks <= std::numeric_limits<int32_t>::max()) return {};
  return "takes at most 2^31 - 1 blocks of requests and value heads, got bounds of " +
         std::to_string(static_cast<int64_t>(std::min(blocks, 0x1p62)));
}

size_t kda_verify_cuda_workspace(const KdaVerifyProblem& problem, const Device&) {
  return problem.check ? 64 : 0;
}

void kda_verify_cuda_portable(const KdaVerifyProblem& problem, const Device& device,
                              const KdaVerifyTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const KdaLayer& layer = problem.layer;
  const int64_t requests = tensors.out.shape[0] / problem.rows_per_request;
  Params params{};
  params.kept = VerifyScratch(tensors.scratch);
  params.input = KdaInput(layer, split_qkv(layer, tensors));
  params.out = access<bf16_t, 3>(tensors.out);
  params.states = StateAccess(tensors.state, StateLayout::kVk);
  params.routes = StateRoutes(tensors.state, tensors.slot, tensors.slot, tensors.has_initial_state);
  params.parent = static_cast<const int32_t*>(tensors.parent.data);
  params.head_dim_k = static_cast<int>(layer.head_dim_k);
  params.head_dim_v = static_cast<int>(layer.head_dim_v);
  params.draft_rows = static_cast<int>(problem.rows_per_request);
  params.keeps_states = problem.mode == VerifyMode::kStates;
  if (problem.check) {
    auto* const refused = static_cast<int32_t*>(workspace.data);
    cuda::launch_slot_check(kOp, tensors.slot, requests, params.routes.entries, refused,
                            static_cast<int32_t*>(tensors.report.data), stream,
                            /*slots_are_read=*/true);
    params.refused = refused;
  }
  if (requests == 0) return;
  const bool whole = is_whole(problem, tensors);
  const int block_rows = kWarps * (whole ? Whole128::kRows : Any::kRows);
  params.slices = (params.head_dim_v + block_rows - 1) / block_rows;
  const auto blocks = static_cast<unsigned>(requests * layer.num_value_heads * params.slices);
  const cuda::LaunchShape shape{dim3(blocks), dim3(kWarps * kWarpThreads)};
  if (!whole) {
    cuda::launch(kOp, verify<Any>, shape, stream, params);
  } else {
    cuda::launch(kOp, layer.head_dim_k == 128 ? verify<Whole128> : verify<Whole64>, shape, stream,
                 params);
  }
}

}  // namespace fovea::internal
