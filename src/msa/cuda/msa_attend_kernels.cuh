#pragma once

#include "src/msa/cuda/msa_attend_chain.cuh"

// The kernels around chains. Both take rows of several requests in one block, as a warp has its row
// to itself.
//   attend_rows   many rows: a warp per row and KV head, its whole list one chain
//   attend_parts  few rows: a block per row, KV head and part, a chain per warp; sums meet in
//                 shared memory, and parts in a launch of their own
// Sums over chains and parts are in their order.
namespace fovea::internal::msa {

inline constexpr int kRowWarps = 8;   // of attend_rows
inline constexpr int kPartWarps = 4;  // of attend_parts
inline constexpr int kFoldThreads = 128;
inline constexpr int kEight = 8;  // channels that a thread moves

// What a head's sums are multiplied with to become its output.
struct HeadResult {
  float lse;
  float factor;
  bool empty;
};

__device__ inline float natural_lse(float largest, float sum) {
  return fmaf(largest, 0.693147181f, logf(sum));
}

__device__ inline HeadResult finish_head(const AttendParams& params, int64_t kv_head, int64_t head,
                                         float largest, float sum) {
  HeadResult result{kNegInf, 0.0f, sum == 0};
  if (result.empty) return result;
  result.lse = natural_lse(largest, sum);
  result.factor = 1.0f / sum;
  const MsaAttendInputs& inputs = params.inputs;
  if (inputs.sink) result.factor *= sink_factor(inputs.sink(head), result.lse);
  if (!inputs.v_scale.per_row()) result.factor *= inputs.v_scale.at(0, kv_head);
  return result;
}

// Adding +0 turns -0 into +0: an order of sums must not show in the sign of a zero.
template <int kCount>
__device__ inline void store_channels(const HeadResult& head, const float (&values)[kCount],
                                      bf16_t* to) {
  static_assert(kCount == 4 || kCount == 8);
  uint32_t words[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float low = head.empty ? 0.0f : values[2 * i] * head.factor + 0.0f;
    const float high = head.empty ? 0.0f : values[2 * i + 1] * head.factor + 0.0f;
    words[i] = cuda::bf16_pair(low, high);
  }
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}

// Steps of a list: only its last block may be seen in part.
__device__ inline int count_steps(const AttendParams& params, const MsaRow& row,
                                  const ListMemory& list, int num_blocks) {
  if (num_blocks == 0) return 0;
  const auto seen = static_cast<int>(
      msa_visible_tokens(row, list.blocks[num_blocks - 1], params.block_size, params.causal));
  return (num_blocks - 1) * params.steps_per_block + (seen + kStepKeys - 1) / kStepKeys;
}

template <Stored kStored, int kDim, bool kWide>
__global__ void __launch_bounds__(kRowWarps* kWarpThreads, 1)
    attend_rows(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) uint8_t memory[];
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  // Neighbouring blocks have neighbouring rows of one KV head, which share most of their tokens.
  const int64_t kv_head = blockIdx.x / static_cast<uint32_t>(params.num_tiles);
  const int64_t tile = blockIdx.x % static_cast<uint32_t>(params.num_tiles);
  const int64_t t = tile * kRowWarps + warp;
  if (t >= params.num_rows) return;
  const ListMemory list(reinterpret_cast<int32_t*>(memory) + warp * 3 * params.topk, params.topk);
  const MsaRow row = find_msa_row(params.rows, t);
  const int num_blocks = read_list(params, row, t, kv_head, list);
  const int first_channel = blockIdx.y * kDim;
  Chain<kStored, kDim, kWide> chain(params, t, kv_head, first_channel);
  ChainState state;
  MmaC values[kDim / 8];
  chain.run(row, list, 0, count_steps(params, row, list, num_blocks), state, values);
  HeadResult results[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = lane / 4 + 8 * half;
    if (own >= params.group) continue;
    const int64_t head = kv_head * params.group + own;
    results[half] = finish_head(params, kv_head, head, state.largest[half], state.sum[half]);
    if (params.inputs.lse && lane % 4 == 0 && blockIdx.y == 0) {
      params.inputs.lse(t, head) = results[half].lse;
    }
  }
  chain.for_outputs(values, [&](int half, int channel, const float(&eight)[kEight]) {
    const int64_t head = kv_head * params.group + lane / 4 + 8 * half;
    store_channels(results[half], eight, params.inputs.out.row(t, head) + channel);
  });
}

// The sums of a head over several sources, relative to the largest logit of all.
struct HeadSums {
  float largest = kNegInf;
  float base = 0;  // not -inf, as -inf minus -inf would be NaN
  float sum = 0;
};

