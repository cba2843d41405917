#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/bulk_copy.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/mbarrier.cuh"
#include "src/core/cuda/mma.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/mla/cuda/listed_keys.cuh"
#include "src/mla/cuda/sparse_mla_few_heads_sm90/config.h"
#include "src/mla/cuda/sparse_mla_launch.cuh"

// A block takes 16 heads of one row and one part of its list, a step of 32 slots at a time. Its
// warpgroups:
//
//   0, 1 sums  a step each in turn, so that one's exchange runs beside the other's arithmetic. A
//              warp has 128 channels of the values and 16 others. It decodes those of all keys of
//              the step, once: B of the logits as they are, and turned over B of the values. The
//              four warps add up their parts of the logits, each for 8 keys, weigh them and show
//              the weights to the others
//   2, rows    looks slots up and copies rows to shared memory, a quarter of a step a warp
//
// Lane (g, c) = (lane / 4, lane % 4) of warp w has:
//   queries    heads g and g + 8; channels 128 w + 32 c .. + 31 of the values, 4 a product, and
//              16 w + 4 c .. + 3 of the others
//   keys       g, g + 8, ..; the same channels
//   logits     heads g and g + 8; keys 2 c and the next of 8; by all warps, then by one
//   sums       heads g and g + 8; the same channels
namespace fovea::internal::sparse_few_heads_sm90 {

using cuda::Mbarrier;
using cuda::MmaA;
using cuda::MmaB;
using cuda::MmaC;
using latent::kNegInf;
using latent::RowLayout;
using latent::RowParams;
using latent::Target;

inline constexpr float kLn2 = 0.693147181f;
// References of weights follow the largest logits by more than this only, in units of log2: few
// steps change old sums.
inline constexpr float kSlack = 8;

// The exchange tells the compiler that it is the same in all lanes.
__device__ inline int one_of_warp(int x) { return __shfl_sync(0xFFFFFFFF, x, 0); }

// A group's sums where rows were. Each 32 channels are four floats further from those before, and
// heads 16 floats modulo 32, so that eight lanes that store four channels each meet all banks.
struct GroupSums {
  float x[kHeads][kValueDim + kValueDim / 8 + 16];

