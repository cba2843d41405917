#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// Rows of e4m3 codes on their way from device memory to bf16, compute capability 9.0.
namespace fovea::internal::cuda {

/// Reads kBytes (1, 2 or 4, the others of `to` are zeros; or all of a uint2 or uint4) at an address
/// that they divide; zeros, without reading, where not present. No select and no move waits for the
/// read, and it stays behind the fences before it, which would wait for it.
template <int kBytes>
__device__ inline void load_or_zeros_late(uint32_t& to, const uint8_t* from, bool present) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4);
  const auto at = __cvta_generic_to_global(from);
  if constexpr (kBytes == 1) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.u8 %0, [%1];\n}\n"
        : "=r"(to)
        : "l"(at), "r"(present ? 1 : 0)
        : "memory");
  } else if constexpr (kBytes == 2) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.u16 %0, [%1];\n}\n"
        : "=r"(to)
        : "l"(at), "r"(present ? 1 : 0)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.u32 %0, [%1];\n}\n"
        : "=r"(to)
        : "l"(at), "r"(present ? 1 : 0)
        : "memory");
  }
}
__device__ inline void load_or_zeros_late(uint2& to, const uint8_t* from, bool present) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@p ld.global.v2.b32 {%0, %1}, [%2];\n}\n"
      : "=r"(to.x), "=r"(to.y)
      : "l"(__cvta_generic_to_global(from)), "r"(present ? 1 : 0)
      : "memory");
}
__device__ inline void load_or_zeros_late(uint4& to, const uint8_t* from, bool present) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
      : "l"(__cvta_generic_to_global(from)), "r"(present ? 1 : 0)
      : "memory");
}

/// The products of two bf16 and two others, each rounded once.
__device__ inline uint32_t bf16_products(uint32_t x, uint32_t y) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

/// 2^(exponent - 127), exponent <= kLargestExact, as a pair of factors for decode4_exact(): with a
/// biased exponent of 120 more, of which bf16 has up to 254.
inline constexpr uint32_t kLargestExact = 134;
__device__ inline uint32_t exact_factor(uint32_t exponent) {
  return exponent * 0x00800080u + 120 * 0x00800080u;
}
/// Whether four bytes are exponents up to kLargestExact.
__device__ inline bool are_exact(uint32_t exponents) {
  static_assert(kLargestExact == 0x86);
  return (exponents & ((exponents & 0x7F7F7F7F) + 0x79797979) & 0x80808080) == 0;
}

/// Four codes, none of them NaN, times a power of two, as four bf16. Sign, exponent and mantissa
/// moved to where bf16 has them are the value times 2^-120, subnormal codes included; the product
/// brings it back, exact but below the normal range of bf16.
__device__ inline uint2 decode4_exact(uint32_t codes, uint32_t factor) {
  uint32_t low, high;  // each code and its sign eight times
  asm("prmt.b32 %0, %1, 0, 0x9180;" : "=r"(low) : "r"(codes));
  asm("prmt.b32 %0, %1, 0, 0xB3A2;" : "=r"(high) : "r"(codes));
  return make_uint2(bf16_products(low << 4 & 0x87F087F0, factor),
                    bf16_products(high << 4 & 0x87F087F0, factor));
}

/// Bits 7, 15, 23 and 31 of the result: a code whose lower seven bits are ones, which is NaN, or
/// one next to such a code.
__device__ inline uint32_t nan_bits(uint32_t codes) { return codes ^ (codes + 0x01010101u); }
inline constexpr uint32_t kNanBits = 0x80808080u;

}  // namespace fovea::internal::cuda
