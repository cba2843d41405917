#pragma once

#include <algorithm>

#include "src/core/cuda/cached_copy.cuh"
#include "src/core/cuda/cluster.cuh"
#include "src/msa/cuda/msa_attend_decode_sm90/config.h"
#include "src/msa/cuda/msa_attend_decode_sm90/lists.cuh"

// Products stand on their side: logits are keys times queries, [64 tokens][16 heads], sums are
// values times weights, [channels][16 heads], so that 16 heads fill the tensor cores and a thread
// has 16 sums. A weight is rounded to bf16 once, for the values; sums of weights are fp32. Warp w
// of a group has tokens 16 w .. 16 w + 15 of a tile: it copies their rows and weighs them; only the
// sums go over the tokens of all warps.
//
// Lane (g, c) = (lane / 4, lane % 4) of warp w has, for heads 8 j + 2 c + e in place 2 j + e:
//   logits  tokens 16 w + g and + 8
//   sums    channels 64 p + 16 w + g and + 8 of panel p
namespace fovea::internal::msa::decode {

using cuda::PanelMatrix;
using cuda::PanelSide;
using cuda::WgmmaSums;

constexpr int kPlaces = 4;  // heads of a lane

// The steps [first, end) of a list, four at a time, one of them the warp's.
class TileWalk {
 public:
  __device__ TileWalk(const AttendParams& params, int32_t end_token, const ListMemory& list,
                      int warp, int first, int end)
      : params_(params),
        list_(list),
        warp_(warp),
        block_((first + warp) / params.steps_per_block),
        index_((first + warp) % params.steps_per_block),
        left_(end - first),
        end_token_(end_token) {}
  __device__ bool done() const { return left_ <= 0; }
  __device__ Step step() const {
    if (warp_ >= left_) return {0, 0, 0};
    const int token = index_ * kStepKeys;
    const int seen =
        min(end_token_ - list_.blocks[block_] * params_.block_size, params_.block_size);
    return {list_.pages[block_], token, min(seen - token, kStepKeys)};
  }
  __device__ void advance() {
    left_ -= kGroupWarps;
    index_ += kGroupWarps;
    while (index_ >= params_.steps_per_block) {
      index_ -= params_.steps_per_block;
      ++block_;
    }
  }

 private:
  const AttendParams& params_;
  const ListMemory& list_;
  int warp_, block_, index_, left_;
  int32_t end_token_;
};

// A warpgroup's share of a row and KV head. Its weights are relative to references that follow the
// largest logits by more than kSlack only: few tiles change old sums.
template <int kDim, bool kOnce>
class GroupWork {
  using Memory = GroupMemory<kDim>;
  using OneHalf = Half<kDim>;
  static constexpr int kPanels = OneHalf::kPanels;
  static constexpr int kHalves = Memory::kHalves;
  static constexpr int kQueryPanel = kMaxGroup * cuda::kPanelRowBytes;
  static constexpr int kUnits = kDim / 8;
  static constexpr int kUnitBytes = 16;
  static constexpr int kTokens = kWarpThreads / kUnits;  // that a warp copies at a time
  static constexpr int kTurns = 8 / kTokens;             // after which places repeat
  static constexpr float kSlack = 8;                     // weights up to 2^8

 public:
  __device__ GroupWork(const AttendParams& params, Memory& shared, uint8_t* queries)
      : params_(params), shared_(shared), queries_(queries) {}

