#pragma once

#include <cstdint>

#include "src/mla/cuda/sparse_mla_sm90/heads.cuh"

// What a block leaves behind: results, or a part's sums for the fold.
namespace fovea::internal::sparse_sm90 {

// Finishes the heads; what their sums are to be multiplied with goes to shared memory.
template <int kHeadDim>
__device__ __forceinline__ void store_heads(const Target& to, const HeadState& state,
                                            SharedMemory<kHeadDim>& shared) {
  const Scores& scores = to.params.scores;
  const float natural = scores.logit_cap > 0 ? 1.0f : scores.logit_scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int in_block = low_head() + 8 * half;
    if (threadIdx.x % 4 != 0 || !to.has(in_block)) continue;
    // From the reference, which may lag behind, to the maximum.
    const float lag = (state.reference[half] - state.largest[half]) * logit_unit(scores);
    const float shrink = state.reference[half] == state.largest[half] ? 1.0f : exp2f(lag);
    const float sum = state.sum[half] * shrink;
    const float largest = natural * state.largest[half];
    shared.factors[in_block] = shrink * latent::leave_head(to, in_block, largest, sum);
  }
}

// The 256 channels from `first_channel` on. A warp has 16 heads for itself; a lane puts out 8
// neighbouring channels of one head after the other.
__device__ __forceinline__ void store_values(const Target& to, int first_channel,
                                             const ValueSums& values, const float* factors,
                                             StagedValues& staged) {
  const int lane = threadIdx.x % 32, warp_head = threadIdx.x / 32 % 4 * 16;
#pragma unroll
  for (int quarter = 0; quarter < 2; ++quarter) {
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      const int at = 128 * quarter + i / 4 * 8 + 2 * (lane % 4);
      *reinterpret_cast<float2*>(&staged.x[low_head() + i % 4 / 2 * 8][at]) =
          make_float2(values.quarter[quarter].x[i], values.quarter[quarter].x[i + 1]);
    }
  }
  __syncwarp();
  const RowTurn turn{to.params.rotations.row(to.t), to.params.rope_dim};
  const int channel = first_channel + 8 * lane;
#pragma unroll 2
  for (int h = warp_head; h < warp_head + 16; ++h) {
    if (!to.has(h)) break;
    const auto* const from = reinterpret_cast<const float4*>(&staged.x[h][8 * lane]);
    latent::leave_channels(to, turn, h, channel, factors[h], from[0], from[1]);
  }
}

}  // namespace fovea::internal::sparse_sm90
