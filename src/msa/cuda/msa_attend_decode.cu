#include <algorithm>
#include <limits>

#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/cluster.cuh"
#include "src/core/workspace.h"
#include "src/msa/cuda/msa_attend_kernels.cuh"

// Few rows, bf16, compute capability 9.0: chains (msa_attend_chain.cuh) whose keys and values come
// through shared memory. A warp has a ring of its own there and keeps its next steps under way, so
// that nothing waits for another warp before the sums meet: those of four warps in the block, those
// of the parts of a row in a cluster of blocks.
//
// Budget: 96 KiB of ring a block, two blocks a multiprocessor, so up to 192 KiB under way where
// about 32 KiB hide the latency of memory at its full rate.
namespace fovea::internal::msa {

// Swizzles: the 16-byte unit u of token t lies at u ^ key_place(t), u ^ value_place(t), so that the
// eight lanes that read at a time meet all banks: of keys units 4 d .. 4 d + 3 of tokens 2 p and
// 2 p + 1, of values one unit of eight tokens.
__device__ inline int key_place(int token) { return token % 2 * 4; }
__device__ inline int value_place(int token) { return token % 8; }

// read_list() that asks for what it needs as early as addresses allow: lists and offsets of
// requests, then lengths and pages, one way to memory each time. Returns the row, too. Lanes hold
// the entries of a list that is not longer than a warp.
__device__ inline int read_list_early(const AttendParams& params, int64_t t, int64_t kv_head,
                                      const ListMemory& list, MsaRow* row) {
  const MsaAttendInputs& inputs = params.inputs;
  const int lane = threadIdx.x % kWarpThreads;
  const int32_t n = lane < params.topk ? inputs.lists.row(kv_head, t)[lane] : -1;
  const MsaRowPlace place = __builtin_expect(params.rows.offsets != nullptr, 0)
                                ? find_msa_place(params.rows, t)
                                : seek_msa_place(params.rows.batch, t);
  int32_t page = -1;
  if (place.request >= 0 && n >= 0 && n < inputs.page_table.shape[1]) {
    page = inputs.page_table(place.request, n);
  }
  *row = place.row(params.rows.batch, t);
  if (__builtin_expect(params.topk > kWarpThreads, 0)) {
    return read_list(params, *row, t, kv_head, list);
  }
  if (row->is_empty()) return 0;
  const bool seen = page >= 0 && page < inputs.k.num_pages &&
                    msa_visible_tokens(*row, n, params.block_size, params.causal) > 0;

  // Those that count, in the order of the list; then in their own, each once.
  const auto keep = [&](bool kept, int32_t block, int32_t its_page) {
    const uint32_t all = __ballot_sync(0xFFFFFFFF, kept);
    if (kept) {
      const int at = __popc(all & ((1u << lane) - 1));
      list.blocks[at] = block;
      list.pages[at] = its_page;
    }
    __syncwarp();
    return __popc(all);
  };
  const int count = keep(seen, n, page);
  const bool present = lane < count;
  const auto before = [&] { return lane > 0 ? list.blocks[lane - 1] : -1; };
  if (!__any_sync(0xFFFFFFFF, present && list.blocks[lane] <= before())) return count;

  const int32_t own = present ? list.blocks[lane] : 0;
  const int32_t own_page = present ? list.pages[lane] : 0;
  int rank = 0;
#pragma unroll 4
  for (int j = 0; j < count; ++j) {
    const int32_t other = list.blocks[j];
    rank += other < own || (other == own && j < lane) ? 1 : 0;
  }
  __syncwarp();
  if (present) {
    list.blocks[rank] = own;
    list.pages[rank] = own_page;
  }
  __syncwarp();
  const int32_t sorted = present ? list.blocks[lane] : 0;
  const int32_t sorted_page = present ? list.pages[lane] : 0;
  const bool fresh = present && sorted != before();
  __syncwarp();
  return keep(fresh, sorted, sorted_page);
}

namespace {

constexpr int64_t kMaxParts = 16;  // blocks of the largest cluster
constexpr int kBlocksPerSm = 2;

template <int kDim>
struct Stage {
  static constexpr int kUnits = kDim / 8;
  uint4 keys[kStepKeys][kUnits];
  uint4 values[kStepKeys][kUnits];
};

// What a warp leaves behind. Eight rows of pairs, as lanes store them, meet all banks.
template <int kDim>
struct WarpSums {
  float values[kMaxGroup][kDim + 8];
  float state[kMaxGroup][2];
};

template <int kDim>
struct WarpMemory {
  static constexpr int kStages = 3 * 128 / kDim;
  union {
    Stage<kDim> stages[kStages];
    WarpSums<kDim> sums;  // once all of the warp's steps are done
  };
};

template <int kDim>
struct DecodeMemory {
  WarpMemory<kDim> warps[kPartWarps];
  float2 part_state[kMaxGroup];  // largest logit and sum of the block
};

// A chain whose steps pass through a ring in shared memory. Its weights are relative to a reference
// that follows the largest logit by more than kSlack only, so that few steps change old sums.
template <int kDim>
class StagedChain : public Chain<Stored::kBf16, kDim, false> {
  using Base = Chain<Stored::kBf16, kDim, false>;
  using Ring = Stage<kDim>[WarpMemory<kDim>::kStages];
  static constexpr int kStages = WarpMemory<kDim>::kStages;
  static constexpr int kUnits = Stage<kDim>::kUnits;
  static constexpr int kUnitBytes = 16;
  static constexpr int kRowBytes = kUnits * kUnitBytes;
  static constexpr int kTokens = kWarpThreads / kUnits;  // that a warp copies at a time
  static constexpr int kPlaces = 8 / kTokens;
  static constexpr float kSlack = 8;  // weights up to 2^8