  // Before anything else.
  __device__ void prepare(int64_t kv_head) {
    const int lane = threadIdx.x % kWarpThreads;
    // The exchange tells the compiler that it is the same in all lanes.
    warp_ = __shfl_sync(0xFFFFFFFF, threadIdx.x % kGroupThreads / kWarpThreads, 0);
    if constexpr (kOnce) policy_ = cuda::cache_policy_once();
    unit_ = lane % kUnits;
    token_ = lane / kUnits;
    row_at_ =
        unit_ / 8 * OneHalf::kPanelBytes + (warp_ * kStepKeys + token_) * cuda::kPanelRowBytes;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      turned_[i] = static_cast<uint32_t>(cuda::panel_offset(i * kTokens + token_, unit_ % 8)) %
                   cuda::kPanelRowBytes;
    }
    const MsaPool& k = params_.inputs.k;
    const int64_t own = 2 * (k.offset(0, kv_head, token_) + 8 * unit_);
    keys_ = static_cast<const uint8_t*>(k.data) + own;
    values_ = static_cast<const uint8_t*>(params_.inputs.v.data) + own;
    scale_ = params_.softmax_scale * 1.44269504f;
  }

  // By all warps of the block but the first, which has the list to read.
  __device__ void copy_queries(int64_t t, int64_t kv_head) const {
    const auto* const first = static_cast<const bf16_t*>(params_.q) + t * params_.q_row +
                              kv_head * params_.group * params_.q_head;
#pragma unroll 1
    for (uint32_t i = threadIdx.x - kWarpThreads; i < kMaxGroup * kUnits;
         i += kThreads - kWarpThreads) {
      const int head = static_cast<int>(i / kUnits);
      const int unit = static_cast<int>(i % kUnits);
      const bool present = head < params_.group && 8 * unit < params_.head_dim;
      cuda::copy_async<kUnitBytes>(
          queries_ + unit / 8 * kQueryPanel + cuda::panel_offset(head, unit % 8),
          first + (present ? head * params_.q_head + 8 * unit : 0), present);
    }
    cuda::wait_for_copies();
    cuda::shared_stores_before_wgmma();
  }

  // Leaves the sums of the steps [first, end) in shared memory, for whoever comes to a barrier
  // behind it.
  __device__ void run(int32_t end_token, const ListMemory& list, int first, int end) {
    walk({params_, end_token, list, warp_, first, end});
    if (first >= end) leave_states(sum_);
    sync();  // nobody reads the ring any more
    leave_sums();
  }

 private:
  __device__ void sync() const {
    cuda::sync_some(1 + static_cast<int>(threadIdx.x) / kGroupThreads, kGroupThreads);
  }
  __device__ int lane_head(int place) const {
    return place / 2 * 8 + 2 * static_cast<int>(threadIdx.x % 4) + place % 2;
  }

