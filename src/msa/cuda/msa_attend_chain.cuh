#pragma once

#include <cstdint>
#include <limits>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/fp8_encode.cuh"
#include "src/core/cuda/mma.cuh"
#include "src/core/sink.h"
#include "src/msa/cuda/msa_rows.cuh"
#include "src/msa/msa_attend_impl.h"

// A chain: one warp, one row, the query heads of one KV head, a part of the row's tokens, 16 at a
// time. Heads are the rows of A, absent ones zero. The warp has nothing to share with others: keys
// and values go from memory straight into operands, and warps of a multiprocessor that walk over
// the same blocks share them in the first-level cache. As all heads of a chain see the same tokens,
// what is not visible is not loaded, and no value has to be masked for one row and not for another.
//
// Lane (g, c) = (lane / 4, lane % 4):
//   keys    channels 32 d + 8 c .. + 7 of tokens g and g + 8: words 2 s and 2 s + 1 of the eight
//           are the operands of step s; queries likewise, in the same order of channels
//   values  channels 64 m + 8 g .. + 7 of tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9; column g of the
//           product j of a group m is channel 64 m + 8 g + j, so that sums of a head stand in
//           16 neighbouring channels 64 m + 16 c .. + 15 of a lane
//
// Weights are rounded to bf16 for the product with the values, their sums are not.
namespace fovea::internal::msa {

using cuda::kWarpThreads;
using cuda::MmaA;
using cuda::MmaB;
using cuda::MmaC;

inline constexpr int kStepKeys = 16;
inline constexpr int kMaxGroup = 16;  // query heads of a KV head: rows of A
inline constexpr int kDeepChannels = 32;
inline constexpr int kGroupChannels = 64;
inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// How keys and values are stored.
enum class Stored { kBf16, kE4m3, kE2m1 };

struct AttendParams {
  MsaDeviceRows rows;
  MsaAttendInputs inputs;
  const void* q;
  int64_t q_row, q_head;  // strides in elements
  bool q_is_e4m3;
  bool causal;
  int64_t num_rows;
  int64_t num_tiles;  // of rows, for a block per tile
  int num_kv_heads;
  int group;  // query heads of a KV head
  int head_dim;
  int block_size;
  int steps_per_block;
  int topk;
  int num_parts;  // of a row, in blocks of their own
  float softmax_scale;
  float* part_values;  // [row * KV heads + head][part][group][head_dim]
  float* part_state;   // [row * KV heads + head][part][group][2]: largest logit, sum
};

// The stored row of a token.
struct TokenRow {
  const uint8_t* data;
  const uint8_t* scales;  // kE2m1
};

template <Stored kStored>
__device__ inline TokenRow token_row(const MsaPool& pool, const MsaPool& scales, int64_t page,
                                     int64_t head, int64_t token) {
  constexpr int64_t kBytes = kStored == Stored::kBf16 ? 2 : 1;
  TokenRow row{static_cast<const uint8_t*>(pool.data) + pool.offset(page, head, token) * kBytes,
               nullptr};
  if constexpr (kStored == Stored::kE2m1) {
    row.scales = static_cast<const uint8_t*>(scales.data) + scales.offset(page, head, token);
  }
  return row;
}

// e4m3(e2m1 * scale) of two codes, as bf16: msa_kv4_value(). The bits of a code, moved to where
// fp32 has them, make its magnitude times 2^-126.
__device__ inline uint32_t decode_kv4_pair(uint32_t codes, float scale) {
  const auto value = [&](uint32_t code) {
    const float magnitude = __uint_as_float((code & 7) << 22) * 0x1p126f;
    return ((code & 8) != 0 ? -magnitude : magnitude) * scale;
  };
  const float low = value(codes & 15);
  const float high = value(codes >> 4 & 15);
#if __CUDA_ARCH__ >= 900
  const float2 rounded = cuda::e4m3_values(cuda::e4m3_code_pair(low, high));
  return cuda::bf16_pair(rounded.x, rounded.y);
#else
  return cuda::bf16_pair(cuda::e4m3_value(e4m3_from_float(low)),
                         cuda::e4m3_value(e4m3_from_float(high)));
#endif
}

__device__ inline uint4 decode_e4m3(const uint8_t* codes) {
  const uint2 words = *reinterpret_cast<const uint2*>(codes);
  const uint2 low = cuda::decode4(words.x, 1.0f);
  const uint2 high = cuda::decode4(words.y, 1.0f);
  return make_uint4(low.x, low.y, high.x, high.y);
}

// Channels channel .. channel + 7 as bf16; `channel` is a multiple of 8, rows start at multiples of
// 16 bytes.
template <Stored kStored>
__device__ inline uint4 load_channels(const TokenRow& row, int channel) {
  if constexpr (kStored == Stored::kBf16) {
    return *reinterpret_cast<const uint4*>(row.data + 2 * channel);
  } else if constexpr (kStored == Stored::kE4m3) {
    return decode_e4m3(row.data + channel);
  } else {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(row.data + channel / 2);
    const float scale = cuda::e4m3_value(row.scales[channel / kMsaKv4Group]);
    return make_uint4(decode_kv4_pair(codes, scale), decode_kv4_pair(codes >> 8, scale),
                      decode_kv4_pair(codes >> 16, scale), decode_kv4_pair(codes >> 24, scale));
  }
}

// Channels of query head `head` of the group, zeros where there is none. Queries beside bf16 caches
// are bf16; beside others `q_is_e4m3` says.
template <Stored kStored>
__device__ inline uint4 load_query(const AttendParams& params, int64_t t, int64_t kv_head, int head,
                                   int channel) {
  // Ahead of the branch: neighbouring calls share it.
  const int64_t row = t * params.q_row + (kv_head * params.group + head) * params.q_head;
  if (head >= params.group || channel >= params.head_dim) return make_uint4(0, 0, 0, 0);
  const int64_t at = row + channel;
  if (kStored != Stored::kBf16 && params.q_is_e4m3)
    return decode_e4m3(static_cast<const uint8_t*>(params.q) + at);
  return *reinterpret_cast<const uint4*>(static_cast<const bf16_t*>(params.q) + at);
}

// Memory of one warp for the list of a row: [topk] each.
struct ListMemory {
  int32_t* blocks;
  int32_t* pages;
  int32_t* unsorted;

