#pragma once

#include <cstdint>

#include "src/core/cuda/mma.cuh"

/// Tensor cores with tf32 operands (fp32's exponent, 10 bits of mantissa): one warp multiplies a
/// 16 x 8 piece of A with an 8 x 8 piece of B, fp32 sums.
namespace fovea::internal::cuda {

/// fp32 rounded to the nearest tf32, in fp32's bits.
__device__ inline uint32_t to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
__device__ inline float round_tf32(float x) { return __uint_as_float(to_tf32(x)); }

/// a: rows lane / 4 (x[0], x[2]) and + 8 (x[1], x[3]), columns lane % 4 (x[0], x[1]) and + 4.
/// b0, b1: column lane / 4, rows lane % 4 and + 4. c as in MmaC.
///
/// A sum over columns does not care for their order. So sums may go on as an operand without moving
/// between lanes: a lane's MmaC holds columns 2 (lane % 4) and + 1, which it passes on as columns
/// lane % 4 and + 4 (operand_of), while b is read in that order.
__device__ inline void mma_tf32(MmaC& c, const MmaA& a, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(__float_as_uint(b0)),
        "r"(__float_as_uint(b1)));
}

/// Sums as the operand of the next product: its columns lane % 4 are the sums' columns
/// 2 (lane % 4), its columns lane % 4 + 4 those + 1.
__device__ inline MmaA operand_of(const MmaC& c) {
  return {{to_tf32(c.x[0]), to_tf32(c.x[2]), to_tf32(c.x[1]), to_tf32(c.x[3])}};
}

}  // namespace fovea::internal::cuda