 public:
  __device__ StagedChain(const AttendParams& params, int64_t t, int64_t kv_head, Ring& ring)
      : Base(params, t, kv_head, 0), ring_(ring) {
    const int lane = threadIdx.x % kWarpThreads;
    const MsaPool& k = params.inputs.k;
    unit_ = lane % kUnits;
    token_ = lane / kUnits;
    key_at_ = kUnitBytes * (token_ * kUnits + (unit_ ^ key_place(token_)));
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int token = i * kTokens + token_;
      value_at_[i] = kUnitBytes * (token * kUnits + (unit_ ^ value_place(token)));
    }
    const int64_t own = 2 * (k.offset(0, kv_head, token_) + 8 * unit_);
    keys_ = static_cast<const uint8_t*>(k.data) + own;
    values_ = static_cast<const uint8_t*>(params.inputs.v.data) + own;
  }

  // Every lane has the state and its share of the values afterwards: of heads lane / 4 and + 8
  // channels 8 j + 2 (lane % 4) and the next in values[j].
  __device__ void run(const MsaRow& row, const ListMemory& list, int first_step, int end_step,
                      ChainState& state, MmaC (&values)[Base::kProducts]) const {
    const StepWalk steps(this->params_, row, list, first_step, end_step);
    Base::go([&](bool careful) { walk(steps, careful, state, values); }, state, values);
  }

 private:
  // Pools have equal strides.
  __device__ void fetch(const Step& step, Stage<kDim>& stage) const {
    const MsaPool& k = this->params_.inputs.k;
    const int64_t first = 2 * (step.page * k.page_stride + step.token * k.token_stride);
    if (this->params_.head_dim == kDim && step.count >= kStepKeys) {
      copy(first, stage, [](int) { return true; });
    } else {
      const bool inside = 8 * unit_ < this->params_.head_dim;
      copy(first, stage, [&](int token) { return inside && token < step.count; });
    }
  }
  template <class Present>
  __device__ void copy(int64_t first, Stage<kDim>& stage, Present present) const {
    const int64_t pitch = 2 * kTokens * this->params_.inputs.k.token_stride;
    const uint8_t* key = keys_ + first;
    const uint8_t* value = values_ + first;
    auto* const key_to = reinterpret_cast<uint8_t*>(stage.keys) + key_at_;
    auto* const value_to = reinterpret_cast<uint8_t*>(stage.values);
#pragma unroll
    for (int i = 0; i < kStepKeys / kTokens; ++i) {
      // Places repeat after 2 and 8 tokens.
      const bool is_present = present(i * kTokens + token_);
      cuda::copy_async<kUnitBytes>(key_to + i * kTokens * kRowBytes, key, is_present);
      cuda::copy_async<kUnitBytes>(value_to + i / kPlaces * 8 * kRowBytes + value_at_[i % kPlaces],
                                   value, is_present);
      key += pitch;
      value += pitch;
    }
  }