  __device__ ListMemory(int32_t* memory, int topk)
      : blocks(memory), pages(memory + topk), unsorted(memory + 2 * topk) {}
  static constexpr size_t bytes(int64_t topk) {
    return static_cast<size_t>(topk) * 3 * sizeof(int32_t);
  }
};

// The blocks that the row sees a part of, ascending, each once, with their pages; returns their
// number. Every lane of the warp calls it.
__device__ inline int read_list(const AttendParams& params, const MsaRow& row, int64_t t,
                                int64_t kv_head, const ListMemory& list) {
  if (row.is_empty()) return 0;
  const int lane = threadIdx.x % kWarpThreads;
  const int32_t* const from = params.inputs.lists.row(kv_head, t);
  int count = 0;
  for (int base = 0; base < params.topk; base += kWarpThreads) {
    const int i = base + lane;
    const int32_t n = i < params.topk ? from[i] : -1;
    const auto page =
        static_cast<int32_t>(params.inputs.page_of(row, n, params.block_size, params.causal));
    const uint32_t kept = __ballot_sync(0xFFFFFFFF, page >= 0);
    if (page >= 0) {
      const int at = count + __popc(kept & ((1u << lane) - 1));
      list.blocks[at] = n;
      list.pages[at] = page;
    }
    count += __popc(kept);
  }
  __syncwarp();
  bool falls = false;
  for (int i = 1 + lane; i < count; i += kWarpThreads) {
    falls = falls || list.blocks[i] <= list.blocks[i - 1];
  }
  if (!__any_sync(0xFFFFFFFF, falls)) return count;

  // The place of a block is the number of smaller ones; repeats, marked in `pages`, do not count.
  int repeats = 0;
  for (int i = lane; i < count; i += kWarpThreads) list.unsorted[i] = list.blocks[i];
  __syncwarp();
  for (int i = lane; i < count; i += kWarpThreads) {
    bool repeated = false;
    for (int j = 0; j < i; ++j) repeated = repeated || list.unsorted[j] == list.unsorted[i];
    list.pages[i] = repeated ? 1 : 0;
    repeats += repeated ? 1 : 0;
  }
  __syncwarp();
  for (int i = lane; i < count; i += kWarpThreads) {
    int place = 0;
    for (int j = 0; j < count; ++j) {
      place += list.unsorted[j] < list.unsorted[i] && list.pages[j] == 0 ? 1 : 0;
    }
    if (list.pages[i] == 0) list.blocks[place] = list.unsorted[i];
  }
  for (int step = kWarpThreads / 2; step > 0; step /= 2) {
    repeats += __shfl_xor_sync(0xFFFFFFFF, repeats, step);
  }
  count -= repeats;
  __syncwarp();
  for (int i = lane; i < count; i += kWarpThreads) {
    list.pages[i] = static_cast<int32_t>(
        params.inputs.page_of(row, list.blocks[i], params.block_size, params.causal));
  }
  __syncwarp();
  return count;
}

// Heads lane / 4 and + 8 of a chain.
struct ChainState {
  float largest[2];  // logit, in units of log2; -inf: no key with any weight
  float sum[2];      // of the weights exp2(logit - largest)
};

// 16 tokens of a block.
struct Step {
  int64_t page;
  int token;  // the first one
  int count;  // of them that the row sees, below 1: none
};

// The steps [first, end) over a list, a block after the other.
class StepWalk {
 public:
  __device__ StepWalk(const AttendParams& params, const MsaRow& row, const ListMemory& list,
                      int first, int end)
      : params_(params),
        list_(list),
        block_(first / params.steps_per_block),
        index_(first % params.steps_per_block),
        left_(end - first),
        end_token_(static_cast<int32_t>(msa_row_end(row, params.causal))) {}
  __device__ bool done() const { return left_ <= 0; }
  // max_pages * block_size fits 32 bits.
  __device__ Step step() const {
    const int token = index_ * kStepKeys;
    const int seen =
        min(end_token_ - list_.blocks[block_] * params_.block_size, params_.block_size);
    return {list_.pages[block_], token, min(seen - token, kStepKeys)};
  }
  __device__ void advance() {
    --left_;
    if (++index_ < params_.steps_per_block) return;
    index_ = 0;
    ++block_;
  }