  __device__ float* at(int head, int channel) { return &x[head][channel + channel / 32 * 4]; }
};

// Rows that are not copied as they are: channels of a warp as bf16.
struct StagedRows {
  alignas(16) bf16_t x[kStepKeys][kWarpChannels + kRopeChannels + 8];
};

// Of a block of slots.
inline constexpr int kBlockSteps = static_cast<int>(kBlockSlots) / kStepKeys;

// A unit are 8 keys of a step, those that warp `unit` weighs.
static_assert(kKeyBlocks == kGroupWarps);
struct GroupMemory {
  float4 logits[kGroupWarps][kGroupWarps][32];  // of a warp's channels, by units and lanes
  uint2 weights[kGroupWarps][32];               // by units, for A of the values
  float reference[kGroupWarps][16];             // in units of log2
  float largest[kGroupWarps][16];
  float step_largest[kGroupWarps][16];
  float sum[kGroupWarps][16];
  bool votes[kGroupWarps];  // whether a logit is too large for its reference
};

struct SharedMemory {
  union {
    alignas(128) uint8_t rows[kPlaces][kStepKeys][kRowBytes];
    StagedRows staged[kGroups][kGroupWarps];
    GroupSums sums[kGroups];
  };
  alignas(16) bool present[kPlaces][kStepKeys];  // which of these rows there are
  Mbarrier full[kPlaces], empty[kPlaces];
  GroupMemory groups[kGroups];
  float factors[kGroups][kHeads];  // what sums are multiplied with
};

enum class QueryKind { kAligned, kPlain, kFp8 };

// Four channels of a query, the first at `at`.
template <QueryKind kKind>
__device__ inline uint2 load_query(const void* queries, int64_t at) {
  if constexpr (kKind == QueryKind::kFp8) {
    const auto* const from = static_cast<const uint8_t*>(queries) + at;
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= static_cast<uint32_t>(from[i]) << (8 * i);
    return cuda::decode4(codes, 1);
  }
  const auto* const from = static_cast<const bf16_t*>(queries) + at;
  if constexpr (kKind == QueryKind::kAligned) return __ldg(reinterpret_cast<const uint2*>(from));
  return make_uint2(from[0].bits | static_cast<uint32_t>(from[1].bits) << 16,
                    from[2].bits | static_cast<uint32_t>(from[3].bits) << 16);
}

// Eight channels of any row from device memory.
template <bool kAligned>
__device__ inline uint4 load_channels(const RowLayout& layout, const LatentAddress& key,
                                      int channel) {
  const auto plain = [&](int64_t offset, int from) {
    return latent::load_bf16<kAligned>(key.row + offset, from / 8);
  };
  const auto codes = [&](float scale) {
    return latent::decode8(latent::load_codes<kAligned>(key.row + channel), scale);
  };
  if (key.row == nullptr) return make_uint4(0, 0, 0, 0);
  if (layout.format == RowFormat::kBf16) return plain(0, channel);
  if (layout.format == RowFormat::kF576) return codes(1);
  if (layout.format == RowFormat::kV32) {
    if (channel >= kValueDim) return plain(kV32RopeOffset, channel - kValueDim);
    return codes(cuda::load_float<kAligned>(key.row + kV32ScaleOffset +
                                            channel / static_cast<int>(kV32TileDim) * 4));
  }
  if (layout.format == RowFormat::kV4) {
    constexpr int kLatent = static_cast<int>(kV4LatentDim);
    if (channel >= kLatent) return plain(kV4LatentDim, channel - kLatent);
    return codes(v4_scale(key.scales[channel / static_cast<int>(kV4TileDim)], 0));
  }
  const float scale =
      layout.bf16_scale
          ? __uint_as_float(static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(key.scales))
                            << 16)
          : *reinterpret_cast<const float*>(key.scales);
  return codes(scale);
}

// In place of a row that there is none of.
static __device__ const uint4 kNoRow[kRowBytes / 16] = {};

// Brings packed rows of the steps begin .. end, a quarter of each a warp. Looks those of 32 keys up
// at a time.
__device__ __forceinline__ void bring_rows(const RowParams& params, const ListedKeys& keys,
                                           int begin, int end, SharedMemory& shared) {
  constexpr int kTurn = 32 / kBringKeys;
  const int lane = threadIdx.x % 32;
  const int warp = one_of_warp(static_cast<int>(threadIdx.x) % kGroupThreads / 32);
  const int key = warp * kBringKeys + lane % kBringKeys, turn = lane / kBringKeys;
  const auto block_of = [](int step) { return step / kBlockSteps; };
  const auto key_of = [&](int step) { return step % kBlockSteps * kStepKeys + key; };
  const auto place_of = [&](int step) {
    return step < end ? keys.place(block_of(step), key_of(step)) : -1;
  };
  const auto address_of = [&](int step, int32_t place) {
    return step < end ? keys.address(block_of(step), key_of(step), place).row : nullptr;
  };
  const auto policy = cuda::cache_policy_once();
  const uint8_t* row = address_of(begin + turn, place_of(begin + turn));
  int32_t next_place = place_of(begin + kTurn + turn);
  // The barriers are there.
  cuda::sync_some(kStart, 32 + kGroupThreads);
#pragma unroll 1
  for (int first = begin; first < end; first += kTurn) {
    const auto* const from = row != nullptr ? row : reinterpret_cast<const uint8_t*>(kNoRow);
#pragma unroll 1
    for (int n = 0; n < kTurn && first + n < end; ++n) {
      const int index = first + n - begin, place = index % kPlaces, use = index / kPlaces;
      if (use > 0) cuda::mbarrier_wait(shared.empty[place], use - 1);
      if (turn == n) shared.present[place][key] = row != nullptr;
      __syncwarp();
      if (lane == 0) cuda::mbarrier_arrive_expecting(shared.full[place], kBringKeys * kRowBytes);
      __syncwarp();
      if (turn == n) {
        cuda::copy_bulk(shared.rows[place][key], from, kRowBytes, shared.full[place], policy);
      }
    }
    row = address_of(first + kTurn + turn, next_place);
    next_place = place_of(first + 2 * kTurn + turn);
  }
}

