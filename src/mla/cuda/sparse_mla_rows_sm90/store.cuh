#pragma once

#include <cstdint>

#include "src/mla/cuda/sparse_mla_rows_sm90/heads.cuh"

// Results of a unit.
namespace fovea::internal::sparse_rows_sm90 {

// Finishes the thread's two heads; what their sums are to be multiplied with goes to `factors`.
// `sums` of both warpgroups.
template <int kHeadDim>
__device__ __forceinline__ void finish_heads(const Target& to, int group, const HeadState& state,
                                             float (&sums)[2][kHeads], float (&factors)[2]) {
  const bool leads = threadIdx.x % 4 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(state.sum[half]);
    if (leads) sums[group][low_head() + 8 * half] = sum;
  }
  cuda::sync_roles(kBothGroups, 2 * kGroupThreads);
  const latent::Scores& scores = to.params.scores;
  const float unit = latent::logit_unit(scores);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factors[half] = 0;
    const int head = low_head() + 8 * half;
    if (!to.has(head)) continue;
    // From the reference, which may lag behind, to the maximum.
    const float reference = state.reference[half], largest = state.largest[half];
    const float shrink = reference == largest ? 1.0f : exp2f((reference - largest) * unit);
    const float sum = (sums[0][head] + sums[1][head]) * shrink;
    const latent::HeadResult result =
        latent::finish_head(to.params.outputs, to.head(head), scores.logit_scale * largest, sum);
    factors[half] = shrink * result.factor;
    if (group == 0 && leads) latent::store_head(to.params.outputs, to.t, to.head(head), result);
  }
}

// Turns the pairs of the last channels back.
__device__ __forceinline__ void turn_values(const Target& to, int first_channel, const float* row,
                                            ValueSums& values) {
  const int rope_dim = to.params.rope_dim;
  const int first =
      first_channel + 2 * (cuda::computed_here(threadIdx.x) % 4) - (kValueDim - rope_dim);
#pragma unroll
  for (int n = 0; n < kHalfChannels / 2; n += 4) {
    const int at = first + 2 * n;
    if (at < 0) continue;
    const float cosine = row[at / 2], sine = row[(at + rope_dim) / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& x = values.x[n + 2 * half];
      float& y = values.x[n + 2 * half + 1];
      const float turned = x * cosine + y * sine;
      y = y * cosine - x * sine;
      x = turned;
    }
  }
}

// The 256 channels from `first_channel` on, 32 at a time. A lane puts out 8 neighbouring channels
// of its own two heads.
template <int kHeadDim>
__device__ __forceinline__ void store_values(const Target& to, int first_channel,
                                             const float (&factors)[2], ValueSums& values,
                                             StagedResults& staged) {
  if constexpr (kHeadDim == kValueDim) {
    const float* const rotation = to.params.rotations.row(to.t);
    if (rotation != nullptr) turn_values(to, first_channel, rotation, values);
  }
  const int lane = cuda::computed_here(threadIdx.x) % 32;
  bf16_t* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = low_head() + 8 * half;
    rows[half] = to.params.outputs.out.row(to.t, to.head(to.has(head) ? head : 0)) + first_channel +
                 8 * (lane % 4);
  }
  const bool is_there[2] = {to.has(low_head()), to.has(low_head() + 8)};
#pragma unroll
  for (int first = 0; first < kHalfChannels; first += 32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* const x = values.x + first / 2 + 8 * i + 2 * n;
        pairs[n] = cuda::bf16_pair(factors[n % 2] * x[0], factors[n % 2] * x[1]);
      }
      cuda::store_rows(staged.piece(lane % 16, 2 * i + lane / 16), pairs);
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint8_t* const piece = staged.piece(lane / 4 + 8 * half, lane % 4);
      // A factor of 0 stands for an empty row, whatever the sums are.
      const bool is_empty = factors[half] == 0;
      if (!is_there[half]) continue;
      bf16_t* const row = rows[half] + first;
      if (to.params.wide_out) {
        const uint4 values8 = *reinterpret_cast<const uint4*>(piece);
        *reinterpret_cast<uint4*>(row) = is_empty ? make_uint4(0, 0, 0, 0) : values8;
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i)
          row[i] = is_empty ? bf16_t{0} : reinterpret_cast<const bf16_t*>(piece)[i];
      }
    }
    __syncwarp();
  }
}

}  // namespace fovea::internal::sparse_rows_sm90
