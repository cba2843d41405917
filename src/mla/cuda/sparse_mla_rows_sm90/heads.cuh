#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/mla/cuda/sparse_mla_rows_sm90/block.cuh"

// Products and softmax of a block's heads.
namespace fovea::internal::sparse_rows_sm90 {

using cuda::PanelMatrix;
using cuda::PanelSide;
using cuda::WgmmaA;
using cuda::WgmmaSums;

// A warpgroup's sums: 64 heads x 256 channels.
using ValueSums = WgmmaSums<kHalfChannels>;

// A warpgroup's weights of a tile, rounded, as A of the products with values.
struct Weights {
  WgmmaA step[kKeys / 16];
};

__device__ __forceinline__ void pin(Weights& weights) {
#pragma unroll
  for (WgmmaA& step : weights.step) {
#pragma unroll
    for (uint32_t& pair : step.x) cuda::hold(pair);
  }
}

// Rows of the thread's sums: heads `low` and low + 8 of the block. Computed where it is used,
// because sums take the registers.
__device__ inline int low_head() {
  const int thread = cuda::computed_here(threadIdx.x);
  return thread / 32 % 4 * 16 + thread % 32 / 4;
}

// Asks for Q K^T of the panels [first, end) of a tile, added to `dots` unless `is_start`.
__device__ __forceinline__ void multiply_keys(const void* queries, Tile& tile, int first, int end,
                                              bool is_start, WgmmaSums<kKeys>& dots) {
  const PanelMatrix q = cuda::panel_matrix(queries, kPanelBytes);
  const PanelMatrix k = cuda::panel_matrix(tile, kPanelBytes);
  // A loop, for the sake of code that is fetched once and used 9 times.
#pragma unroll 1
  for (int panel = first; panel < end; ++panel) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int at = panel * kPanelBytes + 32 * step;
      cuda::wgmma<PanelSide::kRows>(dots, q.advanced(at), k.advanced(at),
                                    step > 0 || panel > first || !is_start);
    }
  }
}

// Asks for the weights of the warpgroup's own tile times the 256 channels from `first_panel` on.
__device__ __forceinline__ void multiply_own(const Weights& weights, Tile& tile, int first_panel,
                                             ValueSums& values) {
  const PanelMatrix v = cuda::panel_matrix(tile[first_panel], kPanelBytes);
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    cuda::wgmma<PanelSide::kColumns>(values, weights.step[i],
                                     v.advanced(16 * i * cuda::kPanelRowBytes), 1);
  }
}

// The same with the weights that the other warpgroup left in the tile.
__device__ __forceinline__ void multiply_other(Tile& tile, int first_panel, ValueSums& values) {
  const PanelMatrix p = cuda::panel_matrix(tile[kWeightPanel], kPanelBytes);
  const PanelMatrix v = cuda::panel_matrix(tile[first_panel], kPanelBytes);
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    cuda::wgmma<PanelSide::kColumns>(values, p.advanced(32 * i),
                                     v.advanced(16 * i * cuda::kPanelRowBytes), 1);
  }
}

// Sums of the low head by `shrink[0]`, of the other by `shrink[1]`.
__device__ __forceinline__ void shrink_values(const float (&shrink)[2], ValueSums& values) {
  if (__all_sync(0xFFFFFFFF, shrink[0] == 1 && shrink[1] == 1)) return;
#pragma unroll
  for (int n = 0; n < kHalfChannels / 2; n += 4) {
    values.x[n] *= shrink[0];
    values.x[n + 1] *= shrink[0];
    values.x[n + 2] *= shrink[1];
    values.x[n + 3] *= shrink[1];
  }
}