 private:
  const AttendParams& params_;
  const ListMemory& list_;
  int block_, index_, left_;
  int32_t end_token_;
};

// kDim: channels of values that a chain computes, and, unless kWide, of keys. kWide: keys and
// queries of any width, read as they are needed.
template <Stored kStored, int kDim, bool kWide>
class Chain {
 public:
  static constexpr int kDeep = kDim / kDeepChannels;
  static constexpr int kGroups = kDim / kGroupChannels;
  static constexpr int kProducts = kDim / 8;

  // Channels from `first_channel` on of the values.
  __device__ Chain(const AttendParams& params, int64_t t, int64_t kv_head, int first_channel)
      : params_(params),
        t_(t),
        kv_head_(kv_head),
        g_(threadIdx.x % kWarpThreads / 4),
        c_(threadIdx.x % 4),
        first_channel_(first_channel) {
    if constexpr (!kWide) {
#pragma unroll
      for (int d = 0; d < kDeep; ++d) load_queries(kDeepChannels * d, queries_[d]);
    }
    const MsaAttendInputs& inputs = params.inputs;
    scale_ = params.softmax_scale * 1.44269504f;
    if constexpr (kStored != Stored::kBf16) {
      scale_ *= inputs.q_scale.at(t, kv_head) *
                (inputs.k_scale.per_row() ? 1.0f : inputs.k_scale.at(0, kv_head));
    }
  }

  // Every lane has the state and its share of the values afterwards.
  __device__ void run(const MsaRow& row, const ListMemory& list, int first_step, int end_step,
                      ChainState& state, MmaC (&values)[kProducts]) const {
    walk({params_, row, list, first_step, end_step}, state, values);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.sum[half] += __shfl_xor_sync(0xFFFFFFFF, state.sum[half], 1);
      state.sum[half] += __shfl_xor_sync(0xFFFFFFFF, state.sum[half], 2);
    }
  }