// What a lane reads of the packed rows of a step.
class PackedKeys {
 public:
  __device__ PackedKeys(const uint8_t (*rows)[kRowBytes], int warp) {
    const int lane = threadIdx.x % 32;
    codes_ = rows[lane / 4] + warp * kWarpChannels + lane % 4 * (kWarpChannels / 4);
    scale_ = rows[lane / 4] + kV32ScaleOffset + 4 * warp;
    rope_ = rows[lane / 4] + kV32RopeOffset + (warp * kRopeChannels + lane % 4 * 4) * 2;
  }

  // Of key g + 8 n.
  __device__ void open(int n) {
    const int at = 8 * n * kRowBytes;
    low_[n % 2] = *reinterpret_cast<const uint4*>(codes_ + at);
    high_[n % 2] = *reinterpret_cast<const uint4*>(codes_ + at + 16);
    scales_[n % 2] = *reinterpret_cast<const float*>(scale_ + at);
    ropes_[n % 2] = *reinterpret_cast<const uint2*>(rope_ + at);
  }
  __device__ uint2 channels(int n, int step) const {
    const uint4& of = step < 4 ? low_[n % 2] : high_[n % 2];
    const int i = step % 4;
    return cuda::decode4(i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w, scales_[n % 2]);
  }
  __device__ uint2 rope(int n) const { return ropes_[n % 2]; }

 private:
  const uint8_t *codes_, *scale_, *rope_;
  uint4 low_[2], high_[2];
  float scales_[2];
  uint2 ropes_[2];
};

// The same of rows as bf16.
class StagedKeys {
 public:
  __device__ explicit StagedKeys(const StagedRows& rows) : rows_(rows) {}

  __device__ void open(int) {}
  __device__ uint2 channels(int n, int step) const {
    return at(n, static_cast<int>(threadIdx.x) % 4 * (kWarpChannels / 4) + 4 * step);
  }
  __device__ uint2 rope(int n) const {
    return at(n, kWarpChannels + static_cast<int>(threadIdx.x) % 4 * 4);
  }

 private:
  __device__ uint2 at(int n, int channel) const {
    return *reinterpret_cast<const uint2*>(&rows_.x[threadIdx.x % 32 / 4 + 8 * n][channel]);
  }
  const StagedRows& rows_;
};

// kPacked: all rows are v32 and start at multiples of 16 bytes. Others are read when they are
// wanted, which is slow.
template <int kHeadDim, bool kPacked>
class GroupWork {
 public:
  __device__ GroupWork(const RowParams& params, const ListedKeys& keys, int group,
                       SharedMemory& shared)
      : params_(params), keys_(keys), shared_(shared), own_(shared.groups[group]), group_(group) {
    warp_ = one_of_warp(static_cast<int>(threadIdx.x) % kGroupThreads / 32);
  }

  // Queries of `heads` heads, zeros past them.
  __device__ __forceinline__ void load_queries(int64_t t, int64_t first_head, int heads) {
    const latent::Queries& queries = params_.queries;
    const int64_t first = t * queries.row_stride + first_head * queries.head_stride;
    // One branch, so that all of them are on their way at a time.
    if (queries.is_fp8) {
      load_queries<QueryKind::kFp8>(first, heads);
    } else if (queries.aligned) {
      load_queries<QueryKind::kAligned>(first, heads);
    } else {
      load_queries<QueryKind::kPlain>(first, heads);
    }
  }

