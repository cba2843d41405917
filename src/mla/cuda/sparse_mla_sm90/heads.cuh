#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/mla/cuda/sparse_mla_sm90/block.cuh"

// Products and softmax of a block's heads.
namespace fovea::internal::sparse_sm90 {

using cuda::PanelMatrix;
using cuda::PanelSide;
using cuda::WgmmaSums;

// A warpgroup's sums of values, 64 heads x 256 channels: a product of 256 columns would need more
// registers than the launch has.
struct ValueSums {
  WgmmaSums<128> quarter[2];
};

// Rows of the thread's sums: heads `low` and low + 8 of the block. Computed where it is used,
// because sums take the registers.
__device__ inline int low_head() {
  const int thread = cuda::computed_here(threadIdx.x);
  return thread / 32 % 4 * 16 + thread % 32 / 4;
}

// Queries of `heads` heads of row t, zeros past them, by the threads of both consumers; they are
// there after wait_for_queries().
template <int kHeadDim>
__device__ __forceinline__ void ask_queries(const Queries& queries, int64_t t, int64_t first_head,
                                            int heads, SharedMemory<kHeadDim>& shared) {
  const int64_t start = t * queries.row_stride + first_head * queries.head_stride;
  const auto place = [&](int head, int piece) {
    return shared.q[piece / 8] + cuda::panel_offset(head, piece % 8);
  };
  if (queries.aligned) {
    const auto* const from = static_cast<const bf16_t*>(queries.data) + start;
    // A thread has the same piece of every panel: one address, a step each.
    constexpr int kStepHeads = 2 * kGroupThreads / 8;
    const int piece = threadIdx.x % 8;
#pragma unroll
    for (int first = 0; first < kHeads; first += kStepHeads) {
      const int head = first + static_cast<int>(threadIdx.x) / 8;
      const bool is_there = head < heads;
      const auto* const row = from + (is_there ? head * queries.head_stride : 0) + 8 * piece;
#pragma unroll
      for (int panel = 0; panel < SharedMemory<kHeadDim>::kPanels; ++panel) {
        cuda::copy_async<16>(place(head, 8 * panel + piece), row + 64 * panel, is_there);
      }
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kHeads * kHeadDim; i += 2 * kGroupThreads) {
      const int head = i / kHeadDim, d = i % kHeadDim;
      bf16_t value{0};
      if (head < heads) {
        const int64_t at = start + head * queries.head_stride + d;
        value = queries.is_fp8
                    ? bf16_from_float(e4m3_to_float(static_cast<const uint8_t*>(queries.data)[at]))
                    : static_cast<const bf16_t*>(queries.data)[at];
      }
      reinterpret_cast<bf16_t*>(place(head, d / 8))[d % 8] = value;
    }
  }
}

__device__ __forceinline__ void wait_for_queries() {
  cuda::wait_for_copies();
  cuda::shared_stores_before_wgmma();
  cuda::sync_roles(kConsumers, 2 * kGroupThreads);
}

// Asks for Q K^T of the panels [first, end) of a tile, added to `dots` where `first` is not 0.
__device__ __forceinline__ void multiply_keys(const void* queries, Tile& tile, int first, int end,
                                              WgmmaSums<kKeys>& dots) {
  const PanelMatrix q = cuda::panel_matrix(queries, kPanelBytes);
  const PanelMatrix k = cuda::panel_matrix(tile, kPanelBytes);
  // A loop, for the sake of code that is fetched once and used 9 times.
#pragma unroll 1
  for (int panel = first; panel < end; ++panel) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int at = panel * kPanelBytes + 32 * step;
      cuda::wgmma<PanelSide::kRows>(dots, q.advanced(at), k.advanced(at), panel + step);
    }
  }
}

// Asks for the weights of 16 keys from `key` on times the 256 channels from panel `first_panel` on.
__device__ __forceinline__ void multiply_step(const void* weights, Tile& tile, int first_panel,
                                              int key, ValueSums& values) {
  const PanelMatrix p = cuda::panel_matrix(weights, kPanelBytes).advanced(2 * key);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PanelMatrix v = cuda::panel_matrix(tile[first_panel + 2 * i], kPanelBytes);
    cuda::wgmma<PanelSide::kColumns>(values.quarter[i], p, v.advanced(key * cuda::kPanelRowBytes),
                                     1);
  }
}

// The same for those steps of a tile that are among the bits of `steps`.
__device__ __forceinline__ void multiply_values(const void* weights, Tile& tile, int first_panel,
                                                uint32_t steps, ValueSums& values) {
#pragma unroll
  for (int key = 0; key < kKeys; key += 16) {
    if ((steps >> (key / 16) & 1) != 0) multiply_step(weights, tile, first_panel, key, values);
  }
}
inline constexpr uint32_t kAllSteps = 0xF;

__device__ __forceinline__ void pin(ValueSums& values) {
  cuda::wgmma_pin(values.quarter[0]);
  cuda::wgmma_pin(values.quarter[1]);
}

// The steps of the tile in hand where a head of the block has a rest that counts.
template <int kHeadDim>
__device__ __forceinline__ uint32_t shared_rest_steps(const SharedMemory<kHeadDim>& shared) {
  const uint32_t of_warps = *reinterpret_cast<const uint32_t*>(shared.rest_steps);
  return (of_warps | of_warps >> 8 | of_warps >> 16 | of_warps >> 24) & kAllSteps;
}