  // The warp's rows of a step, from the lane's piece of the first one.
  __device__ void copy(const uint8_t* from, int count, OneHalf& half) const {
    const int64_t pitch = 2 * kTokens * params_.inputs.k.token_stride;
    if (8 * unit_ >= params_.head_dim) count = 0;
    // The piece of a row comes last, and not by an addition: nvcc 13.0 makes an illegal instruction
    // of a copy with a policy to a place that is the sum of something of the lane and something of
    // the whole warp.
    uint8_t* to[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      uint8_t* const row = half.rows + row_at_ + i * kTokens * cuda::kPanelRowBytes;
      to[i] = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(row) ^ turned_[i]);
    }
#pragma unroll
    for (int i = 0; i < kStepKeys / kTokens; ++i) {
      copy_unit(to[i % kTurns] + i / kTurns * 8 * cuda::kPanelRowBytes, from,
                i * kTokens + token_ < count);
      from += pitch;
    }
  }

  __device__ void copy_unit(uint8_t* to, const uint8_t* from, bool present) const {
    if constexpr (kOnce) {
      cuda::copy_async(to, from, present, policy_);
    } else {
      cuda::copy_async<kUnitBytes>(to, from, present);
    }
  }

  __device__ void multiply_keys(const OneHalf& half, WgmmaSums<16>& logits) const {
    const PanelMatrix keys = cuda::panel_matrix(half.rows, OneHalf::kPanelBytes);
    const PanelMatrix queries = cuda::panel_matrix(queries_, kQueryPanel);
    cuda::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      cuda::wgmma<PanelSide::kRows>(
          logits, keys.advanced(d / 4 * OneHalf::kPanelBytes + d % 4 * 32),
          queries.advanced(d / 4 * kQueryPanel + d % 4 * 32), d > 0 ? 1 : 0);
    }
    cuda::wgmma_commit();
  }

  // Products to logits in units of log2; -inf where the row sees no token.
  __device__ void scale(int count, WgmmaSums<16>& logits) const {
    const int token = threadIdx.x % kWarpThreads / 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      logits.x[i] = token + i / 2 % 2 * 8 < count ? logits.x[i] * scale_ : kNegInf;
    }
  }

  // NaN is no largest logit: its weight is NaN, whatever became of it.
  __device__ void raise_references(const WgmmaSums<16>& logits) {
    float largest[kPlaces];
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) {
      largest[h] = fmaxf(logits.x[h / 2 * 4 + h % 2], logits.x[h / 2 * 4 + 2 + h % 2]);
    }
    over_tokens(largest, [](float a, float b) { return fmaxf(a, b); });
    if (threadIdx.x % kWarpThreads < 4) {
#pragma unroll
      for (int h = 0; h < kPlaces; ++h) shared_.warp_largest[warp_][lane_head(h)] = largest[h];
    }
    sync();
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) {
      largest[h] = kNegInf;
#pragma unroll
      for (int w = 0; w < kGroupWarps; ++w) {
        largest[h] = fmaxf(largest[h], shared_.warp_largest[w][lane_head(h)]);
      }
      if (!(largest[h] > reference_[h] + kSlack)) continue;
      const float shrink = cuda::exp2_fast(reference_[h] - largest[h]);
      reference_[h] = largest[h];
      sum_[h] *= shrink;
#pragma unroll
      for (WgmmaSums<16>& panel : sums_) {
        panel.x[h / 2 * 4 + h % 2] *= shrink;
        panel.x[h / 2 * 4 + h % 2 + 2] *= shrink;
      }
    }
  }

  // Of each place, over the lanes of a warp.
  template <class Add>
  __device__ static void over_tokens(float (&places)[kPlaces], Add add) {
#pragma unroll
    for (int step = 4; step < kWarpThreads; step *= 2) {
#pragma unroll
      for (float& x : places) x = add(x, __shfl_xor_sync(0xFFFFFFFF, x, step));
    }
  }

  // Weights to shared memory. Returns whether a logit is too large for its reference.
  __device__ bool weigh(const WgmmaSums<16>& logits, float (&tile_sum)[kPlaces]) const {
    float weights[8];
    bool grows = false;
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) {
      // While all logits are -inf, subtract 0: -inf minus -inf would be NaN.
      const float base = reference_[h] == kNegInf ? 0.0f : reference_[h];
      float two[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = h / 2 * 4 + 2 * half + h % 2;
        grows = grows || logits.x[i] > reference_[h] + kSlack;
        weights[i] = two[half] = cuda::exp2_fast(logits.x[i] - base);
      }
      tile_sum[h] = two[0] + two[1];
    }
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = cuda::bf16_pair(weights[2 * i], weights[2 * i + 1]);
    const int lane = threadIdx.x % kWarpThreads;
    cuda::store_columns(
        shared_.weights + cuda::panel_offset(lane / 16 * 8 + lane % 8, 2 * warp_ + lane / 8 % 2),
        pairs);
    return grows;
  }

  // Weights of the tile to shared memory, and its sums; behind the last tile those of all. Values
  // of the tile are there behind it.
  __device__ void weigh_tile(const WgmmaSums<16>& logits, int index, bool last) {
    bool raises = index == 0;
    float tile_sum[kPlaces];
#pragma unroll 1
    while (true) {
      if (raises) raise_references(logits);
      const bool grows = __any_sync(0xFFFFFFFF, weigh(logits, tile_sum));
      bool(&votes)[kGroupWarps] = shared_.votes[index % 2];
      if (!raises && threadIdx.x % kWarpThreads == 0) votes[warp_] = grows;
      if (last) {
        float all[kPlaces];
#pragma unroll
        for (int h = 0; h < kPlaces; ++h) all[h] = sum_[h] + tile_sum[h];
        leave_states(all);
      }
      cuda::wait_copies<kHalves - 2>();
      cuda::shared_stores_before_wgmma();
      sync();
      if (raises || !(votes[0] || votes[1] || votes[2] || votes[3])) break;
      raises = true;
    }
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) sum_[h] += tile_sum[h];
  }

  __device__ void multiply_values(const OneHalf& half) {
    const PanelMatrix values = cuda::panel_matrix(half.rows, OneHalf::kPanelBytes);
    const PanelMatrix columns = cuda::panel_matrix(shared_.weights, sizeof(shared_.weights));
    cuda::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileTokens / 16; ++k) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        cuda::wgmma<PanelSide::kRows, 16, PanelSide::kColumns>(
            sums_[p], values.advanced(p * OneHalf::kPanelBytes + k * 16 * cuda::kPanelRowBytes),
            columns.advanced(32 * k), 1);
      }
    }
    cuda::wgmma_commit();
  }

  // Keys of a tile, its values, keys of the next one, and so on, each into the place of the half
  // that is done. Products run while the next half is asked for.
  __device__ void walk(TileWalk steps) {
#pragma unroll
    for (WgmmaSums<16>& panel : sums_) panel = {};
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) {
      reference_[h] = kNegInf;
      sum_[h] = 0;
    }
    TileWalk ahead = steps;
    int64_t from = 0;
    int count_ahead = 0;
    int to = 0;
    // A group of copies a half, also where nothing is left to fetch: the number of groups behind
    // the one that is waited for stays. Pools have equal strides.
    const auto fetch = [&](bool values) {
      if (!ahead.done()) {
        if (!values) {
          const Step step = ahead.step();
          const MsaPool& k = params_.inputs.k;
          from = 2 * (step.page * k.page_stride + step.token * k.token_stride);
          count_ahead = step.count;
        }
        copy((values ? values_ : keys_) + from, count_ahead, shared_.ring[to]);
        if (values) ahead.advance();
      }
      to = to + 1 == kHalves ? 0 : to + 1;
      cuda::commit_copies();
    };
