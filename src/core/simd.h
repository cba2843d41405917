// The one door to Highway (1.0.3 API; see docs/testing.md for how instruction sets are forced).
//
// A *_cpu.cc starts with
//
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "src/<room>/<op>_cpu.cc"
//   #include "src/core/simd.h"
//
// and puts its vector code between HWY_BEFORE_NAMESPACE() and HWY_AFTER_NAMESPACE() in
// namespace fovea::internal::HWY_NAMESPACE: it is compiled once per instruction set. There is no
// ordinary include guard, because the helpers at the end exist once per instruction set too.

// Three instruction sets on x86-64 are enough: the baseline, AVX2 and AVX-512. The ones in between
// cost compile time and serve no machine that the project targets. Elsewhere (arm64) the baseline
// of the architecture is the only one.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
#include <hwy/foreach_target.h>
// After foreach_target.h, which sets the instruction set that highway.h compiles for.
#include <hwy/highway.h>

#include "fovea/numeric.h"

#if defined(FOVEA_CORE_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CORE_SIMD_H_
#undef FOVEA_CORE_SIMD_H_
#else
#define FOVEA_CORE_SIMD_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;

/// Lanes(F32()) bf16 values as floats; exact.
HWY_INLINE hn::Vec<F32> load_bf16(F32 d, const bf16_t* from) {
  const hn::Rebind<uint16_t, F32> d16;
  const hn::RebindToUnsigned<F32> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

/// Rounds every lane to the nearest bf16 (ties to even), as a float; NaN stays NaN.
HWY_INLINE hn::Vec<F32> round_to_bf16(F32 d, hn::Vec<F32> value) {
  const hn::RebindToUnsigned<F32> d32;
  const auto bits = hn::BitCast(d32, value);
  const auto lowest_kept = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::And(hn::Add(bits, hn::Add(lowest_kept, hn::Set(d32, 0x7FFFu))),
                               hn::Set(d32, 0xFFFF0000u));
  // Adding to a NaN could carry into the sign: give those lanes the quiet NaN instead.
  return hn::IfThenElse(hn::Eq(value, value), hn::BitCast(d, rounded),
                        hn::BitCast(d, hn::Set(d32, 0x7FC00000u)));
}

/// Stores lanes that are already bf16 values (see round_to_bf16).
HWY_INLINE void store_bf16(F32 /*d*/, hn::Vec<F32> value, bf16_t* to) {
  const hn::Rebind<uint16_t, F32> d16;
  const hn::RebindToUnsigned<F32> d32;
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(hn::BitCast(d32, value))), d16,
             reinterpret_cast<uint16_t*>(to));
}

/// Lanes(F32()) e4m3 codes as floats; exact, NaN codes give NaN.
HWY_INLINE hn::Vec<F32> load_e4m3(F32 d, const uint8_t* from) {
  const hn::Rebind<uint8_t, F32> d8;
  const hn::RebindToUnsigned<F32> d32;
  const auto code = hn::PromoteTo(d32, hn::LoadU(d8, from));
  const auto magnitude = hn::And(code, hn::Set(d32, 0x7Fu));
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(d32, 0x80u)));
  // Exponent and mantissa fields land in a float whose exponent is too small by 127 - 7 = 120;
  // subnormal codes land in subnormal floats, so the multiplication is right for them too.
  const auto value = hn::Mul(hn::BitCast(d, hn::ShiftLeft<20>(magnitude)), hn::Set(d, 0x1p120f));
  const auto is_nan = hn::RebindMask(d, hn::Eq(magnitude, hn::Set(d32, 0x7Fu)));
  const auto finite = hn::BitCast(d, hn::Or(hn::BitCast(d32, value), sign));
  return hn::IfThenElse(is_nan, hn::BitCast(d, hn::Set(d32, 0x7FC00000u)), finite);
}

/// e4m3 codes (0..0x7E) of magnitudes below 464, rounded to nearest, ties to even, in the low half
/// of each lane (bits 8..15 are zero, the upper half is not).
HWY_INLINE hn::Vec<hn::RebindToUnsigned<F32>> e4m3_magnitude(F32 d, hn::Vec<F32> magnitude) {
  const hn::RebindToUnsigned<F32> d32;
  // With e = max(floor(log2 magnitude), -6) a code counts units of 2^(e - 3), starting at
  // 8 * (e + 6). A float of 2^(e + 20) has just that unit in its last place, so adding the
  // magnitude to it rounds as e4m3 does; the code's start is put into its mantissa beforehand (it
  // is even, so ties stay ties).
  const auto exponent =
      hn::And(hn::BitCast(d32, hn::Max(magnitude, hn::Set(d, 0x1p-6f))), hn::Set(d32, 0x7F800000u));
  constexpr uint32_t kBias = (20u << 23) - 8u * (127u - 6u);
  const auto magic = hn::Add(hn::Add(exponent, hn::ShiftRight<20>(exponent)), hn::Set(d32, kBias));
  return hn::BitCast(d32, hn::Add(magnitude, hn::BitCast(d, magic)));
}

/// Stores the e4m3 codes of Lanes(F32()) floats, as e4m3_from_float gives them: saturating, NaN
/// becomes 0x7F.
HWY_INLINE void store_e4m3(F32 d, hn::Vec<F32> value, uint8_t* to) {
  const hn::RebindToUnsigned<F32> d32;
  const hn::Rebind<uint8_t, F32> d8;
  const auto is_number = hn::RebindMask(d32, hn::Eq(value, value));
  const auto code = hn::And(e4m3_magnitude(d, hn::Min(hn::Abs(value), hn::Set(d, kE4m3Max))),
                            hn::Set(d32, 0x7Fu));
  const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(d32, value)), hn::Set(d32, 0x80u));
  const auto result = hn::IfThenElse(is_number, hn::Or(code, sign), hn::Set(d32, 0x7Fu));
  hn::StoreU(hn::TruncateTo(d8, result), d8, to);
}

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