  // Calls each(half, channel, values) for every 8 channels of its heads lane / 4 + 8 * half.
  template <class Each>
  __device__ void for_outputs(const MmaC (&values)[kProducts], Each each) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (g_ + 8 * half >= params_.group) continue;
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int channel = first_channel_ + kGroupChannels * m + 16 * c_ + 8 * e;
          if (channel >= params_.head_dim) continue;
          float eight[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) eight[j] = values[8 * m + j].x[2 * half + e];
          each(half, channel, eight);
        }
      }
    }
  }

 protected:
  __device__ void load_queries(int first, MmaA (&queries)[2]) const {
    const uint4 low = load_query<kStored>(params_, t_, kv_head_, g_, first + 8 * c_);
    const uint4 high = load_query<kStored>(params_, t_, kv_head_, g_ + 8, first + 8 * c_);
    queries[0] = {{low.x, high.x, low.y, high.y}};
    queries[1] = {{low.z, high.z, low.w, high.w}};
  }

  __device__ TokenRow key_row(const Step& step, int u) const {
    return token_row<kStored>(params_.inputs.k, params_.inputs.k_codes_scale, step.page, kv_head_,
                              step.token + 8 * u + g_);
  }
  __device__ uint4 load_key(const Step& step, const TokenRow& row, int u, int first) const {
    const int channel = first + 8 * c_;
    if (8 * u + g_ >= step.count || channel >= params_.head_dim) return make_uint4(0, 0, 0, 0);
    return load_channels<kStored>(row, channel);
  }
  __device__ void load_keys(const Step& step, uint4 (&keys)[2][kDeep]) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const TokenRow row = key_row(step, u);