#pragma unroll 1
    for (int h = 0; h < kHalves; ++h) fetch(h % 2 != 0);
    int stage = 0;
    const auto next_half = [&]() -> OneHalf& {
      OneHalf& half = shared_.ring[stage];
      stage = stage + 1 == kHalves ? 0 : stage + 1;
      return half;
    };
#pragma unroll 1
    for (int i = 0; !steps.done(); ++i) {
      const int count = steps.step().count;
      steps.advance();
      OneHalf& keys = next_half();
      OneHalf& values = next_half();
      if (i == 0) {
        cuda::wait_copies<kHalves - 1>();
      } else {
        cuda::wait_copies<kHalves - 2>();
      }
      cuda::shared_stores_before_wgmma();
      sync();
      WgmmaSums<16> logits;
      multiply_keys(keys, logits);
      if (i > 0) fetch(false);  // for the values before
      cuda::wgmma_wait<0>();
      cuda::wgmma_pin(logits);
      scale(count, logits);
      weigh_tile(logits, i, steps.done());
      multiply_values(values);
      fetch(true);  // for the keys
      cuda::wgmma_wait<0>();
#pragma unroll
      for (WgmmaSums<16>& panel : sums_) cuda::wgmma_pin(panel);
    }
    // Groups of nothing.
    cuda::wait_for_copies();
  }

  // `sums` are those of the lane's tokens.
  __device__ void leave_states(float (&sums)[kPlaces]) {
    over_tokens(sums, [](float a, float b) { return a + b; });
    if (threadIdx.x % kWarpThreads < 4) {
#pragma unroll
      for (int h = 0; h < kPlaces; ++h) {
        shared_.warp_sum[warp_][lane_head(h)] = sums[h];
        if (warp_ == 0) shared_.state[lane_head(h)].x = reference_[h];
      }
    }
  }

  __device__ void leave_sums() {
    const int thread = threadIdx.x % kGroupThreads;
    const int channel = thread / kWarpThreads * 16 + thread % kWarpThreads / 4;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        shared_.left.sums.values[lane_head(i / 4 * 2 + i % 2)][64 * p + channel + i / 2 % 2 * 8] =
            sums_[p].x[i];
      }
    }
    if (thread >= kMaxGroup) return;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) sum += shared_.warp_sum[w][thread];
    shared_.state[thread].y = sum;
  }

  const AttendParams& params_;
  Memory& shared_;
  uint8_t* queries_;
  cuda::CachePolicy policy_;
  int warp_;
  int unit_, token_;               // of each copy, the first one's token
  int row_at_;                     // of the first copy, in a half
  uint32_t turned_[kTurns];        // piece of a row, in bytes
  const uint8_t *keys_, *values_;  // the lane's piece of token_ of page 0
  float scale_;                    // of the logits, in units of log2
  float reference_[kPlaces], sum_[kPlaces];
  WgmmaSums<16> sums_[kPanels];
};

