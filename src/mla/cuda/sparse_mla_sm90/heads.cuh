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

// The thread's weights of a tile, rounded: a piece of A for each 16 keys.
inline constexpr int kSteps = kKeys / 16;
struct Weights {
  cuda::WgmmaA step[kSteps];
};

// Rows of the thread's sums: heads `low` and low + 8 of the block. Computed where it is used,
// because sums take the registers.
__device__ inline int low_head() {
  const auto thread = static_cast<uint32_t>(cuda::computed_here(static_cast<int>(threadIdx.x)));
  return static_cast<int>(thread / 32 % 4 * 16 + thread % 32 / 4);
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

// Asks for the weights of 16 keys from `key` on, in registers or in shared memory, times the 256
// channels from panel `first_panel` on.
template <class Weights>
__device__ __forceinline__ void multiply_step(const Weights& weights, Tile& tile, int first_panel,
                                              int key, ValueSums& values) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PanelMatrix v = cuda::panel_matrix(tile[first_panel + 2 * i], kPanelBytes);
    cuda::wgmma<PanelSide::kColumns>(values.quarter[i], weights,
                                     v.advanced(key * cuda::kPanelRowBytes), 1);
  }
}

// Asks for the first half of the channels, with the thread's own weights.
__device__ __forceinline__ void multiply_left(const Weights& weights, Tile& tile,
                                              ValueSums& values) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    multiply_step(weights.step[step], tile, 0, 16 * step, values);
}
// The second half, with those in shared memory.
__device__ __forceinline__ void multiply_right(const uint8_t* weights, Tile& tile,
                                               ValueSums& values) {
  const PanelMatrix p = cuda::panel_matrix(weights, kPanelBytes);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    multiply_step(p.advanced(32 * step), tile, kHalfPanels, 16 * step, values);
}

__device__ __forceinline__ void pin(ValueSums& values) {
  cuda::wgmma_pin(values.quarter[0]);
  cuda::wgmma_pin(values.quarter[1]);
}
__device__ __forceinline__ void pin(Weights& weights) {
#pragma unroll
  for (cuda::WgmmaA& step : weights.step) {
#pragma unroll
    for (uint32_t& x : step.x) cuda::hold(x);
  }
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

// The softmax of two heads of a thread. Exchanges wait for the shared memory of the others: a tile
// has none before its weights are there, unless the reference of a head moves.
struct HeadState {
  // In units of the dots, or of the capped logits: of the lane's keys, and at times of the keys of
  // all four lanes of a head.
  float largest[2] = {kNegInf, kNegInf};
  // What weights are relative to: a maximum that may lag behind, so that sums seldom shrink. Like
  // what follows, the same for the four lanes.
  float reference[2] = {kNegInf, kNegInf};
  float sum[2] = {0, 0};
  float shrink[2];
  float tile_sum[2];  // of the lane's keys of the last tile, not among `sum` yet

  // -inf - -inf is not above the lag.
  __device__ bool lags(int half, float unit) const {
    return (largest[half] - reference[half]) * unit > kLag;
  }
  // Takes the last tile into the sums.
  __device__ __forceinline__ void add_tile() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum[half] = fmaf(sum[half], shrink[half], quad_sum(tile_sum[half]));
  }
};

// Makes weights of the dots of a tile; state.add_tile() takes them into the sums. A NaN logit does
// not become the maximum; it makes its own weight NaN, and with it the head's sum.
__device__ __forceinline__ void softmax(const Scores& scores, uint64_t present,
                                        WgmmaSums<kKeys>& dots, HeadState& state,
                                        Weights& weights) {
  const float unit = logit_unit(scores);
  if (scores.logit_cap > 0) {
    const float scale = scores.logit_scale / scores.logit_cap;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
      dots.x[i] = latent::capped_fast(scale * dots.x[i], scores.logit_cap);
  }
  if (present != ~uint64_t{0}) {
    const uint32_t thread =
        static_cast<uint32_t>(cuda::computed_here(static_cast<int>(threadIdx.x)));
    const uint64_t own = present >> (2 * (thread % 4));
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if ((own >> (i / 4 * 8 + i % 2) & 1) == 0) dots.x[i] = kNegInf;
    }
  }
  state.shrink[0] = state.shrink[1] = 1;
  bool moves = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& largest = state.largest[half];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      largest = fmaxf(largest, fmaxf(dots.x[4 * n + 2 * half], dots.x[4 * n + 2 * half + 1]));
    }
    moves |= state.lags(half, unit);
  }
  if (__any_sync(0xFFFFFFFF, moves)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.largest[half] = quad_max(state.largest[half]);
      if (!state.lags(half, unit)) continue;
      state.shrink[half] = cuda::exp2_fast((state.reference[half] - state.largest[half]) * unit);
      state.reference[half] = state.largest[half];
    }
  }
  float start[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Without any weight so far, -inf - -inf must not become NaN; a NaN logit must stay one.
    const float reference = state.reference[half];
    start[half] = reference == kNegInf ? 0.0f : -reference * unit;
    state.tile_sum[half] = 0;
  }
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const x = dots.x + 4 * n + 2 * half;
      const float first = cuda::exp2_fast(fmaf(x[0], unit, start[half]));
      const float second = cuda::exp2_fast(fmaf(x[1], unit, start[half]));
      state.tile_sum[half] += first + second;
      weights.step[n / 2].x[n % 2 * 2 + half] = cuda::bf16_pair(first, second);
    }
  }
}

// The warp's weights to the panel `to`, for the other warpgroup.
__device__ __forceinline__ void store_weights(const Weights& weights, uint8_t* to) {
  const auto thread = static_cast<uint32_t>(cuda::computed_here(static_cast<int>(threadIdx.x)));
  const uint32_t head = thread / 32 % 4 * 16 + thread % 16;
  const uint32_t offset = head * cuda::kPanelRowBytes + ((thread % 32 / 16 ^ thread % 8) << 4);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    cuda::store_rows(to + (offset ^ step << 5), weights.step[step].x);
}

}  // namespace fovea::internal::sparse_sm90
