#pragma once

#include <cstdint>

#include "fovea/dtype.h"

/// Four neighbouring elements at a time, where addresses allow it. Views may start anywhere that
/// their element type may; a launch looks at base and strides once and picks kAligned.
namespace fovea::internal::cuda {

template <bool kAligned>
__device__ inline void load4(const bf16_t* from, bf16_t (&to)[4]) {
  if constexpr (kAligned) {
    const uint2 word = *reinterpret_cast<const uint2*>(from);
    to[0].bits = static_cast<uint16_t>(word.x);
    to[1].bits = static_cast<uint16_t>(word.x >> 16);
    to[2].bits = static_cast<uint16_t>(word.y);
    to[3].bits = static_cast<uint16_t>(word.y >> 16);
  } else {
    for (int i = 0; i < 4; ++i) to[i] = from[i];
  }
}

template <bool kAligned>
__device__ inline void store4(const bf16_t (&from)[4], bf16_t* to) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(from[0].bits | static_cast<uint32_t>(from[1].bits) << 16,
                   from[2].bits | static_cast<uint32_t>(from[3].bits) << 16);
  } else {
    for (int i = 0; i < 4; ++i) to[i] = from[i];
  }
}

template <bool kAligned>
__device__ inline void load4(const uint8_t* from, uint8_t (&to)[4]) {
  if constexpr (kAligned) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(from);
    for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(word >> (8 * i));
  } else {
    for (int i = 0; i < 4; ++i) to[i] = from[i];
  }
}

template <bool kAligned>
__device__ inline void store4(const uint8_t (&from)[4], uint8_t* to) {
  if constexpr (kAligned) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(from[i]) << (8 * i);
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
    for (int i = 0; i < 4; ++i) to[i] = from[i];
  }
}

/// A float at any address.
template <bool kAligned>
__device__ inline float load_float(const uint8_t* from) {
  if constexpr (kAligned) return *reinterpret_cast<const float*>(from);
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(from[i]) << (8 * i);
  return __uint_as_float(bits);
}

template <bool kAligned>
__device__ inline void store_float(float value, uint8_t* to) {
  if constexpr (kAligned) {
    *reinterpret_cast<float*>(to) = value;
  } else {
    const uint32_t bits = __float_as_uint(value);
    for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(bits >> (8 * i));
  }
}

/// Starts to bring the line of a readable address into the second-level cache.
__device__ inline void prefetch_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)));
}

/// Starts to read memory that no one writes while the kernel runs: here, not where the compiler
/// finds a use for it.
__device__ inline void load_ahead(uint32_t& to, const void* from) {
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(to) : "l"(__cvta_generic_to_global(from)));
}

/// Where the compiler does not know that a pointer is to global memory.
__device__ inline void store_global(float* to, float value) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "f"(value)
               : "memory");
}

inline bool is_aligned(const void* data, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

}  // namespace fovea::internal::cuda