// Of a head: largest logit (or what stands for it), in units of log2, and sums relative to it.
struct HeadPart {
  float2 state;
  float4 values;
};

__device__ inline HeadPart add_parts(const HeadPart& a, const HeadPart& b) {
  const float largest = fmaxf(a.state.x, b.state.x);
  // While both are -inf, subtract 0: -inf minus -inf would be NaN.
  const float base = largest == kNegInf ? 0.0f : largest;
  const float of_a = cuda::exp2_fast(a.state.x - base);
  const float of_b = cuda::exp2_fast(b.state.x - base);
  const auto add = [&](float x, float y) { return fmaf(y, of_b, x * of_a); };
  return {make_float2(largest, add(a.state.y, b.state.y)),
          make_float4(add(a.values.x, b.values.x), add(a.values.y, b.values.y),
                      add(a.values.z, b.values.z), add(a.values.w, b.values.w))};
}

// What all groups of the cluster have left, in their order, four channels of a head at a time: each
// block adds up its groups and sends the result to the block that has the share of these channels.
template <int kDim, int kParts>
class Fold {
  using Memory = BlockMemory<kDim, kParts>;
  static constexpr int kUnits = kFoldUnits<kDim>;
  static constexpr int kShare = kUnits / kParts;
  static constexpr int kSharers = std::clamp(kThreads / kShare, 1, kParts);

 public:
  __device__ Fold(const AttendParams& params, int64_t t, int64_t kv_head, Memory& shared)
      : params_(params), t_(t), kv_head_(kv_head), shared_(shared) {}

  static constexpr int kSentBytes = kUnits * static_cast<int>(sizeof(float4) + sizeof(float2));

