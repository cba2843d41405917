#pragma once

#include <cstdint>

#include "src/core/cuda/mma.cuh"

/// e4m3 codes as operands of tensor cores: every e4m3 value is an f16 value, so products of codes
/// are exact there. Sums are fp32.
namespace fovea::internal::cuda {

/// mma() of mma.cuh with f16 operands.
__device__ inline void mma_f16(MmaC& c, const MmaA& a, const MmaB& b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
}

/// Codes 0, 1 of `codes` as an f16 pair in `low`, codes 2, 3 in `high`. 0x7F and 0xFF are NaN.
__device__ inline void decode4_f16(uint32_t codes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  // Exponent and mantissa, moved to where f16 has them, make the value times 2^-8, subnormal codes
  // included. Times 36000 only the NaN code (1.875) overflows, and infinity times 0 is NaN.
  const auto value = [](uint32_t spread) {
    const uint32_t bits = (spread & 0x80008000u) | ((spread & 0x7F007F00u) >> 1);
    uint32_t result;
    asm("{\n"
        ".reg .b32 scaled, overflow;\n"
        "mul.rn.f16x2 scaled, %1, %2;\n"
        "mul.rn.f16x2 overflow, %1, %3;\n"
        "fma.rn.f16x2 %0, overflow, %4, scaled;\n"
        "}"
        : "=r"(result)
        : "r"(bits), "r"(0x5C005C00u), "r"(0x78657865u), "r"(0u));
    return result;
  };
  low = value(__byte_perm(codes, 0, 0x1404));
  high = value(__byte_perm(codes, 0, 0x3424));
#endif
}

}  // namespace fovea::internal::cuda
