// Vector forms of src/core/fp8_tile.h: the same bits. Included after src/core/simd.h by *_cpu.cc
// files, once per instruction set, hence the guard of the same kind.

#include "src/core/fp8_tile.h"

#if defined(FOVEA_CORE_FP8_TILE_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CORE_FP8_TILE_SIMD_H_
#undef FOVEA_CORE_FP8_TILE_SIMD_H_
#else
#define FOVEA_CORE_FP8_TILE_SIMD_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

// One lane: the plain loops are the vector forms.
inline float quantize_tile_simd(const bf16_t* x, int64_t count, TileScaleRule rule, ScaleMode mode,
                                uint8_t* codes) {
  return quantize_tile(x, count, rule, mode, codes);
}
inline void dequantize_tile_simd(const uint8_t* codes, int64_t count, float scale, bf16_t* out) {
  dequantize_tile(codes, count, scale, out);
}
inline void dequantize_tile_to_floats(const uint8_t* codes, int64_t count, float scale,
                                      float* out) {
  for (int64_t i = 0; i < count; ++i) {
    bf16_t value;
    dequantize_tile(codes + i, 1, scale, &value);
    out[i] = bf16_to_float(value);
  }
}

#else

using U16 = hn::ScalableTag<uint16_t>;

/// The bf16 values at the even and at the odd positions of a vector, as floats; exact.
HWY_INLINE hn::Vec<F32> even_bf16(F32 d, hn::Vec<U16> bits) {
  const hn::RebindToUnsigned<F32> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::BitCast(d32, bits)));
}
HWY_INLINE hn::Vec<F32> odd_bf16(F32 d, hn::Vec<U16> bits) {
  const hn::RebindToUnsigned<F32> d32;
  return hn::BitCast(d, hn::And(hn::BitCast(d32, bits), hn::Set(d32, 0xFFFF0000u)));
}

/// The low halves of the lanes of `even` and `odd`, interleaved: even[0], odd[0], even[1], ...
HWY_INLINE hn::Vec<U16> interleave_low(hn::Vec<hn::RebindToUnsigned<F32>> even,
                                       hn::Vec<hn::RebindToUnsigned<F32>> odd) {
  const U16 d16;
  return hn::OddEven(hn::BitCast(d16, hn::ShiftLeft<16>(odd)), hn::BitCast(d16, even));
}

/// Largest of the bit patterns without their signs: 0x7F80 or more when an element is infinite or
/// NaN, otherwise the bits of the largest magnitude.
HWY_INLINE uint16_t tile_largest_bits(const bf16_t* x, int64_t count) {
  const U16 d16;
  const hn::ScalableTag<int16_t> di16;  // magnitudes are below 2^15; SSE2 has the signed maximum
  const auto lanes = static_cast<int64_t>(hn::Lanes(d16));
  const auto mask = hn::Set(d16, 0x7FFF);
  const auto* bits = reinterpret_cast<const uint16_t*>(x);
  auto largest = hn::Zero(di16);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    largest = hn::Max(largest, hn::BitCast(di16, hn::And(hn::LoadU(d16, bits + i), mask)));
  }
  HWY_ALIGN int16_t parts[HWY_MAX_BYTES / sizeof(int16_t)];
  hn::Store(largest, di16, parts);
  uint16_t result = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    result = std::max(result, static_cast<uint16_t>(parts[lane]));
  }
  for (; i < count; ++i) result = std::max(result, static_cast<uint16_t>(bits[i] & 0x7FFF));
  return result;
}