  // The steps begin + group, begin + group + kGroups, .. < end.
  __device__ __forceinline__ void run(int begin, int end) {
#pragma unroll
    for (MmaC& x : sums_) x = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference_[h] = kNegInf;
      largest_[h] = kNegInf;
      sum_[h] = 0;
    }
#pragma unroll 1
    for (int i = begin + group_; i < end; i += kGroups) {
      bool present[2];  // keys 2 c and the next
      MmaC logits[kKeyBlocks] = {};
      const int key = warp_ * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
      if constexpr (kPacked) {
        const int place = (i - begin) % kPlaces;
        cuda::mbarrier_wait(shared_.full[place], (i - begin) / kPlaces);
        present[0] = shared_.present[place][key];
        present[1] = shared_.present[place][key + 1];
        PackedKeys rows(shared_.rows[place], warp_);
        multiply_keys(rows, logits);
        // The rows have been read.
        __syncwarp();
        if (threadIdx.x % 32 == 0) cuda::mbarrier_arrive(shared_.empty[place]);
      } else {
        const uint32_t rows_there = stage_rows(i);
        present[0] = (rows_there >> key & 1) != 0;
        present[1] = (rows_there >> (key + 1) & 1) != 0;
        StagedKeys rows(shared_.staged[group_][warp_]);
        multiply_keys(rows, logits);
      }
      MmaC own = add_up(logits);
      finish_logits(present, own);
      weigh(own, i == begin + group_);
      multiply_values();
    }
  }

  // Sums and states to shared memory, behind a barrier of both groups.
  __device__ __forceinline__ void leave() {
    const int lane = threadIdx.x % 32;
    GroupSums& to = shared_.sums[group_];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = lane / 4 + 8 * half;
#pragma unroll
      for (int s = 0; s < kWarpSteps; ++s) {
        const MmaC &low = sums_[2 * s], &high = sums_[2 * s + 1];
        const int channel = warp_ * kWarpChannels + lane % 4 * (kWarpChannels / 4) + 4 * s;
        *reinterpret_cast<float4*>(to.at(head, channel)) = make_float4(
            low.x[2 * half], low.x[2 * half + 1], high.x[2 * half], high.x[2 * half + 1]);
      }
      float sum = sum_[half], largest = largest_[half];
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
      }
      if (lane % 4 != 0) continue;
      own_.sum[warp_][head] = sum;
      own_.largest[warp_][head] = largest;
      own_.reference[warp_][head] = reference_[half];
    }
  }

 private:
  static constexpr int kSteps = kWarpSteps + (kHeadDim > kValueDim ? 1 : 0);

  __device__ void sync() const { cuda::sync_some(1 + group_, kGroupThreads); }

  template <QueryKind kKind>
  __device__ __forceinline__ void load_queries(int64_t first, int heads) {
    const int lane = threadIdx.x % 32;
    uint2 value[kSteps][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = lane / 4 + 8 * half;
      const int64_t of_head = first + head * params_.queries.head_stride;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int channel = s < kWarpSteps
                                ? warp_ * kWarpChannels + lane % 4 * (kWarpChannels / 4) + 4 * s
                                : kValueDim + warp_ * kRopeChannels + lane % 4 * 4;
        value[s][half] = make_uint2(0, 0);
        if (head < heads) {
          value[s][half] = load_query<kKind>(params_.queries.data, of_head + channel);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      queries_[s] = {{value[s][0].x, value[s][1].x, value[s][0].y, value[s][1].y}};
    }
  }

  // Reads rows of any kind, the warp's channels. Returns a bit for each row that there is.
  __device__ __forceinline__ uint32_t stage_rows(int step) {
    static_assert(kStepKeys == 32);
    const int lane = threadIdx.x % 32;
    const int block = step / kBlockSteps, key = step % kBlockSteps * kStepKeys + lane;
    const RowLayout& layout = params_.layouts[keys_.is_primary(block) ? 0 : 1];
    const LatentAddress row = keys_.address(block, key, keys_.place(block, key));
    StagedRows& to = shared_.staged[group_][warp_];
    __syncwarp();  // all have read the rows before
#pragma unroll 1
    for (int i = 0; i < kSteps * 16; i += 8) {
      const int channel = i < kWarpChannels ? warp_ * kWarpChannels + i
                                            : kValueDim + warp_ * kRopeChannels + i - kWarpChannels;
      *reinterpret_cast<uint4*>(&to.x[lane][i]) = layout.aligned
                                                      ? load_channels<true>(layout, row, channel)
                                                      : load_channels<false>(layout, row, channel);
    }
    const uint32_t present = __ballot_sync(0xFFFFFFFF, row.row != nullptr);
    __syncwarp();
    return present;
  }

  // Decodes the warp's channels, for the values too, and adds their products to the logits.
  template <class Keys>
  __device__ __forceinline__ void multiply_keys(Keys& keys, MmaC (&logits)[kKeyBlocks]) {
#pragma unroll
    for (int n = 0; n < kKeyBlocks; n += 2) {
      keys.open(n);
      keys.open(n + 1);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int of_two = 0; of_two < 2; ++of_two) {
          const uint2 channels =
              s < kWarpSteps ? keys.channels(n + of_two, s) : keys.rope(n + of_two);
          cuda::mma(logits[n + of_two], queries_[s], {{channels.x, channels.y}});
          if (s == kWarpSteps) continue;
          values_[n / 2][2 * s].x[of_two] = cuda::turned(channels.x);
          values_[n / 2][2 * s + 1].x[of_two] = cuda::turned(channels.y);
        }
      }
    }
  }

  // Logits of the warp's unit, from the parts of all warps in their order.
  __device__ __forceinline__ MmaC add_up(const MmaC (&logits)[kKeyBlocks]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int unit = 0; unit < kGroupWarps; ++unit) {
      const float(&x)[4] = logits[unit].x;
      own_.logits[warp_][unit][lane] = make_float4(x[0], x[1], x[2], x[3]);
    }
    sync();
    MmaC sum = {};
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) {
      const float4 part = own_.logits[w][warp_][lane];
      sum.x[0] += part.x;
      sum.x[1] += part.y;
      sum.x[2] += part.z;
      sum.x[3] += part.w;
    }
    return sum;
  }

  // In units of log2; -inf where a key is absent.
  __device__ __forceinline__ void finish_logits(const bool (&present)[2], MmaC& logits) {
    const latent::Scores& scores = params_.scores;
    const float unit = latent::logit_unit(scores);
    if (scores.logit_cap > 0) {
      const float scale = scores.logit_scale / scores.logit_cap;
#pragma unroll
      for (float& x : logits.x) x = latent::capped_fast(scale * x, scores.logit_cap);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      logits.x[i] = present[i % 2] ? logits.x[i] * unit : kNegInf;
      largest_[i / 2] = fmaxf(largest_[i / 2], logits.x[i]);
    }
  }

  // Shows the weights of the warp's unit to the others; those of all are there behind it. Where a
  // reference rises, old sums shrink.
  __device__ __forceinline__ void weigh(const MmaC& logits, bool raises) {
    const int lane = threadIdx.x % 32;
    float step_sum[2];
#pragma unroll 1
    while (true) {
      if (raises) raise(logits);
      float weights[4];
      bool grows = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float own = reference_[h];
        // While all logits are -inf, subtract 0: -inf minus -inf would be NaN.
        const float base = own == kNegInf ? 0.0f : own;
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          grows = grows || logits.x[i] > own + kSlack;
          weights[i] = cuda::exp2_fast(logits.x[i] - base);
        }
        step_sum[h] = weights[2 * h] + weights[2 * h + 1];
      }
      own_.weights[warp_][lane] = make_uint2(cuda::bf16_pair(weights[0], weights[1]),
                                             cuda::bf16_pair(weights[2], weights[3]));
      const bool vote = __any_sync(0xFFFFFFFF, grows);
      if (!raises && lane == 0) own_.votes[warp_] = vote;
      sync();
      const bool(&votes)[kGroupWarps] = own_.votes;
      // Asked of all lanes, so that the compiler knows that they agree.
      if (raises || !__any_sync(0xFFFFFFFF, votes[0] || votes[1] || votes[2] || votes[3])) break;
      raises = true;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum_[h] += step_sum[h];
  }

  // NaN is no largest logit: its weight is NaN, whatever became of it.
  __device__ __forceinline__ void raise(const MmaC& logits) {
    const int lane = threadIdx.x % 32;
    const float old[2] = {reference_[0], reference_[1]};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = fmaxf(logits.x[2 * h], logits.x[2 * h + 1]);
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
      }
      if (lane % 4 == 0) own_.step_largest[warp_][lane / 4 + 8 * h] = largest;
    }
    sync();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = kNegInf;
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        largest = fmaxf(largest, own_.step_largest[n][lane / 4 + 8 * h]);
      }
      if (!(largest > reference_[h] + kSlack)) continue;
      const float shrink = cuda::exp2_fast(reference_[h] - largest);
      reference_[h] = largest;