  // Products in, weights out, as sums of two bf16.
  __device__ void weigh(const Step& step, MmaC (&logits)[2], ChainState& state,
                        MmaC (&values)[Base::kProducts], MmaA& rounded, MmaA& rest) const {
    if (step.count < kStepKeys) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * u + 2 * this->c_ + i % 2 >= step.count) logits[u].x[i] = kNegInf;
        }
      }
    }
    // NaN is no largest logit: its weight is NaN, whatever became of it.
    float largest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(fmaxf(logits[0].x[2 * half], logits[0].x[2 * half + 1]),
                            fmaxf(logits[1].x[2 * half], logits[1].x[2 * half + 1]));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xFFFFFFFF, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xFFFFFFFF, largest[half], 2));
      largest[half] *= this->scale_;
    }
    const bool grows[2] = {largest[0] > state.largest[0] + kSlack,
                           largest[1] > state.largest[1] + kSlack};
    if (__any_sync(0xFFFFFFFF, grows[0] || grows[1])) {
      float shrink[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shrink[half] = grows[half] ? cuda::exp2_fast(state.largest[half] - largest[half]) : 1.0f;
        if (grows[half]) state.largest[half] = largest[half];
        state.sum[half] *= shrink[half];
      }
#pragma unroll
      for (MmaC& value : values) {
#pragma unroll
        for (int i = 0; i < 4; ++i) value.x[i] *= shrink[i / 2];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // While all logits are -inf, subtract 0: -inf minus -inf would be NaN.
      const float base = state.largest[half] == kNegInf ? 0.0f : state.largest[half];
      float sum = 0;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        float weights[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          weights[e] = cuda::exp2_fast(fmaf(logits[u].x[2 * half + e], this->scale_, -base));
          sum += weights[e];
        }
        const cuda::SplitPair pair(weights[0], weights[1]);
        rounded.x[2 * u + half] = pair.rounded;
        rest.x[2 * u + half] = pair.rest;
      }
      state.sum[half] += sum;
    }
  }

  template <bool kCareful>
  __device__ static void add_stage(const Stage<kDim>& stage, const MmaA& rounded, const MmaA& rest,
                                   MmaC (&values)[Base::kProducts]) {
    const int lane = threadIdx.x % kWarpThreads;
    const int token = lane % kStepKeys;
#pragma unroll
    for (int j = 0; j < Base::kProducts; j += 2) {
      MmaB low, high;
      cuda::load_b_units(&stage.values[token][(j + lane / kStepKeys) ^ value_place(token)], low,
                         high);
      cuda::mma(values[j], rounded, low);
      cuda::mma(values[j + 1], rounded, high);
      if constexpr (kCareful) {
        low = {{finite_pair(low.x[0]), finite_pair(low.x[1])}};
        high = {{finite_pair(high.x[0]), finite_pair(high.x[1])}};
      }
      cuda::mma(values[j], rest, low);
      cuda::mma(values[j + 1], rest, high);
    }
  }

  __device__ void add_step(const Step& step, const Stage<kDim>& stage, bool careful,
                           ChainState& state, MmaC (&values)[Base::kProducts]) const {
    uint4 keys[2][Base::kDeep];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int token = 8 * u + this->g_;
#pragma unroll
      for (int d = 0; d < Base::kDeep; ++d) {
        keys[u][d] = stage.keys[token][(4 * d + this->c_) ^ key_place(token)];
      }
    }
    MmaC logits[2] = {};
    this->multiply_all(keys, logits);
    MmaA rounded, rest;
    weigh(step, logits, state, values, rounded, rest);
    if (careful) {
      add_stage<true>(stage, rounded, rest, values);
    } else {
      add_stage<false>(stage, rounded, rest, values);
    }
  }

  __device__ void walk(StepWalk steps, bool careful, ChainState& state,
                       MmaC (&values)[Base::kProducts]) const {
#pragma unroll
    for (MmaC& value : values) value = {};
    state = {{kNegInf, kNegInf}, {0, 0}};
    // A group of copies a stage, also where nothing is left to fetch: the number of groups behind
    // the one that is waited for stays.
    StepWalk ahead = steps;
    const auto fetch_next = [&](int stage) {
      if (!ahead.done()) {
        fetch(ahead.step(), ring_[stage]);
        ahead.advance();
      }
      cuda::commit_copies();
    };
    int stage = 0;
    int turns = kStages;  // that only fetch
#pragma unroll 1
    while (!steps.done()) {
      if (turns > 0) {
        --turns;
      } else {
        const Step step = steps.step();
        steps.advance();
        cuda::wait_copies<kStages - 1>();
        __syncwarp();
        add_step(step, ring_[stage], careful, state, values);
        __syncwarp();
      }
      fetch_next(stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // Groups of nothing.
    cuda::wait_for_copies();
  }

  Ring& ring_;
  int unit_, token_;                // of each copy, the first one's token
  int key_at_, value_at_[kPlaces];  // of the first copies, in a stage
  const uint8_t *keys_, *values_;   // the lane's piece of token_ of page 0
};

// The sums of the warps, in their order. With several parts they stay in the block, in the
// place of the first warp's.
template <int kParts, int kDim>
__device__ void add_warps(const AttendParams& params, int64_t t, int64_t kv_head,
                          DecodeMemory<kDim>& shared) {
  const int units = params.head_dim / kEight;
  for (int i = threadIdx.x; i < params.group * units; i += kPartWarps * kWarpThreads) {
    const int own = i / units;
    const int channel = i % units * kEight;
    const auto state = [&](int w) { return shared.warps[w].sums.state[own]; };
    const HeadSums sums = add_states(kPartWarps, state);
    float total[kEight];
    add_values(
        kPartWarps, sums, state, [&](int w) { return &shared.warps[w].sums.values[own][channel]; },
        total);
    if constexpr (kParts == 1) {
      const int64_t head = kv_head * params.group + own;
      const HeadResult result = finish_head(params, kv_head, head, sums.largest, sums.sum);
      if (params.inputs.lse && channel == 0) params.inputs.lse(t, head) = result.lse;
      store_channels(result, total, params.inputs.out.row(t, head) + channel);
    } else {
      if (channel == 0) shared.part_state[own] = make_float2(sums.largest, sums.sum);
      auto* const to = reinterpret_cast<float4*>(&shared.warps[0].sums.values[own][channel]);
      to[0] = make_float4(total[0], total[1], total[2], total[3]);
      to[1] = make_float4(total[4], total[5], total[6], total[7]);
    }
  }
}

// The sums of the blocks of a cluster, in their order; each block takes its share of the channels.
template <int kParts, int kDim>
__device__ void add_parts(const AttendParams& params, int64_t t, int64_t kv_head, int part,
                          const DecodeMemory<kDim>& shared) {
  constexpr int kFour = 4;  // channels of a thread
  const int units = params.head_dim / kFour;
  const int share = (params.group * units + kParts - 1) / kParts;
  const int end = min((part + 1) * share, params.group * units);
  cuda::cluster_arrive();
  cuda::cluster_wait();
  for (int i = part * share + threadIdx.x; i < end; i += kPartWarps * kWarpThreads) {
    const int own = i / units;
    const int channel = i % units * kFour;
    float2 states[kParts];
    float4 values[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      states[p] = cuda::load_from_cluster(&shared.part_state[own], p);
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      values[p] = cuda::load_from_cluster(
          reinterpret_cast<const float4*>(&shared.warps[0].sums.values[own][channel]), p);
    }
    float largest = kNegInf;
#pragma unroll
    for (const float2& state : states) largest = fmaxf(largest, state.x);
    const float base = largest == kNegInf ? 0.0f : largest;
    float sum = 0;
    float total[kFour] = {};
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const float factor = cuda::exp2_fast(states[p].x - base);
      sum = fmaf(states[p].y, factor, sum);
      total[0] = fmaf(factor, values[p].x, total[0]);
      total[1] = fmaf(factor, values[p].y, total[1]);
      total[2] = fmaf(factor, values[p].z, total[2]);
      total[3] = fmaf(factor, values[p].w, total[3]);
    }
    const int64_t head = kv_head * params.group + own;
    const HeadResult result = finish_head(params, kv_head, head, largest, sum);
    if (params.inputs.lse && channel == 0) params.inputs.lse(t, head) = result.lse;
    store_channels(result, total, params.inputs.out.row(t, head) + channel);
  }
  // No block ends while others read its sums.
  cuda::cluster_arrive();
  cuda::cluster_wait();
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FOVEA_CLUSTER_OF(parts) __cluster_dims__(parts, 1, 1)
#define FOVEA_SM90_ONLY(...) __VA_ARGS__
#else
#define FOVEA_CLUSTER_OF(parts)
#define FOVEA_SM90_ONLY(...)
#endif

// A chain per warp.
template <int kParts, int kDim>
__device__ void attend_part(const AttendParams& params, uint8_t* memory) {
  auto& shared = *reinterpret_cast<DecodeMemory<kDim>*>(memory);
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  const auto kv_heads = static_cast<uint32_t>(params.num_kv_heads);
  const uint32_t pair = blockIdx.x / kParts;
  const int part = static_cast<int>(blockIdx.x % kParts);
  const int64_t t = pair / kv_heads;
  const int64_t kv_head = pair % kv_heads;
  const ListMemory list(
      reinterpret_cast<int32_t*>(memory + sizeof(DecodeMemory<kDim>)) + warp * 3 * params.topk,
      params.topk);
  WarpMemory<kDim>& own = shared.warps[warp];
  const StagedChain<kDim> chain(params, t, kv_head, own.stages);
  MsaRow row;
  const int num_blocks = read_list_early(params, t, kv_head, list, &row);
  const int64_t steps = count_steps(params, row, list, num_blocks);
  constexpr int kChains = kParts * kPartWarps;
  const int index = part * kPartWarps + warp;
  const auto step_of = [&](int i) { return static_cast<int>(steps * i / kChains); };
  ChainState state;
  MmaC values[kDim / 8];
  chain.run(row, list, step_of(index), step_of(index + 1), state, values);
  // The ring is the warp's own; its other lanes have read their last step.
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = lane / 4 + 8 * half;
    if (lane % 4 == 0) {
      own.sums.state[head][0] = state.largest[half];
      own.sums.state[head][1] = state.sum[half];
    }
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      *reinterpret_cast<float2*>(&own.sums.values[head][8 * j + 2 * (lane % 4)]) =
          make_float2(values[j].x[2 * half], values[j].x[2 * half + 1]);
    }
  }
  __syncthreads();
  add_warps<kParts>(params, t, kv_head, shared);
  if constexpr (kParts > 1) add_parts<kParts>(params, t, kv_head, part, shared);
}