/// Multiplies by 1 / scale so that the product, rounded to e4m3, equals the e4m3 of the IEEE
/// quotient x / scale.
///
/// With FMA, x / scale is RN(x * high + RN(x * low)) where high + low = 1 / scale to 2^-38 or
/// better. That is the IEEE quotient itself unless the exact quotient lies within 2^-37 of a
/// midpoint between two floats. The code can only notice at a tie t of e4m3 (5 significant bits),
/// i.e. when the exact quotient is t +- half an ulp of t, which means that scale, as a number in
/// [1, 2), is within 2^-21 of a multiple of 1/8: with scale = RN(amax / 448) and amax a bf16 it is
/// either exactly such a multiple (then quotients of bf16 numbers have no such neighbours) or at
/// least 2^-13 away. The same holds for RN(1e-4 / 448). tests/core/fp8_tile_test.cc goes through
/// all pairs. Without FMA it is a division.
class TileDivider {
 public:
  explicit TileDivider(F32 d, float scale) {
#if HWY_NATIVE_FMA
    const double inverse = 1.0 / static_cast<double>(scale);
    const auto high = static_cast<float>(inverse);
    high_ = hn::Set(d, high);
    low_ = hn::Set(d, static_cast<float>(inverse - static_cast<double>(high)));
#else
    scale_ = hn::Set(d, scale);
#endif
  }

  /// Scales for which the above holds: neither part of the inverse loses bits to underflow.
  static bool covers(float scale) { return scale >= 0x1p-100f && scale <= 0x1p100f; }

  HWY_INLINE hn::Vec<F32> divide(hn::Vec<F32> x) const {
#if HWY_NATIVE_FMA
    return hn::MulAdd(x, high_, hn::Mul(x, low_));
#else
    return hn::Div(x, scale_);
#endif
  }

 private:
#if HWY_NATIVE_FMA
  hn::Vec<F32> high_;
  hn::Vec<F32> low_;
#else
  hn::Vec<F32> scale_;
#endif
};

/// Codes of a tile whose elements are finite and at most 448 * scale in magnitude (up to the
/// rounding of scale), as they are when scale follows from the tile.
HWY_INLINE void encode_finite_tile(const bf16_t* x, int64_t count, float scale, uint8_t* codes) {
  const F32 d;
  const U16 d16;
  const hn::ScalableTag<int16_t> di16;
  const hn::Rebind<uint8_t, U16> d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d16));
  int64_t i = 0;
  if (TileDivider::covers(scale)) {
    const TileDivider divider(d, scale);
    for (; i + lanes <= count; i += lanes) {
      const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(x) + i);
      const auto even = e4m3_magnitude(d, hn::Abs(divider.divide(even_bf16(d, bits))));
      const auto odd = e4m3_magnitude(d, hn::Abs(divider.divide(odd_bf16(d, bits))));
      const auto sign = hn::And(hn::ShiftRight<8>(bits), hn::Set(d16, 0x80));
      const auto code = hn::Or(interleave_low(even, odd), sign);
      hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di16, code)), d8, codes + i);
    }
  }
  encode_tile(x + i, count - i, scale, codes + i);
}

/// Encodes a tile and returns its scale.
HWY_INLINE float quantize_tile_simd(const bf16_t* x, int64_t count, TileScaleRule rule,
                                    ScaleMode mode, uint8_t* codes) {
  const uint16_t largest = tile_largest_bits(x, count);
  if (largest >= 0x7F80) return quantize_tile(x, count, rule, mode, codes);
  const float scale = rule(bf16_to_float(bf16_t{largest}), mode);
  encode_finite_tile(x, count, scale, codes);
  return scale;
}

/// Whether a code of the tile is NaN.
HWY_INLINE bool tile_has_nan_code(const uint8_t* codes, int64_t count) {
  const hn::ScalableTag<uint8_t> d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d8));
  const auto nan = hn::Set(d8, 0x7F);
  auto found = hn::Zero(d8);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto magnitude = hn::And(hn::LoadU(d8, codes + i), nan);
    found = hn::Or(found, hn::VecFromMask(d8, hn::Eq(magnitude, nan)));
  }
  bool any = !hn::AllTrue(d8, hn::Eq(found, hn::Zero(d8)));
  for (; i < count; ++i) any = any || (codes[i] & 0x7F) == 0x7F;
  return any;
}