// state(i)[0], [1]: largest logit and sum of source i.
template <class State>
__device__ HeadSums add_states(int num_sources, State state) {
  HeadSums sums;
  for (int i = 0; i < num_sources; ++i) sums.largest = fmaxf(sums.largest, state(i)[0]);
  sums.base = sums.largest == kNegInf ? 0.0f : sums.largest;
  for (int i = 0; i < num_sources; ++i) {
    sums.sum = fmaf(state(i)[1], cuda::exp2_fast(state(i)[0] - sums.base), sums.sum);
  }
  return sums;
}

template <class State, class Values>
__device__ void add_values(int num_sources, const HeadSums& sums, State state, Values values,
                           float (&total)[kEight]) {
#pragma unroll
  for (float& x : total) x = 0;
  for (int i = 0; i < num_sources; ++i) {
    const float factor = cuda::exp2_fast(state(i)[0] - sums.base);
    const auto* const from = reinterpret_cast<const float4*>(values(i));
    const float4 low = from[0];
    const float4 high = from[1];
    const float eight[kEight] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < kEight; ++j) total[j] = fmaf(factor, eight[j], total[j]);
  }
}

template <int kDim>
struct PartMemory {
  // Rows an odd number of 16-byte units apart.
  float values[kPartWarps][kMaxGroup][kDim + 4];
  float state[kPartWarps][kMaxGroup][2];
};

template <Stored kStored, int kDim, bool kWide>
__global__ void __launch_bounds__(kPartWarps* kWarpThreads, 2)
    attend_parts(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<PartMemory<kDim>*>(memory);
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  const auto kv_heads = static_cast<uint32_t>(params.num_kv_heads);
  const int64_t t = blockIdx.x / kv_heads;
  const int64_t kv_head = blockIdx.x % kv_heads;
  const int part = blockIdx.y;
  const int first_channel = blockIdx.z * kDim;
  {
    const ListMemory list(
        reinterpret_cast<int32_t*>(memory + sizeof(PartMemory<kDim>)) + warp * 3 * params.topk,
        params.topk);
    const MsaRow row = params.rows.offsets != nullptr ? find_msa_row(params.rows, t)
                                                      : seek_msa_row(params.rows.batch, t);
    const int num_blocks = read_list(params, row, t, kv_head, list);
    const int steps = count_steps(params, row, list, num_blocks);
    const int num_chains = params.num_parts * kPartWarps;
    const int chain_index = part * kPartWarps + warp;
    const auto step_of = [&](int i) {
      return static_cast<int>(int64_t{steps} * i / static_cast<uint32_t>(num_chains));
    };
    Chain<kStored, kDim, kWide> chain(params, t, kv_head, first_channel);
    ChainState state;
    MmaC values[kDim / 8];
    chain.run(row, list, step_of(chain_index), step_of(chain_index + 1), state, values);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 != 0) continue;
      shared.state[warp][lane / 4 + 8 * half][0] = state.largest[half];
      shared.state[warp][lane / 4 + 8 * half][1] = state.sum[half];
    }
    chain.for_outputs(values, [&](int half, int channel, const float(&eight)[kEight]) {
      auto* const to = reinterpret_cast<float4*>(
          &shared.values[warp][lane / 4 + 8 * half][channel - first_channel]);
      to[0] = make_float4(eight[0], eight[1], eight[2], eight[3]);
      to[1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
    });
  }
  __syncthreads();
  const int units = min(kDim, params.head_dim - first_channel) / kEight;
  const int64_t pair = t * params.num_kv_heads + kv_head;
  for (int i = threadIdx.x; i < params.group * units; i += kPartWarps * kWarpThreads) {
    const int own = i / units;
    const int channel = i % units * kEight;
    const auto state = [&](int w) { return shared.state[w][own]; };
    const HeadSums sums = add_states(kPartWarps, state);
    float total[kEight];
    add_values(
        kPartWarps, sums, state, [&](int w) { return &shared.values[w][own][channel]; }, total);
    const bool first = channel == 0 && blockIdx.z == 0;
    if (params.num_parts == 1) {
      const int64_t head = kv_head * params.group + own;
      const HeadResult result = finish_head(params, kv_head, head, sums.largest, sums.sum);
      if (params.inputs.lse && first) params.inputs.lse(t, head) = result.lse;
      store_channels(result, total, params.inputs.out.row(t, head) + first_channel + channel);
      continue;
    }
    const int64_t at = (pair * params.num_parts + part) * params.group + own;
    if (first) {
      params.part_state[2 * at] = sums.largest;
      params.part_state[2 * at + 1] = sums.sum;
    }
    auto* const to = reinterpret_cast<float4*>(params.part_values + at * params.head_dim +
                                               first_channel + channel);
    to[0] = make_float4(total[0], total[1], total[2], total[3]);
    to[1] = make_float4(total[4], total[5], total[6], total[7]);
  }
}

