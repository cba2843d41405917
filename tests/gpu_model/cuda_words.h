#pragma once

#include <algorithm>
#include <cmath>

#include "tests/gpu_model/gpu_model.h"

// The words of CUDA C++ that kernels use, for a host compiler. Included before everything else.
// NOLINTBEGIN
#define cuda cuda_model  // namespace: nothing of the library's own
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ thread_local  // of the one thread whose fibers the block is
#define __align__(bytes) __attribute__((aligned(bytes)))
#define threadIdx (fovea::test::gpu::lane().thread)
#define blockIdx (fovea::test::gpu::lane().block)
#define blockDim (fovea::test::gpu::lane().threads)

using dim3 = fovea::test::gpu::Dim;
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __fdividef(float x, float y) { return x / y; }
template <class T>
T __ldg(const T* from) {
  fovea::test::gpu::need_alignment(from, alignof(T));
  return *from;
}
inline uint32_t __umulhi(uint32_t x, uint32_t y) {
  return static_cast<uint32_t>(uint64_t{x} * y >> 32);
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t order) {
  const uint64_t both = low | static_cast<uint64_t>(high) << 32;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i)
    bytes |= static_cast<uint32_t>(both >> (order >> (4 * i) & 7) * 8 & 0xFF) << (8 * i);
  return bytes;
}
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
template <class T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at += value;
  return old;
}
template <class T>
T atomicMax(T* at, T value) {
  const T old = *at;
  *at = std::max(old, value);
  return old;
}
template <class T>
T atomicOr(T* at, T value) {
  const T old = *at;
  *at |= value;
  return old;
}
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() { fovea::test::gpu::wait_block(0, 0); }
inline void __threadfence_block() {}
inline void __syncwarp() { fovea::test::gpu::wait_warp(); }
template <class T>
T __shfl_sync(uint32_t, T value, unsigned from) {
  return fovea::test::gpu::Exchange<T>(value).from(from % 32);
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, unsigned mask) {
  return fovea::test::gpu::Exchange<T>(value).from(threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_up_sync(uint32_t, T value, unsigned steps) {
  const unsigned own = threadIdx.x % 32;
  return fovea::test::gpu::Exchange<T>(value).from(own < steps ? own : own - steps);
}
template <class T>
T __reduce_max_sync(uint32_t, T value) {
  const fovea::test::gpu::Exchange<T> shown(value);
  for (unsigned i = 0; i < 32; ++i) value = std::max(value, shown.from(i));
  return value;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  const fovea::test::gpu::Exchange<uint32_t> shown(value);
  uint32_t sum = 0;
  for (unsigned i = 0; i < 32; ++i) sum += shown.from(i);
  return sum;
}
inline int __reduce_min_sync(uint32_t mask, int value) { return ~__reduce_max_sync(mask, ~value); }
inline uint32_t __ballot_sync(uint32_t, bool value) {
  const fovea::test::gpu::Exchange<bool> shown(value);
  uint32_t bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(shown.from(i)) << i;
  return bits;
}
inline bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
// NOLINTEND
