#pragma once

#include <cstdint>

#include "src/mla/cuda/sparse_mla_window_sm90/block.cuh"

// Queries, products and softmax of a warpgroup's 64 heads.
namespace fovea::internal::sparse_window_sm90 {

using cuda::PanelMatrix;
using cuda::PanelSide;
using Logits = cuda::WgmmaSums<kKeys>;
using Values = cuda::WgmmaSums<kQuarterChannels>;

// The thread's weights, rounded: a piece of A for each 16 keys.
inline constexpr int kSteps = kKeys / 16;
struct Weights {
  cuda::WgmmaA step[kSteps];
};

// Of the warpgroup: rows of the thread's sums are heads `low` and low + 8.
__device__ inline int low_head() {
  return static_cast<int>(threadIdx.x / 32 % 4 * kWarpHeads + threadIdx.x % 32 / 4);
}

// Asks for the queries of a quarter of the channels, zeros past the last head: those of 64 heads by
// each warpgroup of a wide block; otherwise a warpgroup brings one of the two panels.
template <class Shape>
__device__ __forceinline__ void ask_queries(const Params& params, int group, int64_t t,
                                            int first_head, int quarter, SharedMemory& shared) {
  const latent::Queries& queries = params.queries;
  const auto heads_left = static_cast<int>(params.outputs.num_heads - first_head);
  const int first_panel = Shape::kIsWide ? 0 : group;
  uint8_t* const panel =
      shared.places[Shape::query_place(group, quarter)] + first_panel * kHeadPanelBytes;
  const int64_t start = t * queries.row_stride + first_head * queries.head_stride +
                        kQuarterChannels * quarter + 64 * first_panel;
  const auto* const data = static_cast<const bf16_t*>(queries.data) + start;
  const int thread = threadIdx.x % kGroupThreads, piece = thread % 8;
  if (queries.aligned) {
    constexpr int kStepHeads = kGroupThreads / 8;
    uint8_t* const to = panel + cuda::panel_offset(thread / 8, piece);
    const bf16_t* from = data + 8 * piece;
#pragma unroll
    for (int i = 0; i < kHeads; i += kStepHeads) {
      const int head = i + thread / 8;
      const bool is_there = head < heads_left;
      const bf16_t* const row = from + (is_there ? head * queries.head_stride : 0);
      cuda::copy_async<16>(to + i * cuda::kPanelRowBytes, row, is_there);
      if (Shape::kIsWide) {
        cuda::copy_async<16>(to + kHeadPanelBytes + i * cuda::kPanelRowBytes, row + 64, is_there);
      }
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < kHeads * kQuarterChannels; i += kGroupThreads) {
      const int head = i / kQuarterChannels, d = i % kQuarterChannels;
      if (d >= 64 && !Shape::kIsWide) continue;
      const bf16_t value = head < heads_left ? data[head * queries.head_stride + d] : bf16_t{0};
      uint8_t* const to = panel + d / 64 * kHeadPanelBytes + cuda::panel_offset(head, d % 64 / 8);
      reinterpret_cast<bf16_t*>(to)[d % 8] = value;
    }
  }
}

// Asks for Q K^T of a quarter of the channels.
template <class Shape>
__device__ __forceinline__ void multiply_keys(int group, int quarter, SharedMemory& shared,
                                              Logits& dots) {
  const PanelMatrix q =
      cuda::panel_matrix(shared.places[Shape::query_place(group, quarter)], kHeadPanelBytes);
  const PanelMatrix k = cuda::panel_matrix(shared.keys[kQuarterPanels * quarter], kKeyPanelBytes);
#pragma unroll
  for (int panel = 0; panel < kQuarterPanels; ++panel) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      cuda::wgmma<PanelSide::kRows>(dots, q.advanced(panel * kHeadPanelBytes + 32 * step),
                                    k.advanced(panel * kKeyPanelBytes + 32 * step),
                                    quarter + panel + step);
    }
  }
}

// Asks for the values of 16 keys of a quarter of the channels.
__device__ __forceinline__ void multiply_step(const Weights& weights, int quarter, int step,
                                              SharedMemory& shared, Values& values) {
  const PanelMatrix v = cuda::panel_matrix(shared.keys[kQuarterPanels * quarter], kKeyPanelBytes);
  cuda::wgmma<PanelSide::kColumns>(values, weights.step[step],
                                   v.advanced(16 * step * cuda::kPanelRowBytes), step);
}
// Of all keys.
__device__ __forceinline__ void multiply_values(const Weights& weights, int quarter,
                                                SharedMemory& shared, Values& values) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) multiply_step(weights, quarter, step, shared, values);
}

__device__ __forceinline__ void pin(Weights& weights) {
#pragma unroll
  for (cuda::WgmmaA& step : weights.step) {
#pragma unroll
    for (uint32_t& x : step.x) cuda::hold(x);
  }
}

// The softmax of a thread's two heads: what their weights are relative to, and their sum.
struct HeadSums {
  float largest[2];  // in units of the dots, the same in four neighbours
  float start[2];
  float sum[2];  // of the lane's keys

  // Absent keys go. A NaN logit does not become the maximum; it makes its own weight NaN, and with
  // it the head's sum.
  __device__ __forceinline__ HeadSums(float unit, SharedMemory& shared, Logits& dots) {
    const uint4 present = *reinterpret_cast<const uint4*>(shared.present);
    if ((present.x & present.y & present.z & present.w) != 0xFFFFFFFF) {
      const uint32_t shift = 2 * (threadIdx.x % 4);
      const uint32_t word[4] = {present.x >> shift, present.y >> shift, present.z >> shift,
                                present.w >> shift};
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if ((word[i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1) == 0) dots.x[i] = kNegInf;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = kNegInf;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        x = fmaxf(x, fmaxf(dots.x[4 * n + 2 * half], dots.x[4 * n + 2 * half + 1]));
      x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
      largest[half] = x;
      sum[half] = 0;
      // Without any key, -inf - -inf must not become NaN; a NaN logit must stay one.
      start[half] = x == kNegInf ? 0.0f : -x * unit;
    }
  }

  // Makes weights of the dots of 16 keys.
  __device__ __forceinline__ void weigh(float unit, int step, const Logits& dots,
                                        Weights& weights) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2;
      const float* const x = dots.x + 8 * step + 4 * (i / 2) + 2 * half;
      const float first = cuda::exp2_fast(fmaf(x[0], unit, start[half]));
      const float second = cuda::exp2_fast(fmaf(x[1], unit, start[half]));
      sum[half] += first + second;
      weights.step[step].x[i] = cuda::bf16_pair(first, second);
    }
  }

  // Of all keys, behind the last weigh().
  __device__ __forceinline__ float sum_of(int half) const {
    const float two = sum[half] + __shfl_xor_sync(0xFFFFFFFF, sum[half], 1);
    return two + __shfl_xor_sync(0xFFFFFFFF, two, 2);
  }
};

}  // namespace fovea::internal::sparse_window_sm90