#pragma unroll
      for (int d = 0; d < kDeep; ++d) keys[u][d] = load_key(step, row, u, kDeepChannels * d);
    }
  }

  // The token of the step that is load `i` of the lane's values.
  __device__ int value_token(int i) const { return 2 * c_ + i % 2 + i / 2 * 8; }
  __device__ void load_values(const Step& step, uint4 (&loaded)[kGroups][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const TokenRow row = token_row<kStored>(params_.inputs.v, params_.inputs.v_codes_scale,
                                              step.page, kv_head_, step.token + value_token(i));
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        const int channel = first_channel_ + kGroupChannels * m + 8 * g_;
        const bool present = value_token(i) < step.count && channel < params_.head_dim;
        loaded[m][i] = present ? load_channels<kStored>(row, channel) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ static void multiply(const MmaA (&queries)[2], const uint4& key, MmaC& logits) {
    cuda::mma(logits, queries[0], MmaB{{key.x, key.y}});
    cuda::mma(logits, queries[1], MmaB{{key.z, key.w}});
  }

  __device__ void multiply_all(const uint4 (&keys)[2][kDeep], MmaC (&logits)[2]) const {
    // Two sums a logit: a product waits for the one before it.
    MmaC odd[2] = {};
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        multiply(queries_[d], keys[u][d], d % 2 == 0 ? logits[u] : odd[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[u].x[i] += odd[u].x[i];
    }
  }

  // A scale of the step's token `token`; `other` where the row does not see it.
  __device__ float token_scale(const MsaScale& scale, const Step& step, int token) const {
    const int64_t slot = step.page * params_.block_size + step.token + token;
    return token < step.count ? scale.at(slot, kv_head_) : 1.0f;
  }

  // Products in, weights out, those of the values times their scales. What the old sums are
  // multiplied with goes to `shrink`. A NaN logit does not become the largest: its weight is NaN,
  // whatever became of it.
  __device__ void softmax(const Step& step, MmaC (&logits)[2], ChainState& state,
                          float (&shrink)[2]) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = 8 * u + 2 * c_ + e;
        float scale = scale_;
        if constexpr (kStored == Stored::kE4m3) {
          if (params_.inputs.k_scale.per_row()) {
            scale *= token_scale(params_.inputs.k_scale, step, token);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& logit = logits[u].x[2 * half + e];
          logit = token < step.count ? logit * scale : kNegInf;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(fmaxf(logits[0].x[2 * half], logits[0].x[2 * half + 1]),
                            fmaxf(logits[1].x[2 * half], logits[1].x[2 * half + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
      largest = fmaxf(largest, state.largest[half]);
      // While all logits are -inf, subtract 0: -inf minus -inf would be NaN.
      const float base = largest == kNegInf ? 0.0f : largest;
      shrink[half] = cuda::exp2_fast(state.largest[half] - base);
      float sum = 0;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& weight = logits[u].x[2 * half + e];
          weight = cuda::exp2_fast(weight - base);
          sum += weight;
        }
      }
      state.largest[half] = largest;
      state.sum[half] = fmaf(state.sum[half], shrink[half], sum);
    }
    if constexpr (kStored == Stored::kE4m3) {
      if (!params_.inputs.v_scale.per_row()) return;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float scale = token_scale(params_.inputs.v_scale, step, 8 * u + 2 * c_ + e);
          logits[u].x[e] *= scale;
          logits[u].x[2 + e] *= scale;
        }
      }
    }
  }

  __device__ static void add_values(const MmaC (&weights)[2], const uint4 (&loaded)[kGroups][4],
                                    MmaC (&values)[kProducts]) {
    MmaA a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const MmaC& from = weights[i / 2];
      a.x[i] = cuda::bf16_pair(from.x[i % 2 * 2], from.x[i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const auto word = [&](int i, int j) {
        const uint4& from = loaded[m][i];
        return j < 2 ? from.x : j < 4 ? from.y : j < 6 ? from.z : from.w;
      };
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t order = j % 2 == 0 ? 0x5410 : 0x7632;
        cuda::mma(values[8 * m + j], a,
                  MmaB{{__byte_perm(word(0, j), word(1, j), order),
                        __byte_perm(word(2, j), word(3, j), order)}});
      }
    }
  }

  // What a step adds: its products, and then its values, which are in registers.
  __device__ void add_step(const Step& step, MmaC (&logits)[2], const uint4 (&loaded)[kGroups][4],
                           ChainState& state, MmaC (&values)[kProducts]) const {
    float shrink[2];
    softmax(step, logits, state, shrink);
    if (__any_sync(0xFFFFFFFF, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (MmaC& value : values) {
#pragma unroll
        for (int i = 0; i < 4; ++i) value.x[i] *= shrink[i / 2];
      }
    }
    add_values(logits, loaded, values);
  }

  // Fills state and values, a lane its share of the sums.
  __device__ void walk(StepWalk steps, ChainState& state, MmaC (&values)[kProducts]) const {
#pragma unroll
    for (MmaC& value : values) value = {};
    state = {{kNegInf, kNegInf}, {0, 0}};
    uint4 keys[2][kDeep];
    if constexpr (!kWide) {
      if (!steps.done()) load_keys(steps.step(), keys);
    }
#pragma unroll 1
    while (!steps.done()) {
      const Step step = steps.step();
      steps.advance();
      uint4 loaded[kGroups][4];
      load_values(step, loaded);
      MmaC logits[2] = {};
      if constexpr (kWide) {
        const TokenRow rows[2] = {key_row(step, 0), key_row(step, 1)};
#pragma unroll 1
        for (int first = 0; first < params_.head_dim; first += kDeepChannels) {
          MmaA queries[2];
          load_queries(first, queries);
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            multiply(queries, load_key(step, rows[u], u, first), logits[u]);
          }
        }
      } else {
        multiply_all(keys, logits);
        // The keys of the next step arrive during the rest of this one.
        if (!steps.done()) load_keys(steps.step(), keys);
      }
      add_step(step, logits, loaded, state, values);
    }
  }

  const AttendParams& params_;
  int64_t t_, kv_head_;
  int g_, c_;
  int first_channel_;
  float scale_;  // of the logits, in units of log2
  MmaA queries_[kDeep][2];
};

}  // namespace fovea::internal::msa
