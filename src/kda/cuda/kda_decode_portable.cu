#include <algorithm>
#include <limits>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/kda/cuda/kda_rows.cuh"
#include "src/kda/cuda/kda_sequences.cuh"
#include "src/kda/cuda/kda_states.cuh"
#include "src/kda/cuda/warp_sums.cuh"
#include "src/kda/kda_decode_impl.h"

// Decode moves the state once through the chip, and nothing else counts: 2 V K elements per row and
// value head. A warp takes rows of V, eight at a time, the next eight under way while it computes;
// its lanes share the channels of K. Both dot products come from one look at the decayed state:
// o = scale (q . S' + (q . k) u).
namespace fovea::internal {
namespace {

using cuda::KdaInput;
using cuda::kWarpThreads;

constexpr char kOp[] = "kda_decode";
constexpr int kWarps = 4;
constexpr int kBatch = 8;  // rows of V under way in a warp
constexpr int kMaxLaneChannels = 8;

struct Params {
  KdaInput input;
  Accessor<bf16_t, 3> out;
  StateAccess states;
  StateRoutes routes;
  const int32_t* refused;  // null without `check`
  int head_dim_k, head_dim_v;
  int warp_rows;  // of V, a multiple of kBatch
  int slices;     // blocks that share the rows of V of one state
};

// Which row, value head and rows of V a warp works on.
struct Work {
  int64_t t;
  int hv;
  int v;  // first row of V

  __device__ explicit Work(const Params& params) {
    const auto per_row = static_cast<uint32_t>(params.input.value_heads * params.slices);
    t = blockIdx.x / per_row;
    hv = static_cast<int>(blockIdx.x % per_row) / params.slices;
    const int slice = static_cast<int>(blockIdx.x % per_row) % params.slices;
    v = (slice * kWarps + static_cast<int>(threadIdx.x) / kWarpThreads) * params.warp_rows;
  }
};

__device__ void clear_out(const Params& params, const Work& work) {
  const int end = min(work.v + params.warp_rows, params.head_dim_v);
  for (int v = work.v + static_cast<int>(threadIdx.x) % kWarpThreads; v < end; v += kWarpThreads) {
    params.out(work.t, work.hv, v) = bf16_t{0};
  }
}

// A lane's channels of one row: 4 with kK = 128, 2 with kK = 64, in the order of memory.
template <int kK>
struct Channels {
  static constexpr int kCount = kK / kWarpThreads;
  float x[kCount];
};

template <int kK, class T>
__device__ inline void load_channels(const T* from, Channels<kK>& to) {
  constexpr int kCount = Channels<kK>::kCount;
  if constexpr (sizeof(T) == 4) {
    if constexpr (kCount == 4) {
      const float4 word = *reinterpret_cast<const float4*>(from);
      to.x[0] = word.x;
      to.x[1] = word.y;
      to.x[2] = word.z;
      to.x[3] = word.w;
    } else {
      const float2 word = *reinterpret_cast<const float2*>(from);
      to.x[0] = word.x;
      to.x[1] = word.y;
    }
  } else {
#pragma unroll
    for (int pair = 0; pair < kCount / 2; ++pair) {
      const uint32_t word = reinterpret_cast<const uint32_t*>(from)[pair];
      to.x[2 * pair] = __uint_as_float(word << 16);
      to.x[2 * pair + 1] = __uint_as_float(word & 0xFFFF0000);
    }
  }
}

template <int kK, class T>
__device__ inline void store_channels(const Channels<kK>& from, T* to) {
  constexpr int kCount = Channels<kK>::kCount;
  if constexpr (sizeof(T) == 4) {
    if constexpr (kCount == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(from.x[0], from.x[1], from.x[2], from.x[3]);
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(from.x[0], from.x[1]);
    }
  } else {
#pragma unroll
    for (int pair = 0; pair < kCount / 2; ++pair) {
      reinterpret_cast<uint32_t*>(to)[pair] =
          bf16_from_float(from.x[2 * pair]).bits |
          static_cast<uint32_t>(bf16_from_float(from.x[2 * pair + 1]).bits) << 16;
    }
  }
}

// Rows of V come in batches whose rows exist all: V is a multiple of kBatch. kK: 64 or 128; T: the
// type of the pool, whose rows of K are aligned to a lane's channels.
template <int kK, class T>
__global__ void __launch_bounds__(kWarps* kWarpThreads)
    decode(const __grid_constant__ Params params) {
  using Lane = Channels<kK>;
  constexpr int kCount = Lane::kCount;
  if (params.refused != nullptr && *params.refused != 0) return;
  const Work work(params);
  const int end = min(work.v + params.warp_rows, params.head_dim_v);
  if (work.v >= end) return;
  const int64_t slot = params.routes.finish(work.t);
  if (slot < 0) return clear_out(params, work);
  const bool starts = params.routes.start(work.t) >= 0;
  const int lane = threadIdx.x % kWarpThreads;
  T* const state = static_cast<T*>(params.states.data) + slot * params.states.entry_stride +
                   work.hv * params.states.head_stride + lane * kCount;
  const int64_t pitch = params.states.v_stride;
  Lane next[kBatch];
  const auto fetch = [&](int v) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      if (starts) {
        load_channels<kK>(state + (v + r) * pitch, next[r]);
      } else {
#pragma unroll
        for (float& x : next[r].x) x = 0;
      }
    }
  };
  fetch(work.v);

