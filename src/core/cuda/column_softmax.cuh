#pragma once

#include <cstdint>
#include <limits>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/wgmma.cuh"

/// Softmax of logits that stand on their side, [64 tokens][16 heads], as a product of keys with few
/// queries leaves them in a warpgroup (compute capability 9.0, code for sm_90a).
namespace fovea::internal::cuda {

/// Of a warpgroup, in shared memory.
struct ColumnMemory {
  float warp_largest[4][16];
  bool votes[2][4];  // tiles in turn: whether a logit is too large for its reference
};

/// Lane (g, c) = (lane / 4, lane % 4) has heads 8 j + 2 c + e in place 2 j + e, of tokens
/// 16 warp + g and + 8 (WgmmaSums). Weights are relative to references that follow the largest
/// logits by more than kSlack only: few tiles change old sums.
struct ColumnSoftmax {
  static constexpr int kPlaces = 4;
  static constexpr float kSlack = 8;  // weights up to 2^8
  static constexpr float kNegInf = -std::numeric_limits<float>::infinity();

  float reference[kPlaces];  // in units of log2
  float sum[kPlaces];        // of the lane's tokens

  __device__ static int lane_head(int place) {
    return place / 2 * 8 + 2 * static_cast<int>(threadIdx.x % 4) + place % 2;
  }

  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) {
      reference[h] = kNegInf;
      sum[h] = 0;
    }
  }

  /// Takes a tile's logits (in units of log2, -inf where a token is absent) in. Their weights, sums
  /// of two bf16, go to the panels `rounded` and `rest`, [16 heads][64 tokens], for products behind
  /// it. Where a reference rises, shrinks `panels`, the sums so far: [channels][16 heads], or
  /// [channels][32] with 16 heads twice. `barrier` is that of the warpgroup; `index` counts tiles.
  template <class Panel, int kPanels>
  __device__ __forceinline__ void add(const WgmmaSums<16>& logits, int index, int warp, int barrier,
                                      ColumnMemory& shared, uint8_t* rounded, uint8_t* rest,
                                      Panel (&panels)[kPanels]) {
    constexpr int kThreads = 128;
    bool raises = index == 0;
    float tile_sum[kPlaces];
#pragma unroll 1
    while (true) {
      if (raises) raise(logits, warp, barrier, shared, panels);
      const bool grows = __any_sync(0xFFFFFFFF, weigh(logits, warp, rounded, rest, tile_sum));
      bool(&votes)[4] = shared.votes[index % 2];
      if (!raises && threadIdx.x % 32 == 0) votes[warp] = grows;
      shared_stores_before_wgmma();
      sync_some(barrier, kThreads);
      // Asked of all lanes, so that the compiler knows that they agree.
      if (raises || !__any_sync(0xFFFFFFFF, votes[0] || votes[1] || votes[2] || votes[3])) break;
      raises = true;
    }
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) sum[h] += tile_sum[h];
  }

 private:
  // NaN is no largest logit: its weight is NaN, whatever became of it.
  template <class Panel, int kPanels>
  __device__ __forceinline__ void raise(const WgmmaSums<16>& logits, int warp, int barrier,
                                        ColumnMemory& shared, Panel (&panels)[kPanels]) {
    float largest[kPlaces];
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) {
      largest[h] = fmaxf(logits.x[h / 2 * 4 + h % 2], logits.x[h / 2 * 4 + 2 + h % 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xFFFFFFFF, largest[h], step));
      }
      if (threadIdx.x % 32 < 4) shared.warp_largest[warp][lane_head(h)] = largest[h];
    }
    sync_some(barrier, 128);
#pragma unroll
    for (int p = 0; p < kPanels; ++p) wgmma_pin(panels[p]);
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) {
      largest[h] = kNegInf;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        largest[h] = fmaxf(largest[h], shared.warp_largest[w][lane_head(h)]);
      }
      if (!(largest[h] > reference[h] + kSlack)) continue;
      const float shrink = exp2_fast(reference[h] - largest[h]);
      reference[h] = largest[h];
      sum[h] *= shrink;
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
#pragma unroll
        for (int i = h / 2 * 4 + h % 2; i < static_cast<int>(sizeof(Panel) / sizeof(float));
             i += 8) {
          panels[p].x[i] *= shrink;
          panels[p].x[i + 2] *= shrink;
        }
      }
    }
  }

  // Returns whether a logit is too large for its reference.
  __device__ __forceinline__ bool weigh(const WgmmaSums<16>& logits, int warp, uint8_t* rounded,
                                        uint8_t* rest, float (&tile_sum)[kPlaces]) const {
    float weights[8];
    bool grows = false;
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) {
      // While all logits are -inf, subtract 0: -inf minus -inf would be NaN.
      const float base = reference[h] == kNegInf ? 0.0f : reference[h];
      float two[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = h / 2 * 4 + 2 * half + h % 2;
        grows = grows || logits.x[i] > reference[h] + kSlack;
        weights[i] = two[half] = exp2_fast(logits.x[i] - base);
      }
      tile_sum[h] = two[0] + two[1];
    }
    uint32_t pairs[4], rests[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SplitPair pair(weights[2 * i], weights[2 * i + 1]);
      pairs[i] = pair.rounded;
      rests[i] = pair.rest;
    }
    const int lane = threadIdx.x % 32;
    const int at = panel_offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
    store_columns(rounded + at, pairs);
    store_columns(rest + at, rests);
    return grows;
  }
};

}  // namespace fovea::internal::cuda
