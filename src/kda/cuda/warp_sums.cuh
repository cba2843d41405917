#pragma once

/// Sums over the lanes of a warp, in a fixed order.
namespace fovea::internal::cuda {

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

// Lanes that differ in bit kBit share 2 kHalf values: each keeps the sums of one half.
template <int kHalf, int kBit, int kCount>
__device__ inline void halve(float (&values)[kCount]) {
  const bool upper = (threadIdx.x & kBit) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = upper ? values[i] : values[i + kHalf];
    const float kept = upper ? values[i + kHalf] : values[i];
    values[i] = kept + __shfl_xor_sync(0xFFFFFFFF, sent, kBit);
  }
}

/// Sums each of 32 values over the lanes; lane l gets the sum of value l.
__device__ inline float sum_transposed(float (&values)[32]) {
  halve<16, 16>(values);
  halve<8, 8>(values);
  halve<4, 4>(values);
  halve<2, 2>(values);
  halve<1, 1>(values);
  return values[0];
}

/// Sums each of 16 values over the lanes; lane l gets the sum of value l / 2.
__device__ inline float sum_transposed16(float (&values)[16]) {
  halve<8, 16>(values);
  halve<4, 8>(values);
  halve<2, 4>(values);
  halve<1, 2>(values);
  return values[0] + __shfl_xor_sync(0xFFFFFFFF, values[0], 1);
}

}  // namespace fovea::internal::cuda