  // Behind a barrier of the block. With several parts, all threads have arrived at the barrier of
  // the cluster, too: behind it every inbox is open and nobody reads what is sent writes over.
  __device__ void run(int part) {
    constexpr int kTurns = kUnits / kThreads;
    if constexpr (kParts == 1) {
      // Neighbouring units, of one head.
      const int unit = static_cast<int>(threadIdx.x) * kTurns;
      const Output output = output_of(unit);
      HeadPart sums[kTurns];
#pragma unroll
      for (int i = 0; i < kTurns; ++i) sums[i] = add_groups(unit + i);
      if (output.to == nullptr) return;
      const HeadResult result = finish(output, sums[0].state);
#pragma unroll
      for (int i = 0; i < kTurns; ++i) store(result, sums[i].values, output.to + kFour * i);
    } else {
      HeadPart sums[kTurns];
#pragma unroll
      for (int i = 0; i < kTurns; ++i) sums[i] = add_groups(i * kThreads + threadIdx.x);
      cuda::cluster_wait();
      Sent<kDim>& sent = shared_.sent();
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int unit = i * kThreads + static_cast<int>(threadIdx.x);
        const int at = part * kShare + unit % kShare;
        cuda::send(sums[i].state, &sent.states[at], shared_.inbox, unit / kShare);
        cuda::send(sums[i].values, &sent.values[at], shared_.inbox, unit / kShare);
      }
      // Neighbouring lanes share the parts of a unit.
      static_assert(kShare * kSharers == kThreads);
      const int unit = static_cast<int>(threadIdx.x) / kSharers;
      const Output output = output_of(part * kShare + unit);
      cuda::wait_for_inbox(shared_.inbox);
      const HeadPart sum = add_sent(unit);
      if (threadIdx.x % kSharers != 0 || output.to == nullptr) return;
      store(finish(output, sum.state), sum.values, output.to);
    }
  }

 private:
  // Where four channels of a head go, and what they are multiplied with.
  struct Output {
    bf16_t* to = nullptr;  // none: there is no such head or channel
    float* lse = nullptr;
    const float* sink = nullptr;
    float sink_value = 0;
  };

  __device__ Output output_of(int unit) const {
    const int own = unit / (kDim / kFour);
    const int channel = unit % (kDim / kFour) * kFour;
    Output output;
    if (own >= params_.group || channel >= params_.head_dim) return output;
    const int64_t head = kv_head_ * params_.group + own;
    const MsaAttendInputs& inputs = params_.inputs;
    output.to = inputs.out.row(t_, head) + channel;
    if (inputs.lse && channel == 0) output.lse = &inputs.lse(t_, head);
    if (inputs.sink) {
      output.sink = &inputs.sink(head);
      output.sink_value = *output.sink;
    }
    return output;
  }

  __device__ HeadPart add_groups(int unit) const {
    const auto of_group = [&](const GroupMemory<kDim>& group) {
      const int own = unit / (kDim / kFour);
      const int channel = unit % (kDim / kFour) * kFour;
      return HeadPart{group.state[own],
                      *reinterpret_cast<const float4*>(&group.left.sums.values[own][channel])};
    };
    return add_parts(of_group(shared_.groups[0]), of_group(shared_.groups[1]));
  }

  __device__ HeadPart add_sent(int unit) const {
    constexpr int kOwn = kParts / kSharers;
    const Sent<kDim>& sent = shared_.sent();
    const int sharer = static_cast<int>(threadIdx.x) % kSharers;
    float2 states[kOwn];
    float4 values[kOwn];
    float largest = kNegInf;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = (sharer * kOwn + i) * kShare + unit;
      states[i] = sent.states[at];
      values[i] = sent.values[at];
      largest = fmaxf(largest, states[i].x);
    }
#pragma unroll
    for (int step = 1; step < kSharers; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
    }
    const float base = largest == kNegInf ? 0.0f : largest;
    float sums[1 + kFour] = {};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float factor = cuda::exp2_fast(states[i].x - base);
      sums[0] = fmaf(states[i].y, factor, sums[0]);
      sums[1] = fmaf(values[i].x, factor, sums[1]);
      sums[2] = fmaf(values[i].y, factor, sums[2]);
      sums[3] = fmaf(values[i].z, factor, sums[3]);
      sums[4] = fmaf(values[i].w, factor, sums[4]);
    }
#pragma unroll
    for (int step = 1; step < kSharers; step *= 2) {
#pragma unroll
      for (float& x : sums) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
    }
    return {make_float2(largest, sums[0]), make_float4(sums[1], sums[2], sums[3], sums[4])};
  }

  // Stores the lse, too.
  __device__ static HeadResult finish(const Output& output, const float2& state) {
    HeadResult result{kNegInf, 0.0f, state.y == 0};
    if (!result.empty) {
      result.factor = 1.0f / state.y;
      if (output.lse != nullptr || output.sink != nullptr) {
        result.lse = natural_lse(state.x, state.y);
        if (output.sink != nullptr) result.factor *= sink_factor(output.sink_value, result.lse);
      }
    }
    if (output.lse != nullptr) *output.lse = result.lse;
    return result;
  }

  __device__ static void store(const HeadResult& result, const float4& sums, bf16_t* to) {
    const float values[kFour] = {sums.x, sums.y, sums.z, sums.w};
    store_channels(result, values, to);
  }

  const AttendParams& params_;
  int64_t t_, kv_head_;
  Memory& shared_;
};