  const KdaInput& input = params.input;
  const int head = work.hv / input.heads_per_key;
  const float rate = input.rate(work.hv);
  Lane k, q, decay;
  float dot = 0, k_squares = 0, q_squares = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int c = lane * kCount + i;
    k.x[i] = bf16_to_float(input.k(work.t, head, c));
    q.x[i] = bf16_to_float(input.q(work.t, head, c));
    decay.x[i] = cuda::exp2_fast(
        input.log2_decay(input.load_gate(work.t, work.hv, c), input.bias(work.hv, c), rate));
    dot = fmaf(q.x[i], k.x[i], dot);
    k_squares = fmaf(k.x[i], k.x[i], k_squares);
    q_squares = fmaf(q.x[i], q.x[i], q_squares);
  }
  float k_factor = 1, q_factor = input.scale;
  if (input.normalise) {
    k_factor = kda_inverse_norm(cuda::warp_sum(k_squares));
    q_factor *= kda_inverse_norm(cuda::warp_sum(q_squares));
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    k.x[i] *= k_factor;
    q.x[i] *= q_factor;
  }
  dot = cuda::warp_sum(dot) * k_factor * q_factor;
  const float beta = input.load_beta(work.t, work.hv);

  for (int v = work.v; v < end; v += kBatch) {
    Lane rows[kBatch];
    float sums[2 * kBatch];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      float seen = 0, read = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        // A state that starts at zero has no NaN to hand on, but its decay may be one.
        rows[r].x[i] = next[r].x[i] * decay.x[i];
        seen = fmaf(rows[r].x[i], k.x[i], seen);
        read = fmaf(rows[r].x[i], q.x[i], read);
      }
      sums[r] = seen;
      sums[kBatch + r] = read;
    }
    if (v + kBatch < end) fetch(v + kBatch);
    // Lane l and its neighbour l ^ 1 get sum l / 2: the even rows' u below 16, what they read
    // above.
    const float sum = cuda::sum_transposed16(sums);
    const float seen = __shfl_sync(0xFFFFFFFF, sum, 2 * (lane % kBatch));
    const float read = __shfl_sync(0xFFFFFFFF, sum, 2 * (lane % kBatch) + 2 * kBatch);
    const float own_v = bf16_to_float(input.v(work.t, work.hv, v + lane % kBatch));
    const float own_u = beta * (own_v - seen);
    if (lane < kBatch) {
      params.out(work.t, work.hv, v + lane) = bf16_from_float(fmaf(dot, own_u, read));
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const float u = __shfl_sync(0xFFFFFFFF, own_u, r);
#pragma unroll
      for (int i = 0; i < kCount; ++i) rows[r].x[i] = fmaf(k.x[i], u, rows[r].x[i]);
      store_channels<kK>(rows[r], state + (v + r) * pitch);
    }
  }
}

// Any K and V up to 256 and any strides, one row of V after the other.
__global__ void __launch_bounds__(kWarps* kWarpThreads)
    decode_any(const __grid_constant__ Params params) {
  if (params.refused != nullptr && *params.refused != 0) return;
  const Work work(params);
  const int end = min(work.v + params.warp_rows, params.head_dim_v);
  if (work.v >= end) return;
  const int64_t slot = params.routes.finish(work.t);
  if (slot < 0) return clear_out(params, work);
  const int64_t start = params.routes.start(work.t);
  const KdaInput& input = params.input;
  const int lane = threadIdx.x % kWarpThreads;
  const int head = work.hv / input.heads_per_key;
  const float rate = input.rate(work.hv);
  float k[kMaxLaneChannels], q[kMaxLaneChannels], decay[kMaxLaneChannels];
  float dot = 0, k_squares = 0, q_squares = 0;
#pragma unroll
  for (int i = 0; i < kMaxLaneChannels; ++i) {
    const int c = lane + i * kWarpThreads;
    k[i] = q[i] = decay[i] = 0;
    if (c >= params.head_dim_k) continue;
    k[i] = bf16_to_float(input.k(work.t, head, c));
    q[i] = bf16_to_float(input.q(work.t, head, c));
    decay[i] = cuda::exp2_fast(
        input.log2_decay(input.load_gate(work.t, work.hv, c), input.bias(work.hv, c), rate));
    dot = fmaf(q[i], k[i], dot);
    k_squares = fmaf(k[i], k[i], k_squares);
    q_squares = fmaf(q[i], q[i], q_squares);
  }
  float k_factor = 1, q_factor = input.scale;
  if (input.normalise) {
    k_factor = kda_inverse_norm(cuda::warp_sum(k_squares));
    q_factor *= kda_inverse_norm(cuda::warp_sum(q_squares));
  }
  dot = cuda::warp_sum(dot) * k_factor * q_factor;
  const float beta = input.load_beta(work.t, work.hv);
#pragma unroll 1
  for (int v = work.v; v < end; ++v) {
    float row[kMaxLaneChannels];
    float seen = 0, read = 0;
#pragma unroll
    for (int i = 0; i < kMaxLaneChannels; ++i) {
      const int c = lane + i * kWarpThreads;
      const bool used = c < params.head_dim_k;
      row[i] = used && start >= 0 ? params.states.load(start, work.hv, v, c) : 0.0f;
      row[i] *= decay[i];
      seen = fmaf(row[i], k[i], seen);
      read = fmaf(row[i], q[i], read);
    }
    const float value = bf16_to_float(input.v(work.t, work.hv, v));
    const float u = beta * (value - cuda::warp_sum(seen) * k_factor);
    read = cuda::warp_sum(read) * q_factor;
    if (lane == 0) params.out(work.t, work.hv, v) = bf16_from_float(fmaf(dot, u, read));
#pragma unroll
    for (int i = 0; i < kMaxLaneChannels; ++i) {
      const int c = lane + i * kWarpThreads;
      if (c >= params.head_dim_k) continue;
      params.states.store(slot, work.hv, v, c, fmaf(k[i] * k_factor, u, row[i]));
    }
  }
}