// A block per row and KV head.
template <int kDim>
__global__ void __launch_bounds__(kPartWarps* kWarpThreads, kBlocksPerSm)
    attend_alone(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) uint8_t memory[];
  FOVEA_SM90_ONLY(attend_part<1, kDim>(params, memory));
}

// A cluster of kParts blocks per row and KV head.
template <int kDim, int kParts>
__global__ void FOVEA_CLUSTER_OF(kParts) __launch_bounds__(kPartWarps* kWarpThreads, kBlocksPerSm)
    attend_cluster(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) uint8_t memory[];
  FOVEA_SM90_ONLY(attend_part<kParts, kDim>(params, memory));
}

// Blocks of a cluster: as many as leave two steps to a warp and a multiprocessor to a block. (Two
// blocks a multiprocessor were slower: their clusters do not all run at the same time.) A plan
// whose rows may not depend on their number has one.
int64_t parts_of(const MsaAttendProblem& problem, const Device& device) {
  if (problem.batch_invariant) return 1;
  const int64_t room = cuda::device_facts(device.ordinal).num_sms;
  const int64_t pairs = std::max<int64_t>(1, problem.max_rows * problem.num_kv_heads);
  const int64_t most =
      std::min(room / pairs, std::min(problem.topk, problem.max_pages) *
                                 steps_per_block(problem.block_size) / (2 * kPartWarps));
  int64_t parts = 1;
  while (2 * parts <= std::min(most, kMaxParts)) parts *= 2;
  return parts;
}