// A word of every line of the parameters, by all warps but the first: they come from memory, line
// by line, when they are first used.
__device__ inline void touch_params(const AttendParams& params) {
  constexpr int kLineWords = 16;
  constexpr int kLines = sizeof(AttendParams) / sizeof(int) / kLineWords;
  constexpr int kOthers = kThreads / kWarpThreads - 1;
  const auto* const words = reinterpret_cast<const int*>(&params);
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
#pragma unroll
  for (int line = 0; line < kLines; line += kOthers) {
    cuda::load_here(words[min(line + warp - 1, kLines - 1) * kLineWords]);
  }
}

// A group per half of a part.
template <int kDim, int kParts>
__device__ void attend_part(const AttendParams& params, uint8_t* memory) {
  using Memory = BlockMemory<kDim, kParts>;
  using OwnFold = Fold<kDim, kParts>;
  auto& shared = *reinterpret_cast<Memory*>(memory);
  const int part = static_cast<int>(blockIdx.x % kParts);
  const int64_t t = blockIdx.x / kParts;
  const int64_t kv_head = blockIdx.y;
  const ListMemory list(reinterpret_cast<int32_t*>(&shared + 1), params.topk);
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  // Lines of few rows leave room for what else is in the cache.
  GroupWork<kDim, (kParts > 1)> work(params, shared.groups[group], shared.queries);
  if (threadIdx.x < kWarpThreads) {
    const RowList steps = read_list_early(params, t, kv_head, list, [&] { work.prepare(kv_head); });
    if (threadIdx.x == 0) shared.list = steps;
  } else {
    touch_params(params);
    if constexpr (kParts > 1) {
      if (threadIdx.x == kWarpThreads) cuda::open_inbox(shared.inbox, OwnFold::kSentBytes);
    }
    work.prepare(kv_head);
    work.copy_queries(t, kv_head);
  }
  __syncthreads();
  // Behind it every inbox is open.
  if constexpr (Memory::kSentApart) cuda::cluster_arrive_relaxed();
  const RowList steps = shared.list;
  const int index = part * kGroups + group;
  const auto step_of = [&](int i) {
    return static_cast<int>(int64_t{steps.num_steps} * i / (kParts * kGroups));
  };
  work.run(steps.end_token, list, step_of(index), step_of(index + 1));
  if constexpr (kParts > 1 && !Memory::kSentApart) cuda::cluster_arrive_relaxed();
  __syncthreads();
  OwnFold(params, t, kv_head, shared).run(part);
}

// Nothing but code for sm_90a has the products; supports() refuses other devices.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FOVEA_CLUSTER_OF(parts) __cluster_dims__(parts, 1, 1)
#define FOVEA_SM90_BODY(...) __VA_ARGS__
#else
#define FOVEA_CLUSTER_OF(parts)
#define FOVEA_SM90_BODY(...)
#endif

// A block per row and KV head.
template <int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    attend_alone(const __grid_constant__ AttendParams params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    attend_part<kDim, 1>(params, memory);
  })
}

// A cluster of kParts blocks per row and KV head.
template <int kDim, int kParts>
__global__ void FOVEA_CLUSTER_OF(kParts) __launch_bounds__(kThreads, 2)
    attend_cluster(const __grid_constant__ AttendParams params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    attend_part<kDim, kParts>(params, memory);
  })
}

#undef FOVEA_CLUSTER_OF
#undef FOVEA_SM90_BODY

}  // namespace fovea::internal::msa::decode
