#pragma once

#include <cstdint>

namespace fovea::internal::cuda {

/// x / d and x % d for 0 <= x and 1 <= d <= 65536, in 32-bit steps: a 64-bit division is a call
/// that spills registers.
struct Quotient {
  int64_t quotient;
  int64_t remainder;
};
__device__ inline Quotient divide_small(int64_t x, uint32_t d) {
  const auto high = static_cast<uint32_t>(x >> 32);
  const uint32_t q2 = high / d;
  const uint32_t middle = high % d << 16 | (static_cast<uint32_t>(x) >> 16);
  const uint32_t q1 = middle / d;
  const uint32_t low = middle % d << 16 | (static_cast<uint32_t>(x) & 0xFFFF);
  return {static_cast<int64_t>(q2) << 32 | static_cast<int64_t>(q1) << 16 | (low / d), low % d};
}

/// 2^x; results below the normal range are 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Keeps what was computed before a loop in a register: the compiler would rather compute it again
/// in every turn.
template <class T>
__device__ inline void hold(T& x) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
}

/// max(0, x), NaN for NaN.
__device__ inline float relu(float x) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(0.0f));
  return result;
}

/// x, of which the compiler knows nothing: what follows from it is computed where it is used, not
/// before a loop, where it would take registers.
__device__ inline int computed_here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace fovea::internal::cuda
