#pragma once

#include <cstdint>

#include "src/core/cuda/async_copy.cuh"

/// What the second-level cache is to do with lines.
namespace fovea::internal::cuda {

/// How lines stay in the second-level cache.
struct CachePolicy {
  uint64_t bits;
};

/// Lines that are read once: the first ones to go. (There is no policy that is the same as none:
/// copies with `evict_normal` are slower.)
__device__ inline CachePolicy cache_policy_once() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

/// copy_async() of 16 bytes with a policy.
__device__ inline void copy_async(void* to, const void* from, bool present, CachePolicy policy) {
  const int bytes = present ? 16 : 0;
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "l"(policy.bits)
      : "memory");
}

/// A word that the launch does not write, with a policy.
__device__ inline int32_t load_word(const int32_t* from, CachePolicy policy) {
  int32_t word;
  // Volatile: without that the compiler reads also where the program would not.
  asm volatile("ld.global.nc.L2::cache_hint.b32 %0, [%1], %2;"
               : "=r"(word)
               : "l"(from), "l"(policy.bits));
  return word;
}

/// Brings the line of the address to the second-level cache.
__device__ inline void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

/// Loads a parameter here, for whoever needs its line of the constant cache later.
__device__ inline void load_here(int x) {
  // An instruction that the compiler must keep; whether it runs makes no difference.
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.s32 p, %0, 0x7fffabcd;\n@p nanosleep.u32 0;\n}\n" ::"r"(x));
}

}  // namespace fovea::internal::cuda