template <int kDim>
void launch_blocks(const AttendParams& params, void (*kernel)(AttendParams), Stream stream) {
  const int64_t blocks = params.num_rows * params.num_kv_heads * params.num_parts;
  cuda::launch(kAttendOp, kernel,
               {dim3(static_cast<unsigned>(blocks)), dim3(kPartWarps * kWarpThreads),
                sizeof(DecodeMemory<kDim>) + kPartWarps * ListMemory::bytes(params.topk)},
               stream, params);
}

template <int kDim>
void launch_decode(const AttendParams& params, Stream stream) {
  switch (params.num_parts) {
    case 1:
      return launch_blocks<kDim>(params, attend_alone<kDim>, stream);
    case 2:
      return launch_blocks<kDim>(params, attend_cluster<kDim, 2>, stream);
    case 4:
      return launch_blocks<kDim>(params, attend_cluster<kDim, 4>, stream);
    case 8:
      return launch_blocks<kDim>(params, attend_cluster<kDim, 8>, stream);
    default:
      cuda::allow_large_clusters(attend_cluster<kDim, 16>);
      return launch_blocks<kDim>(params, attend_cluster<kDim, 16>, stream);
  }
}

int32_t* cut_offsets(const MsaAttendProblem& problem, WorkspaceCutter& cutter) {
  const bool sought = problem.max_requests <= kMaxSoughtRequests;
  return sought ? nullptr : cutter.take<int32_t>(problem.max_requests + 1);
}

}  // namespace
}  // namespace fovea::internal::msa