#pragma unroll
      for (MmaC& x : sums_) {
        x.x[2 * h] *= shrink;
        x.x[2 * h + 1] *= shrink;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (reference_[h] != old[h]) sum_[h] *= cuda::exp2_fast(old[h] - reference_[h]);
    }
  }

  __device__ __forceinline__ void multiply_values() {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; n += 2) {
      const uint2 low = own_.weights[n][lane], high = own_.weights[n + 1][lane];
      const MmaA weights{{low.x, low.y, high.x, high.y}};
#pragma unroll
      for (int i = 0; i < 2 * kWarpSteps; ++i) cuda::mma(sums_[i], weights, values_[n / 2][i]);
    }
  }

  const RowParams& params_;
  const ListedKeys& keys_;
  SharedMemory& shared_;
  GroupMemory& own_;
  int group_, warp_;
  MmaA queries_[kSteps];
  MmaB values_[kKeyBlocks / 2][2 * kWarpSteps];  // of the step
  MmaC sums_[2 * kWarpSteps];
  float reference_[2];  // of the lane's heads
  float sum_[2];        // of those that the warp weighs, by the lane's keys
  float largest_[2];    // of their logits, in units of log2
};

// By a thread per head: what both groups have, to a result or a part.
__device__ inline void finish_states(const Target& to, SharedMemory& shared) {
  const int head = threadIdx.x;
  if (head >= kHeads || !to.has(head)) return;
  float largest = kNegInf, reference = kNegInf;
#pragma unroll
  for (const GroupMemory& group : shared.groups) {
    reference = fmaxf(reference, group.reference[0][head]);
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      largest = fmaxf(largest, group.largest[n][head]);
    }
  }
  // While all are -inf, subtract 0: -inf minus -inf would be NaN.
  const float base = reference == kNegInf ? 0.0f : reference;
  float sum = 0, factors[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const GroupMemory& group = shared.groups[g];
    const float of_group = group.reference[0][head];
    factors[g] = cuda::exp2_fast(of_group - base);
    float group_sum = 0;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) group_sum += group.sum[n][head];
    // A group without a weight, or with nothing but NaN.
    sum += of_group == kNegInf ? group_sum : group_sum * factors[g];
  }
  // From the reference, which may lag behind, to the maximum.
  const float shrink = reference == largest ? 1.0f : exp2f(reference - largest);
  const float factor = shrink * latent::leave_head(to, head, kLn2 * largest, shrink * sum);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) shared.factors[g][head] = factor * factors[g];
}

