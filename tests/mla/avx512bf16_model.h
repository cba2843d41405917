#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

/// Plain loops in place of the AVX-512 instructions that sparse_mla_cpu_avx512bf16.cc uses, so that
/// its logic runs on every CPU. A source includes this, then defines the names of the instructions.
namespace fovea::test::avx512 {

/// A register, whatever its lanes are.
template <int kBytes>
struct Register {
  alignas(kBytes) uint8_t bytes[kBytes];

  template <class T>
  T get(int64_t i) const {
    T lane;
    std::memcpy(&lane, bytes + i * int64_t{sizeof(T)}, sizeof(T));
    return lane;
  }
  template <class T>
  void set(int64_t i, T lane) {
    std::memcpy(bytes + i * int64_t{sizeof(T)}, &lane, sizeof(T));
  }
};
using Zmm = Register<64>;
using Ymm = Register<32>;
using Mask = uint16_t;

template <class R>
R load(const void* from) {
  R r;
  std::memcpy(r.bytes, from, sizeof(r.bytes));
  return r;
}
template <class R>
void store(void* to, const R& r) {
  std::memcpy(to, r.bytes, sizeof(r.bytes));
}

/// Lane i is f(i).
template <class R, class T, class F>
R lanes(F f) {
  R r;
  for (int64_t i = 0; i < int64_t{sizeof(R) / sizeof(T)}; ++i) r.set(i, static_cast<T>(f(i)));
  return r;
}
template <class R, class T>
R broadcast(T value) {
  return lanes<R, T>([&](int64_t) { return value; });
}

// The unit takes subnormal numbers as zeros.
inline float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}
inline float from_bf16(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

/// sums += a * b, pair by pair, the earlier element first.
template <class R>
R dpbf16(const R& sums, const R& a, const R& b) {
  return lanes<R, float>([&](int64_t i) {
    float sum = flushed(sums.template get<float>(i));
    for (int64_t j = 2 * i; j < 2 * i + 2; ++j) {
      sum = flushed(std::fma(flushed(from_bf16(a.template get<uint16_t>(j))),
                             flushed(from_bf16(b.template get<uint16_t>(j))), sum));
    }
    return sum;
  });
}

/// 16 floats to bf16, ties to even.
inline Ymm cvtneps(const Zmm& a) {
  return lanes<Ymm, uint16_t>([&](int64_t i) {
    const float value = flushed(a.get<float>(i));
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    if (std::isnan(value)) return (word >> 16) | 0x40U;
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16;
  });
}

inline Zmm permutex2var_epi16(const Zmm& a, const Zmm& index, const Zmm& b) {
  return lanes<Zmm, uint16_t>([&](int64_t i) {
    const uint16_t at = index.get<uint16_t>(i) % 64;
    return (at < 32 ? a : b).get<uint16_t>(at % 32);
  });
}
inline Ymm permutexvar_epi16(const Ymm& index, const Ymm& a) {
  return lanes<Ymm, uint16_t>(
      [&](int64_t i) { return a.get<uint16_t>(index.get<uint16_t>(i) % 16); });
}
template <class... Halfwords>
Ymm setr_epi16(Halfwords... values) {
  const int16_t list[] = {static_cast<int16_t>(values)...};
  return load<Ymm>(list);
}

inline Zmm mul_ps(const Zmm& a, const Zmm& b) {
  return lanes<Zmm, float>([&](int64_t i) { return a.get<float>(i) * b.get<float>(i); });
}
inline Zmm sub_ps(const Zmm& a, const Zmm& b) {
  return lanes<Zmm, float>([&](int64_t i) { return a.get<float>(i) - b.get<float>(i); });
}
inline Zmm maskz_cvtepu16_epi32(Mask mask, const Ymm& a) {
  return lanes<Zmm, uint32_t>(
      [&](int64_t i) { return (mask >> i & 1) != 0 ? a.get<uint16_t>(i) : 0; });
}
inline Zmm maskz_slli_epi32(Mask mask, const Zmm& a, int bits) {
  return lanes<Zmm, uint32_t>(
      [&](int64_t i) { return (mask >> i & 1) != 0 ? a.get<uint32_t>(i) << bits : 0; });
}
inline Zmm maskz_mov_ps(Mask mask, const Zmm& a) {
  return lanes<Zmm, uint32_t>(
      [&](int64_t i) { return (mask >> i & 1) != 0 ? a.get<uint32_t>(i) : 0; });
}

enum class Compare { kNotLessEqual, kNotEqual };

inline Mask cmp_ps_mask(const Zmm& a, const Zmm& b, Compare compare) {
  uint32_t mask = 0;
  for (int64_t i = 0; i < 16; ++i) {
    const float x = a.get<float>(i), y = b.get<float>(i);
    const bool holds = compare == Compare::kNotEqual ? !(x == y) : !(x <= y);
    mask |= uint32_t{holds} << i;
  }
  return static_cast<Mask>(mask);
}

}  // namespace fovea::test::avx512