/// out[i] = bf16(codes[i] * scale).
HWY_INLINE void dequantize_tile_simd(const uint8_t* codes, int64_t count, float scale,
                                     bf16_t* out) {
  const F32 d;
  const U16 d16;
  const hn::RebindToUnsigned<F32> d32;
  const hn::ScalableTag<int16_t> di16;
  const hn::Rebind<uint8_t, U16> d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d16));
  int64_t i = 0;
  // Below 2^7 the scale takes the exponent correction of 2^120 without overflow. Larger, infinite
  // and NaN scales, and NaN codes, are rare: plain loop.
  if (std::fabs(scale) < 0x1p7f && !tile_has_nan_code(codes, count)) {
    const auto scale_up = hn::Set(d, scale * 0x1p120f);
    const auto sign_and_magnitude = hn::Set(d16, 0x87F0);
    for (; i + lanes <= count; i += lanes) {
      // A code shifted into the bf16 fields is its value * 2^-120, for subnormal codes too. The
      // arithmetic shift leaves the sign in bit 15.
      const auto code = hn::ShiftLeft<8>(hn::PromoteTo(d16, hn::LoadU(d8, codes + i)));
      const auto shifted = hn::BitCast(d16, hn::ShiftRight<4>(hn::BitCast(di16, code)));
      const auto bits = hn::And(shifted, sign_and_magnitude);
      const auto round = [&](hn::Vec<F32> value) {  // to bf16, ties to even; no NaN here
        const auto b = hn::BitCast(d32, value);
        const auto lowest_kept = hn::And(hn::ShiftRight<16>(b), hn::Set(d32, 1u));
        return hn::Add(hn::Add(b, hn::Set(d32, 0x7FFFu)), lowest_kept);
      };
      const auto even = round(hn::Mul(even_bf16(d, bits), scale_up));
      const auto odd = round(hn::Mul(odd_bf16(d, bits), scale_up));
      const auto value =
          hn::OddEven(hn::BitCast(d16, odd), hn::BitCast(d16, hn::ShiftRight<16>(even)));
      hn::StoreU(value, d16, reinterpret_cast<uint16_t*>(out) + i);
    }
  }
  dequantize_tile(codes + i, count - i, scale, out + i);
}

/// out[i] = bf16(codes[i] * scale) as a float. `count` is a multiple of 16, out is aligned to a
/// vector.
HWY_INLINE void dequantize_tile_to_floats(const uint8_t* codes, int64_t count, float scale,
                                          float* out) {
  const F32 d;
  const hn::RebindToUnsigned<F32> d32;
  const hn::RebindToSigned<F32> di32;
  const hn::Rebind<int8_t, F32> d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const bool fast = std::fabs(scale) < 0x1p7f && !tile_has_nan_code(codes, count);
  if (!fast) {  // as in dequantize_tile_simd
    for (int64_t i = 0; i < count; ++i) {
      bf16_t value;
      dequantize_tile(codes + i, 1, scale, &value);
      out[i] = bf16_to_float(value);
    }
    return;
  }
  const auto scale_up = hn::Set(d, scale * 0x1p120f);
  // 4 significant bits times 4 make 8, which bf16 holds; the bound keeps the products normal.
  const bool exact =
      (std::bit_cast<uint32_t>(scale) & 0x000FFFFFu) == 0 && std::fabs(scale) >= 0x1p-100f;
  for (int64_t i = 0; i < count; i += lanes) {
    const auto code = hn::BitCast(
        d32, hn::PromoteTo(di32, hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes) + i)));
    // Sign and fields move to their places in a float; its value is the code's * 2^-120.
    const auto shifted = hn::And(hn::ShiftLeft<20>(code), hn::Set(d32, 0x87F00000u));
    auto value = hn::BitCast(d32, hn::Mul(hn::BitCast(d, shifted), scale_up));
    if (!exact) {
      const auto lowest_kept = hn::And(hn::ShiftRight<16>(value), hn::Set(d32, 1u));
      value = hn::And(hn::Add(hn::Add(value, hn::Set(d32, 0x7FFFu)), lowest_kept),
                      hn::Set(d32, 0xFFFF0000u));
    }
    hn::Store(hn::BitCast(d, value), d, out + i);
  }
}

#endif  // HWY_SCALAR

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