// A block per row and KV head.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    fold_parts(const __grid_constant__ AttendParams params) {
  const auto kv_heads = static_cast<uint32_t>(params.num_kv_heads);
  const int64_t t = blockIdx.x / kv_heads;
  const int64_t kv_head = blockIdx.x % kv_heads;
  const int units = params.head_dim / kEight;
  for (int i = threadIdx.x; i < params.group * units; i += kThreads) {
    const int own = i / units;
    const int channel = i % units * kEight;
    const int64_t first_at = int64_t{blockIdx.x} * params.num_parts * params.group + own;
    const auto at = [&](int part) { return first_at + int64_t{part} * params.group; };
    const auto state = [&](int part) { return params.part_state + 2 * at(part); };
    const HeadSums sums = add_states(params.num_parts, state);
    float total[kEight];
    add_values(
        params.num_parts, sums, state,
        [&](int part) { return params.part_values + at(part) * params.head_dim + channel; }, total);
    const int64_t head = kv_head * params.group + own;
    const HeadResult result = finish_head(params, kv_head, head, sums.largest, sums.sum);
    if (params.inputs.lse && channel == 0) params.inputs.lse(t, head) = result.lse;
    store_channels(result, total, params.inputs.out.row(t, head) + channel);
  }
}

inline constexpr char kAttendOp[] = "msa_attend";

// Of so many requests a warp finds that of its row in the time that a launch takes.
inline constexpr int64_t kMaxSoughtRequests = 512;

inline int64_t steps_per_block(int64_t block_size) {
  return (block_size + kStepKeys - 1) / kStepKeys;
}

// What every way to run has in common. Starts the kernel that fills offsets[0 .. R], unless there
// are none.
inline AttendParams attend_params(const MsaAttendProblem& problem, const MsaAttendTensors& tensors,
                                  int32_t* offsets, Stream stream) {
  AttendParams params{};
  params.num_rows = tensors.q.shape[0];
  params.inputs = msa_attend_inputs(problem, tensors);
  params.q = tensors.q.data;
  params.q_row = tensors.q.stride[0];
  params.q_head = tensors.q.stride[1];
  params.q_is_e4m3 = tensors.q.dtype != DType::kBf16;
  params.causal = problem.causal;
  params.num_tiles = (params.num_rows + kRowWarps - 1) / kRowWarps;
  params.num_kv_heads = static_cast<int>(problem.num_kv_heads);
  params.group = static_cast<int>(problem.num_heads / problem.num_kv_heads);
  params.head_dim = static_cast<int>(problem.head_dim);
  params.block_size = static_cast<int>(problem.block_size);
  params.steps_per_block = static_cast<int>(steps_per_block(problem.block_size));
  params.topk = static_cast<int>(problem.topk);
  params.softmax_scale = problem.softmax_scale;
  const MsaBatch batch =
      msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset, params.num_rows,
                params.inputs.page_table.shape[1], problem.block_size);
  params.rows = offsets == nullptr ? MsaDeviceRows{batch, nullptr}
                                   : launch_msa_rows(kAttendOp, batch, offsets, stream);
  return params;
}

template <Stored kStored, int kDim, bool kWide>
void launch_chains(const AttendParams& params, bool by_rows, Stream stream) {
  const auto chunks = static_cast<unsigned>((params.head_dim + kDim - 1) / kDim);
  const size_t list_bytes = ListMemory::bytes(params.topk);
  if (by_rows) {
    cuda::launch(kAttendOp, attend_rows<kStored, kDim, kWide>,
                 {dim3(static_cast<unsigned>(params.num_tiles * params.num_kv_heads), chunks),
                  dim3(kRowWarps * kWarpThreads), kRowWarps * list_bytes},
                 stream, params);
    return;
  }
  cuda::launch(
      kAttendOp, attend_parts<kStored, kDim, kWide>,
      {dim3(static_cast<unsigned>(params.num_rows * params.num_kv_heads),
            static_cast<unsigned>(params.num_parts), chunks),
       dim3(kPartWarps * kWarpThreads), sizeof(PartMemory<kDim>) + kPartWarps * list_bytes},
      stream, params);
}

template <Stored kStored>
void launch_attend(const AttendParams& params, bool by_rows, Stream stream) {
  if (params.head_dim <= 64) {
    launch_chains<kStored, 64, false>(params, by_rows, stream);
  } else if (params.head_dim <= 128) {
    launch_chains<kStored, 128, false>(params, by_rows, stream);
  } else {
    launch_chains<kStored, 128, true>(params, by_rows, stream);
  }
}

// One file each: msa_attend_<stored>.cu.
void launch_attend_bf16(const AttendParams& params, bool by_rows, Stream stream);
void launch_attend_e4m3(const AttendParams& params, bool by_rows, Stream stream);
void launch_attend_e2m1(const AttendParams& params, bool by_rows, Stream stream);

}  // namespace fovea::internal::msa