// The softmax of two heads of a thread.
struct HeadState {
  float largest[2] = {kNegInf, kNegInf};  // in units of the dots
  // What weights are relative to: a maximum that may lag behind, so that sums seldom shrink.
  float reference[2] = {kNegInf, kNegInf};
  float sum[2] = {0, 0};  // of the thread's weights
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

// What sums relative to `before` are multiplied with to be relative to `reference`. Without any
// weight so far they are zero.
__device__ inline float shrink_to(float reference, float before, float unit) {
  return reference == before || before == kNegInf ? 1.0f : exp2f((before - reference) * unit);
}

// Takes over where the other warpgroup has come to.
__device__ __forceinline__ void follow(const HeadScale* scales, float unit, HeadState& state,
                                       float (&shrink)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const HeadScale scale = scales[low_head() + 8 * half];
    const float before = state.reference[half];
    shrink[half] = shrink_to(scale.reference, before, unit);
    state.largest[half] = scale.largest;
    state.reference[half] = scale.reference;
    state.sum[half] *= shrink[half];
  }
}
__device__ __forceinline__ void leave(const HeadState& state, HeadScale* scales) {
  if (threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    scales[low_head() + 8 * half] = {state.largest[half], state.reference[half]};
}

// Makes weights of the dots of a tile, relative to the state's reference; adds them to `sums`. One
// of a NaN logit is NaN, and with it the head's sum.
__device__ __forceinline__ void weigh(float unit, const WgmmaSums<kKeys>& dots,
                                      const HeadState& state, float (&sums)[2], Weights& weights) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float reference = state.reference[half];
    // Without any weight so far, -inf - -inf must not become NaN; a NaN logit must stay one.
    const float start = reference == kNegInf ? 0.0f : -reference * unit;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const float first = cuda::exp2_fast(fmaf(dots.x[4 * n + 2 * half], unit, start));
      const float second = cuda::exp2_fast(fmaf(dots.x[4 * n + 2 * half + 1], unit, start));
      sum += first + second;
      weights.step[n / 2].x[n % 2 * 2 + half] = cuda::bf16_pair(first, second);
    }
    sums[half] = sum;
  }
}

// Makes weights of the dots of a tile and takes them into the state of each head. A NaN logit does
// not become the maximum. Weights are made with the reference so far beside the search for the
// largest logit, and again where it has to move.
__device__ __forceinline__ void softmax(float unit, uint64_t present, WgmmaSums<kKeys>& dots,
                                        HeadState& state, float (&shrink)[2], Weights& weights) {
  if (present != ~uint64_t{0}) {
    const uint64_t own = present >> (2 * (cuda::computed_here(threadIdx.x) % 4));
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if ((own >> (i / 4 * 8 + i % 2) & 1) == 0) dots.x[i] = kNegInf;
    }
  }
  float sums[2];
  weigh(unit, dots, state, sums, weights);
  bool moves[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float tile_max = kNegInf;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      tile_max = fmaxf(tile_max, fmaxf(dots.x[4 * n + 2 * half], dots.x[4 * n + 2 * half + 1]));
    }
    state.largest[half] = fmaxf(state.largest[half], quad_max(tile_max));
    // -inf - -inf is not above the lag.
    moves[half] = (state.largest[half] - state.reference[half]) * unit > kLag;
    shrink[half] = 1;
  }
  if (__any_sync(0xFFFFFFFF, moves[0] || moves[1])) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!moves[half]) continue;
      shrink[half] = shrink_to(state.largest[half], state.reference[half], unit);
      state.reference[half] = state.largest[half];
    }
    weigh(unit, dots, state, sums, weights);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    state.sum[half] = fmaf(state.sum[half], shrink[half], sums[half]);
}

// The weights to the tile, for the other warpgroup.
__device__ __forceinline__ void store_weights(const Weights& weights, Tile& tile) {
  const int lane = cuda::computed_here(threadIdx.x) % 32;
  const int row = cuda::computed_here(threadIdx.x) / 32 % 4 * 16 + lane % 16;
  const int offset = cuda::panel_offset(row, lane / 16);
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i)
    cuda::store_rows(tile[kWeightPanel] + (offset ^ i << 5), weights.step[i].x);
}

}  // namespace fovea::internal::sparse_rows_sm90