namespace fovea::internal {

Refusal msa_attend_cuda_sm90_decode_supports(const MsaAttendProblem& problem) {
  constexpr int64_t kMaxDim = 128;
  constexpr int64_t kMaxTopk = 1024;
  if (problem.kv_mode != MsaKvMode::kBf16) return "takes kv_mode bf16 only";
  const int64_t group = problem.num_heads / problem.num_kv_heads;
  if (group > msa::kMaxGroup) {
    return "needs at most " + std::to_string(msa::kMaxGroup) + " query heads per KV head, got " +
           std::to_string(group);
  }
  if (problem.head_dim > kMaxDim) {
    return "takes head_dim up to " + std::to_string(kMaxDim) + ", got " +
           std::to_string(problem.head_dim);
  }
  if (problem.topk > kMaxTopk) {
    return "takes lists of at most " + std::to_string(kMaxTopk) +
           " blocks, got topk = " + std::to_string(problem.topk);
  }
  const int64_t pairs = problem.max_rows * problem.num_kv_heads;
  if (pairs > std::numeric_limits<int32_t>::max()) {
    return "takes at most 2^31 - 1 rows times KV heads, got bounds of " + std::to_string(pairs);
  }
  return {};
}

Refusal msa_attend_cuda_sm90_decode_preferred(const MsaAttendProblem& problem) {
  constexpr int64_t kMaxPairs = 1024;  // rows times KV heads
  // Whatever the bounds are: the bits must not depend on them.
  if (problem.batch_invariant) return {};
  if (problem.max_rows * problem.num_kv_heads > kMaxPairs) {
    return "reads a block once for every row that lists it: pays up to " +
           std::to_string(kMaxPairs) + " rows times KV heads";
  }
  return {};
}

size_t msa_attend_cuda_sm90_decode_workspace(const MsaAttendProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  msa::cut_offsets(problem, cutter);
  return cutter.used_bytes();
}

void msa_attend_cuda_sm90_decode(const MsaAttendProblem& problem, const Device& device,
                                 const MsaAttendTensors& tensors, Workspace workspace,
                                 Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  int32_t* const offsets = msa::cut_offsets(problem, cutter);
  if (tensors.q.shape[0] == 0) return;
  msa::AttendParams params = msa::attend_params(problem, tensors, offsets, stream);
  params.num_parts = static_cast<int>(msa::parts_of(problem, device));
  if (problem.head_dim <= 64) {
    msa::launch_decode<64>(params, stream);
  } else {
    msa::launch_decode<128>(params, stream);
  }
}

}  // namespace fovea::internal
