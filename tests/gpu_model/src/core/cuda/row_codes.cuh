#pragma once

#include "fovea/numeric.h"
#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/row_codes.cuh.
namespace fovea::internal::cuda {

template <int kBytes>
void load_or_zeros_late(uint32_t& to, const uint8_t* from, bool present) {
  to = 0;
  if (!present) return;
  test::gpu::need_alignment(from, kBytes);
  std::memcpy(&to, from, kBytes);
}
template <class T>
void load_or_zeros_late(T& to, const uint8_t* from, bool present) {
  to = {};
  if (!present) return;
  test::gpu::need_alignment(from, sizeof(T));
  std::memcpy(&to, from, sizeof(T));
}

inline constexpr uint32_t kLargestExact = 134;
inline uint32_t exact_factor(uint32_t exponent) {
  if (exponent > kLargestExact) throw std::logic_error("no factor of decode4_exact");
  return (exponent + 120) * 0x00800080u;
}
inline bool are_exact(uint32_t exponents) {
  for (int i = 0; i < 32; i += 8) {
    if ((exponents >> i & 0xFF) > kLargestExact) return false;
  }
  return true;
}

inline uint2 decode4_exact(uint32_t codes, uint32_t factor) {
  // As the instructions do it: the code's bits as bf16, times the factor.
  uint32_t bits[4];
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = codes >> (8 * i) & 0xFF;
    const float value = __uint_as_float((code & 0x80) << 24 | (code & 0x7F) << 20);
    bits[i] = bf16_from_float(value * __uint_as_float(factor << 16)).bits;
  }
  return make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
}

inline uint32_t nan_bits(uint32_t codes) { return codes ^ (codes + 0x01010101u); }
inline constexpr uint32_t kNanBits = 0x80808080u;

}  // namespace fovea::internal::cuda
