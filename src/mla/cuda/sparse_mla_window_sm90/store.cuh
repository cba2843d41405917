#pragma once

#include <cstdint>

#include "src/mla/cuda/sparse_mla_window_sm90/heads.cuh"

// Results of a row.
namespace fovea::internal::sparse_window_sm90 {

// Finishes the thread's two heads; what their sums are to be multiplied with goes to `factors`.
__device__ __forceinline__ void finish_heads(const Target& to, const HeadSums& sums, bool stores,
                                             float (&factors)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factors[half] = 0;
    const int head = low_head() + 8 * half;
    const float sum = sums.sum_of(half);
    if (!to.has(head)) continue;
    const latent::HeadResult result = latent::finish_head(
        to.params.outputs, to.head(head), to.params.scores.logit_scale * sums.largest[half], sum);
    factors[half] = result.factor;
    if (stores && threadIdx.x % 4 == 0)
      latent::store_head(to.params.outputs, to.t, to.head(head), result);
  }
}

// Turns the pairs of the last channels back.
__device__ __forceinline__ void turn_values(int rope_dim, int quarter, const float* row,
                                            Values& values) {
  const int first =
      quarter * kQuarterChannels + 2 * static_cast<int>(threadIdx.x % 4) - (kValueDim - rope_dim);
#pragma unroll
  for (int n = 0; n < kQuarterChannels / 2; n += 4) {
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

// A quarter of the channels, by way of shared memory: a warp has 16 heads for itself, of 256 bytes
// each.
template <class Shape>
__device__ __forceinline__ void store_values(const Target& to, int group, int quarter,
                                             const float (&factors)[2], const float* rotation,
                                             SharedMemory& shared, Values& values) {
  constexpr int kRowBytes = 2 * kQuarterChannels;
  if (rotation != nullptr) turn_values(to.params.rope_dim, quarter, rotation, values);
  const int lane = threadIdx.x % 32, warp_head = threadIdx.x / 32 % 4 * kWarpHeads;
  uint8_t* const staged = shared.places[Shape::result_place(group)] + warp_head * kRowBytes;
  const auto piece_of = [&](int head, int piece) {
    return staged + head * kRowBytes + ((piece ^ head % 8) << 4);
  };
  // A factor of 0 stands for an empty row, whatever the sums are.
  const bool has_empty = __any_sync(0xFFFFFFFF, factors[0] == 0 || factors[1] == 0);
  if (has_empty) {
#pragma unroll
    for (int i = 0; i < kQuarterChannels / 2; ++i)
      if (factors[i / 2 % 2] == 0) values.x[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < kQuarterChannels / 16; ++i) {
    uint32_t pairs[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* const x = values.x + 8 * i + 2 * n;
      pairs[n] = cuda::bf16_pair(factors[n % 2] * x[0], factors[n % 2] * x[1]);
    }
    cuda::store_rows(piece_of(lane % 16, 2 * i + lane / 16), pairs);
  }
  __syncwarp();
  const auto& out = to.params.outputs.out;
  if (to.params.wide_out && to.has(warp_head + kWarpHeads - 1)) {
    bf16_t* row = out.row(to.t, to.head(warp_head + lane / 16)) + quarter * kQuarterChannels +
                  8 * (lane % 16);
#pragma unroll
    for (int i = 0; i < kWarpHeads; i += 2) {
      *reinterpret_cast<uint4*>(row) =
          *reinterpret_cast<const uint4*>(piece_of(i + lane / 16, lane % 16));
      row += 2 * out.stride[1];
    }
  } else if (to.params.wide_out) {
#pragma unroll 1
    for (int i = lane / 16; i < kWarpHeads && to.has(warp_head + i); i += 2) {
      *reinterpret_cast<uint4*>(out.row(to.t, to.head(warp_head + i)) + quarter * kQuarterChannels +
                                8 * (lane % 16)) =
          *reinterpret_cast<const uint4*>(piece_of(i, lane % 16));
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < kWarpHeads * kQuarterChannels; i += 32) {
      const int head = i / kQuarterChannels, d = i % kQuarterChannels;
      if (!to.has(warp_head + head)) continue;
      out.row(to.t, to.head(warp_head + head))[quarter * kQuarterChannels + d] =
          reinterpret_cast<const bf16_t*>(piece_of(head, d / 8))[d % 8];
    }
  }
  __syncwarp();
}

}  // namespace fovea::internal::sparse_window_sm90