// Whether decode() takes the shape and the pool's addresses.
bool is_fast(const KdaDecodeProblem& problem, const StateAccess& states) {
  const KdaLayer& layer = problem.layer;
  const bool shape =
      (layer.head_dim_k == 64 || layer.head_dim_k == 128) && layer.head_dim_v % kBatch == 0;
  return shape && states.k_stride == 1 && states.entry_stride % 4 == 0 &&
         states.head_stride % 4 == 0 && states.v_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(states.data) % 16 == 0;
}

// Rows of V of a warp: many share the warp's preparation, few give more blocks.
int warp_rows_of(const KdaDecodeProblem& problem, const Device& device, int64_t rows) {
  const KdaLayer& layer = problem.layer;
  const int64_t wanted = int64_t{cuda::device_facts(device.ordinal).num_sms} * 8;
  for (int warp_rows = 32; warp_rows > kBatch; warp_rows /= 2) {
    const int64_t slices = (layer.head_dim_v + kWarps * warp_rows - 1) / (kWarps * warp_rows);
    if (rows * layer.num_value_heads * slices >= wanted) return warp_rows;
  }
  return kBatch;
}

void launch_decode(const KdaDecodeProblem& problem, const Params& params, int64_t rows,
                   Stream stream) {
  const auto blocks = static_cast<unsigned>(rows * problem.layer.num_value_heads * params.slices);
  const cuda::LaunchShape shape{dim3(blocks), dim3(kWarps * kWarpThreads)};
  const bool wide = problem.layer.head_dim_k == 128;
  if (!is_fast(problem, params.states)) {
    cuda::launch(kOp, decode_any, shape, stream, params);
  } else if (params.states.is_bf16) {
    cuda::launch(kOp, wide ? decode<128, bf16_t> : decode<64, bf16_t>, shape, stream, params);
  } else {
    cuda::launch(kOp, wide ? decode<128, float> : decode<64, float>, shape, stream, params);
  }
}

}  // namespace

Refusal kda_decode_cuda_supports(const KdaDecodeProblem& problem) {
  const KdaLayer& layer = problem.layer;
  const double blocks = static_cast<double>(problem.max_rows) *
                        static_cast<double>(layer.num_value_heads) *
                        static_cast<double>((layer.head_dim_v + kBatch - 1) / kBatch);
  if (blocks <= std::numeric_limits<int32_t>::max()) return {};
  return "takes at most 2^31 - 1 blocks of rows and value heads, got bounds of " +
         std::to_string(static_cast<int64_t>(std::min(blocks, 0x1p62)));
}

size_t kda_decode_cuda_workspace(const KdaDecodeProblem& problem, const Device&) {
  return problem.check ? 64 : 0;
}

void kda_decode_cuda_portable(const KdaDecodeProblem& problem, const Device& device,
                              const KdaDecodeTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const int64_t rows = tensors.out.shape[0];
  Params params{};
  params.input = KdaInput(problem.layer, split_qkv(problem.layer, tensors));
  params.out = access<bf16_t, 3>(tensors.out);
  params.states = StateAccess(tensors.state, StateLayout::kVk);
  params.routes = StateRoutes(tensors.state, tensors.slot, tensors.slot, tensors.has_initial_state);
  params.head_dim_k = static_cast<int>(problem.layer.head_dim_k);
  params.head_dim_v = static_cast<int>(problem.layer.head_dim_v);
  if (problem.check) {
    auto* const refused = static_cast<int32_t*>(workspace.data);
    cuda::launch_slot_check(kOp, tensors.slot, rows, params.routes.entries, refused,
                            static_cast<int32_t*>(tensors.report.data), stream);
    params.refused = refused;
  }
  if (rows == 0) return;
  params.warp_rows = warp_rows_of(problem, device, rows);
  const int block_rows = kWarps * params.warp_rows;
  params.slices = (params.head_dim_v + block_rows - 1) / block_rows;
  launch_decode(problem, params, rows, stream);
}

}  // namespace fovea::internal