// Sums of the low head by `low`, of the other by `high`.
__device__ __forceinline__ void shrink_values(float low, float high, ValueSums& values) {
  if (__all_sync(0xFFFFFFFF, low == 1 && high == 1)) return;
#pragma unroll
  for (auto& sums : values.quarter) {
#pragma unroll
    for (int n = 0; n < 64; n += 4) {
      sums.x[n] *= low;
      sums.x[n + 1] *= low;
      sums.x[n + 2] *= high;
      sums.x[n + 3] *= high;
    }
  }
}

// The softmax of two heads of a thread; the four lanes of a head have the same.
struct HeadState {
  float largest[2] = {kNegInf, kNegInf};  // in units of the dots, or of the capped logits
  // What weights are relative to: a maximum that may lag behind, so that sums seldom shrink.
  float reference[2] = {kNegInf, kNegInf};
  float sum[2] = {0, 0};
  float shrink[2];

  // Weights above a part of the sum so far have a rest.
  __device__ float rest_limit(int half) const { return sum[half] * (1.0f / 16); }
};
// The largest weight is at most 2 to that.
inline constexpr float kLag = 8;

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Makes weights of the dots of a tile and takes them into the state of each head. A NaN logit does
// not become the maximum; it makes its own weight NaN, and with it the head's sum. Returns a bit
// for each 16 keys where a weight of the thread has a rest that counts; what one bf16 lacks of the
// others is below the rounding of the output.
__device__ __forceinline__ uint32_t softmax(const Scores& scores, uint64_t present,
                                            WgmmaSums<kKeys>& dots, HeadState& state) {
  const int lane = cuda::computed_here(threadIdx.x) % 32;
  const float unit = logit_unit(scores);
  if (scores.logit_cap > 0) {
    const float scale = scores.logit_scale / scores.logit_cap;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
      dots.x[i] = latent::capped_fast(scale * dots.x[i], scores.logit_cap);
  }
  if (present != ~uint64_t{0}) {
    const uint64_t own = present >> (2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if ((own >> (i / 4 * 8 + i % 2) & 1) == 0) dots.x[i] = kNegInf;
    }
  }
  uint32_t rest_steps = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float tile_max = kNegInf;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      tile_max = fmaxf(tile_max, fmaxf(dots.x[4 * n + 2 * half], dots.x[4 * n + 2 * half + 1]));
    }
    const float largest = fmaxf(state.largest[half], quad_max(tile_max));
    state.largest[half] = largest;
    const float before = state.reference[half];
    // -inf - -inf is not above the lag.
    const bool moves = (largest - before) * unit > kLag;
    const float reference = moves ? largest : before;
    state.reference[half] = reference;
    state.shrink[half] = moves ? exp2f((before - reference) * unit) : 1.0f;
    // Without any weight so far, -inf - -inf must not become NaN; a NaN logit must stay one.
    const float start = reference == kNegInf ? 0.0f : -reference * unit;
    float sum = 0, heaviest[kKeys / 16];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      float& first = dots.x[4 * n + 2 * half];
      float& second = dots.x[4 * n + 2 * half + 1];
      first = cuda::exp2_fast(fmaf(first, unit, start));
      second = cuda::exp2_fast(fmaf(second, unit, start));
      sum += first + second;
      const float larger = fmaxf(first, second);
      heaviest[n / 2] = n % 2 == 0 ? larger : fmaxf(heaviest[n / 2], larger);
    }
    state.sum[half] = fmaf(state.sum[half], state.shrink[half], quad_sum(sum));
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      if (!(heaviest[step] <= state.rest_limit(half))) rest_steps |= 1u << step;
    }
  }
  return rest_steps;
}

// The place of the thread's first pair of weights in a panel; piece n is `^ n << 4` from there, the
// high head 8 rows.
__device__ inline int weights_offset() {
  return cuda::panel_offset(low_head(), 0) + 4 * (cuda::computed_here(threadIdx.x) % 4);
}
inline constexpr int kHighHead = 8 * cuda::kPanelRowBytes;

// The thread's weights to the panel `to`, each as one bf16.
__device__ __forceinline__ void store_weights(const WgmmaSums<kKeys>& weights, uint8_t* to) {
  const int offset = weights_offset();
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    uint8_t* const at = to + (offset ^ n << 4);
    const float* const x = weights.x + 4 * n;
    *reinterpret_cast<uint32_t*>(at) = cuda::bf16_pair(x[0], x[1]);
    *reinterpret_cast<uint32_t*>(at + kHighHead) = cuda::bf16_pair(x[2], x[3]);
  }
}

// What that lacks of the keys of those `steps`: of each weight above its head's limit, otherwise
// zero. So a weight decides alone, and neither the heads nor the keys beside it change a bit.
__device__ __forceinline__ void store_rests(const WgmmaSums<kKeys>& weights, uint32_t steps,
                                            const HeadState& state, uint8_t* to) {
  const int offset = weights_offset();
  const float low = state.rest_limit(0), high = state.rest_limit(1);
  // A NaN is none of the light ones.
  const auto heavy = [](float weight, float limit) { return weight <= limit ? 0.0f : weight; };
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    if ((steps >> (n / 2) & 1) == 0) continue;
    uint8_t* const at = to + (offset ^ n << 4);
    const float* const x = weights.x + 4 * n;
    *reinterpret_cast<uint32_t*>(at) = cuda::SplitPair(heavy(x[0], low), heavy(x[1], low)).rest;
    *reinterpret_cast<uint32_t*>(at + kHighHead) =
        cuda::SplitPair(heavy(x[2], high), heavy(x[3], high)).rest;
  }
}

}  // namespace fovea::internal::sparse_sm90
