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
    const float largest = quad_max(state.largest[half]);
    if (threadIdx.x % 4 != 0 || !to.has(in_block)) continue;
    // From the reference, which may lag behind, to the maximum.
    const float lag = (state.reference[half] - largest) * logit_unit(scores);
    const float shrink = state.reference[half] == largest ? 1.0f : exp2f(lag);
    const float sum = state.sum[half] * shrink;
    shared.factors[in_block] = shrink * latent::leave_head(to, in_block, natural * largest, sum);
  }
}

// What the stores will want of memory, asked for when the block starts, by both consumers; behind
// the next barrier the place of the rotation is known.
template <int kHeadDim>
__device__ __forceinline__ void prefetch_for_store(const Params& params, int64_t t,
                                                   int64_t first_head, int heads,
                                                   SharedMemory<kHeadDim>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* const sink = params.outputs.sink;
  if (lane == 0 && sink != nullptr && 32 * warp < heads)
    cuda::prefetch_l2(sink + first_head + 32 * warp);
  if (warp != 2 * kGroupThreads / 32 - 1) return;
  const float* const rotation = params.rotations.row(t);
  if (lane == 0) shared.rotation = rotation;
  if (rotation != nullptr && 32 * lane < params.rope_dim) cuda::prefetch_l2(rotation + 32 * lane);
}

// The inverse rotation of a lane's 8 channels, the same for every head.
struct LaneTurn {
  int first = 4;  // of the four pairs that are turned
  float cosine[4], sine[4];

  __device__ LaneTurn(const float* rotation, int rope_dim, int channel) {
    if (rotation == nullptr) return;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const int at = channel + 2 * i - (kValueDim - rope_dim);
      if (at < 0) break;
      first = i;
      cosine[i] = rotation[at / 2];
      sine[i] = rotation[(at + rope_dim) / 2];
    }
  }
  __device__ float2 operator()(int i, float2 pair) const {
    if (i < first) return pair;
    return make_float2(pair.x * cosine[i] + pair.y * sine[i],
                       pair.y * cosine[i] - pair.x * sine[i]);
  }
};

// The 256 channels from `first_channel` on, by way of shared memory. A warp has 16 heads for
// itself; a lane puts out 8 neighbouring channels of one head after the other.
template <int kHeadDim>
__device__ __forceinline__ void store_values(const Target& to, int first_channel,
                                             const ValueSums& values,
                                             SharedMemory<kHeadDim>& shared) {
  const Outputs& outputs = to.params.outputs;
  StagedValues& staged = shared.staged(first_channel / kHalfChannels);
  const int lane = threadIdx.x % 32, first_head = threadIdx.x / 32 % 4 * 16;
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
  const int64_t heads_left = outputs.num_heads - to.head(first_head);
  const int num_heads = static_cast<int>(heads_left < 16 ? heads_left : 16);
  const int channel = first_channel + 8 * lane;
  const float* from = &staged.x[first_head][8 * lane];
  const float* factors = shared.factors + first_head;
  constexpr int kStagedStride = sizeof(staged.x[0]) / sizeof(float);
  if (!to.is_result) {
    // Four neighbouring channels, so that a warp stores whole lines.
    from -= 4 * lane;
    float* row = outputs.part_values +
                 outputs.part_index(to.t, to.part, to.head(first_head)) * kValueDim + channel -
                 4 * lane;
#pragma unroll 4
    for (int h = 0; h < num_heads; ++h) {
      const float factor = factors[h];
#pragma unroll
      for (int i = 0; i < kHalfChannels; i += 4 * 32) {
        const float4 x = *reinterpret_cast<const float4*>(from + i);
        *reinterpret_cast<float4*>(row + i) =
            make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w);
      }
      from += kStagedStride;
      row += kValueDim;
    }
    return;
  }
  const LaneTurn turn(shared.rotation, to.params.rope_dim, channel);
#pragma unroll 2
  for (int h = 0; h < num_heads; ++h) {
    const float factor = factors[h];
    const float4 low = *reinterpret_cast<const float4*>(from);
    const float4 high = *reinterpret_cast<const float4*>(from + 4);
    bf16_t* const row = outputs.out.row(to.t, to.head(first_head + h)) + channel;
    latent::leave_result(row, to.params.wide_out, turn, factor, low, high);
    from += kStagedStride;
  }
}

}  // namespace fovea::internal::sparse_sm90