// A lane puts out 8 neighbouring channels of one head after the other.
__device__ inline void leave_values(const Target& to, SharedMemory& shared) {
  const latent::RowTurn turn{to.params.rotations.row(to.t), to.params.rope_dim};
  constexpr int kPieces = kValueDim / 8;
#pragma unroll 2
  for (int i = threadIdx.x; i < kHeads * kPieces; i += kThreads) {
    const int head = i / kPieces, channel = i % kPieces * 8;
    if (!to.has(head)) break;
    float4 sums[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const auto at = [&](int g) {
        return *reinterpret_cast<const float4*>(shared.sums[g].at(head, channel + 4 * n));
      };
      const float4 a = at(0), b = at(1);
      const float of_a = shared.factors[0][head], of_b = shared.factors[1][head];
      sums[n] = make_float4(fmaf(b.x, of_b, a.x * of_a), fmaf(b.y, of_b, a.y * of_a),
                            fmaf(b.z, of_b, a.z * of_a), fmaf(b.w, of_b, a.w * of_a));
    }
    latent::leave_channels(to, turn, head, channel, 1, sums[0], sums[1]);
  }
}

template <int kHeadDim, bool kPacked>
__device__ __forceinline__ void attend_block(const RowParams& params, SharedMemory& shared) {
  const int64_t t = blockIdx.x / params.head_groups, part = blockIdx.y;
  const int64_t first_head = static_cast<int64_t>(blockIdx.x % params.head_groups) * kHeads;
  const RowParts parts = params.parts(t);
  // An empty row has no part; its first block writes the zeros.
  if (part > 0 && part >= parts.num_parts) return;
  const bool is_result = parts.num_parts <= 1;
  // Steps are few enough for an int.
  const auto begin =
      one_of_warp(kBlockSteps * static_cast<int>(is_result ? 0 : parts.first_block(part)));
  const auto end = one_of_warp(
      kBlockSteps * static_cast<int>(is_result ? parts.num_blocks : parts.first_block(part + 1)));
  const ListedKeys keys{params.segments, parts, t};
  const int group = one_of_warp(static_cast<int>(threadIdx.x) / kGroupThreads);
  if constexpr (kPacked) {
    if (group == kGroups) {
      cuda::give_registers<kBringRegisters>();
      bring_rows(params, keys, begin, end, shared);
      return;
    }
    if (threadIdx.x / 32 == 0) {
      if (threadIdx.x == 0) {
        for (Mbarrier& full : shared.full) cuda::mbarrier_init(full, kGroupWarps);
        for (Mbarrier& empty : shared.empty) cuda::mbarrier_init(empty, kGroupWarps);
        cuda::show_barriers_to_copies();
      }
      __syncwarp();
      cuda::arrive_some(kStart, 32 + kGroupThreads);
    }
    cuda::take_registers<kGroupRegisters>();
    cuda::sync_roles(kBothGroups, kThreads);
  }
  const int64_t heads_left = params.outputs.num_heads - first_head;
  GroupWork<kHeadDim, kPacked> work(params, keys, group, shared);
  work.load_queries(t, first_head, static_cast<int>(heads_left < kHeads ? heads_left : kHeads));
  work.run(begin, end);
  // Computed once more, which is cheaper than registers.
  const auto block = static_cast<unsigned>(cuda::computed_here(static_cast<int>(blockIdx.x)));
  const Target to{params, block / params.head_groups, blockIdx.y,
                  static_cast<int64_t>(block % params.head_groups) * kHeads, is_result};
  // All rows have been read.
  cuda::sync_roles(kBothGroups, kThreads);
  work.leave();
  cuda::sync_roles(kBothGroups, kThreads);
  finish_states(to, shared);
  cuda::sync_roles(kBothGroups, kThreads);
  leave_values(to, shared);
}

// Without these instructions the body is empty; supports() refuses such devices.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#define FOVEA_SM90_BODY(...) __VA_ARGS__
#else
#define FOVEA_SM90_BODY(...)
#endif

template <int kHeadDim, bool kPacked>
__global__ void __launch_bounds__(all_threads(kPacked), 1)
    attend(const __grid_constant__ RowParams params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    attend_block<kHeadDim, kPacked>(params, *reinterpret_cast<SharedMemory*>(memory));
  })
}

#undef FOVEA_SM90_BODY

}  // namespace fovea::internal::sparse_few_heads_sm90
