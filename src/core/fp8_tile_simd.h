// Vector forms of src/core/fp8_tile.h: the same bits. Included after src/core/simd.h by *_cpu.cc
// files, once per instruction set, hence the guard of the same kind.

#include <bit>

#include "src/core/fp8_tile.h"

#if defined(FOVEA_CORE_FP8_TILE_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CORE_FP8_TILE_SIMD_H_
#undef FOVEA_CORE_FP8_TILE_SIMD_H_
#else
#define FOVEA_CORE_FP8_TILE_SIMD_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

/// A scale that is given, not derived from the elements. Finite and positive. A power of two with a
/// normal reciprocal divides by multiplication: both round the same real number.
struct TileScale {
  explicit TileScale(float value_in) : value(value_in), reciprocal(0) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t exponent = bits >> 23;
    if ((bits & 0x7FFFFFu) == 0 && exponent >= 1 && exponent <= 253) reciprocal = 1.0f / value;
  }
  float value;
  float reciprocal;  ///< 0: to be divided by.
};

#if HWY_TARGET == HWY_SCALAR

// One lane: the plain loops are the vector forms.
template <int kTiles>
inline void quantize_tiles_simd(const bf16_t* const (&x)[kTiles], int64_t count, TileScaleRule rule,
                                ScaleMode mode, uint8_t* const (&codes)[kTiles],
                                float (&scales)[kTiles]) {
  for (int t = 0; t < kTiles; ++t) scales[t] = quantize_tile(x[t], count, rule, mode, codes[t]);
}
template <bool kStream, int kTiles>
inline void dequantize_tiles_simd(const uint8_t* const (&codes)[kTiles], int64_t count,
                                  const float (&scales)[kTiles], bf16_t* const (&out)[kTiles]) {
  for (int t = 0; t < kTiles; ++t) dequantize_tile(codes[t], count, scales[t], out[t]);
}
inline void encode_tile_simd(const bf16_t* x, int64_t count, const TileScale& scale,
                             uint8_t* codes) {
  encode_tile(x, count, scale.value, codes);
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
  // Both halves of each 32-bit lane, then across lanes.
  const hn::ScalableTag<int32_t> di32;
  const auto pairs = hn::BitCast(di32, largest);
  const auto halves = hn::Max(hn::And(pairs, hn::Set(di32, 0xFFFF)), hn::ShiftRight<16>(pairs));
  auto result = static_cast<uint16_t>(hn::GetLane(hn::MaxOfLanes(di32, halves)));
  for (; i < count; ++i) result = std::max(result, static_cast<uint16_t>(bits[i] & 0x7FFF));
  return result;
}

using I16 = hn::ScalableTag<int16_t>;
using I8 = hn::ScalableTag<int8_t>;
using U8 = hn::ScalableTag<uint8_t>;

/// The lanes of two vectors, saturated to 8 bits, in an order that depends on the processor
/// (packing works within blocks of 16 bytes): in_order() restores it.
HWY_INLINE hn::Vec<I8> pack_blocks(hn::Vec<I16> low, hn::Vec<I16> high) {
#if HWY_ARCH_X86 && HWY_TARGET == HWY_AVX2
  return hn::Vec<I8>{_mm256_packs_epi16(low.raw, high.raw)};
#elif HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return hn::Vec<I8>{_mm512_packs_epi16(low.raw, high.raw)};
#else
  const I8 d8;
  const hn::Half<I8> half;
  return hn::Combine(d8, hn::DemoteTo(half, high), hn::DemoteTo(half, low));
#endif
}

HWY_INLINE hn::Vec<I8> in_order(hn::Vec<I8> packed) {
#if HWY_ARCH_X86 && HWY_TARGET == HWY_AVX2
  return hn::Vec<I8>{_mm256_permute4x64_epi64(packed.raw, 0xD8)};
#elif HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return hn::Vec<I8>{
      _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed.raw)};
#else
  return packed;
#endif
}

/// The opposite order: InterleaveLower() and InterleaveUpper() of the result give the first and the
/// second half of `bytes` in order.
HWY_INLINE hn::Vec<U8> spread(hn::Vec<U8> bytes) {
#if HWY_ARCH_X86 && HWY_TARGET == HWY_AVX2
  return hn::Vec<U8>{_mm256_permute4x64_epi64(bytes.raw, 0xD8)};
#elif HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return hn::Vec<U8>{
      _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes.raw)};
#else
  return bytes;
#endif
}

/// Whether spread() does that: elsewhere for vectors of one block only.
inline constexpr bool kSpreads = (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_MAX_BYTES == 16;

/// Scales for which nothing that the tables below hold leaves the normal bf16 numbers.
HWY_INLINE bool is_moderate(float scale) { return scale >= 0x1p-100f && scale <= 0x1p100f; }

/// The codes of a tile as steps over the bits of its bf16 elements: one table lookup encodes as
/// many elements as a vector has bytes, where a division takes four times as many vectors.
///
/// Doubling an element adds 128 to its bits and, from the smallest normal code (8) on, 8 to its
/// code. With `start` the bits at which the quotient passes 7.75 (in units of 2^-9) and u = bits -
/// start >= 0,
///
///   code = 8 + 8 * (u >> 7) + number of steps <= (u & 127)
///
/// where a binade has 7 steps inside. They are at least 8 bit patterns apart (a step spans 1/15.5
/// of the element or more, and an element is 128 units of its last place or more), so a cell of 8
/// patterns holds at most one: rank[cell] is one more than the steps up to the start
/// of the cell, before[rank] the pattern before the following step. Below `start` codes are
/// subnormal; from four binades below on they are 0, because 7.75 / 16 rounds to 0.
///
/// The steps follow from the definition: of the bf16 neighbours of tie * scale, the first one whose
/// IEEE quotient by scale rounds up. A power of two in scale moves them all: tables are made for
/// the mantissa.
struct StepTable {
  alignas(16) uint8_t rank[16];    // by cell
  alignas(16) uint8_t before[16];  // by cell
  uint32_t scale_mantissa;
  int16_t start;  // minus 128 times the exponent field of scale
};

inline void make_step_table(float scale, StepTable* table) {
  // Where code 8 (as if the normal numbers went on below it) to 15 start. A tie goes to the even
  // code: below an odd one only what is larger rounds up.
  HWY_ALIGN static constexpr float kTies[8] = {0x1.Fp-7f, 0x1.1p-6f, 0x1.3p-6f, 0x1.5p-6f,
                                               0x1.7p-6f, 0x1.9p-6f, 0x1.Bp-6f, 0x1.Dp-6f};
  HWY_ALIGN static constexpr float kLowest[8] = {0x1.Fp-7f,      0x1.100002p-6f, 0x1.3p-6f,
                                                 0x1.500002p-6f, 0x1.7p-6f,      0x1.900002p-6f,
                                                 0x1.Bp-6f,      0x1.D00002p-6f};
  const hn::CappedTag<float, 8> d;
  const hn::RebindToSigned<decltype(d)> d32;
  using V32 = hn::Vec<decltype(d32)>;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto divisor = hn::Set(d, scale);
  HWY_ALIGN uint8_t steps[8];  // relative to the first, minus 1
  auto start = hn::Zero(d32);
  for (size_t k = 0; k < 8; k += hn::Lanes(d)) {
    const auto lowest = hn::Load(d, kLowest + k);
    const auto passes = [&](V32 bits) {
      const auto quotient = hn::Div(hn::BitCast(d, hn::ShiftLeft<16>(bits)), divisor);
      return hn::VecFromMask(d32, hn::RebindMask(d32, hn::Ge(quotient, lowest)));
    };
    // `near` is the step or up to two below it; a mask counts as -1.
    const auto product = hn::Mul(hn::Load(d, kTies + k), divisor);
    const auto near = hn::ShiftRight<16>(hn::BitCast(d32, product));
    const auto above = hn::Add(near, hn::Set(d32, 1));
    const auto step = hn::Add(hn::Add(near, hn::Set(d32, 2)), hn::Add(passes(near), passes(above)));
    if (k == 0) start = hn::Set(d32, hn::GetLane(step));
    const auto relative = hn::Sub(hn::Sub(step, start), hn::Set(d32, 1));
    hn::StoreU(hn::TruncateTo(d8, hn::BitCast(hn::RebindToUnsigned<decltype(d32)>(), relative)), d8,
               steps + k);
  }
  // The lowest byte is -1: rank counts it always, which makes it 1 and more.
  const hn::FixedTag<int8_t, 16> d16;
  const hn::FixedTag<uint8_t, 16> du16;
  const hn::FixedTag<uint8_t, 8> du8;
  HWY_ALIGN static constexpr int8_t kCells[16] = {0,  8,  16, 24, 32, 40,  48,  56,
                                                  64, 72, 80, 88, 96, 104, 112, 120};
  const auto cells = hn::Load(d16, kCells);
  const auto before = hn::Combine(du16, hn::Set(du8, uint8_t{127}), hn::Load(du8, steps));
  auto rank = hn::Set(d16, int8_t{1});
  for (uint8_t k = 1; k < 8; ++k) {
    const auto step = hn::BitCast(d16, hn::TableLookupBytes(before, hn::Set(du16, k)));
    rank = hn::Sub(rank, hn::VecFromMask(d16, hn::Gt(cells, step)));
  }
  const auto scale_bits = std::bit_cast<uint32_t>(scale);
  table->scale_mantissa = scale_bits & 0x7FFFFFu;
  table->start =
      static_cast<int16_t>(hn::GetLane(start) - static_cast<int>(scale_bits >> 23) * 128);
  hn::Store(hn::BitCast(du16, rank), du16, table->rank);
  hn::Store(hn::TableLookupBytes(before, hn::BitCast(du16, rank)), du16, table->before);
}

/// The tables of the scales that occur: RN(amax / 448) for the 128 mantissas of amax, and powers of
/// two. 6 KB, made at first use.
struct StepTables {
  static constexpr size_t kPow2 = 128;
  StepTable of[129];

  StepTables() {
    for (uint32_t mantissa = 0; mantissa < 128; ++mantissa) {
      const float amax = std::bit_cast<float>((127u << 7 | mantissa) << 16);
      make_step_table(amax / kE4m3Max, &of[mantissa]);
    }
    make_step_table(1.0f, &of[kPow2]);
  }
};
inline const StepTables& step_tables() {
  static const StepTables tables;
  return tables;
}

/// The table of `scale`, made into *own when it is none of those. `amax_bits` are the bf16 bits of
/// the tile's largest magnitude.
HWY_INLINE const StepTable& step_table_of(const StepTables& tables, float scale, uint16_t amax_bits,
                                          StepTable* own) {
  const uint32_t mantissa = std::bit_cast<uint32_t>(scale) & 0x7FFFFFu;
  const StepTable& table = tables.of[mantissa == 0 ? StepTables::kPow2 : amax_bits & 127u];
  if (HWY_LIKELY(table.scale_mantissa == mantissa)) return table;
  make_step_table(scale, own);
  return *own;
}

/// Codes of Lanes(U16()) finite elements of at most 448 * scale, up to the rounding of scale.
HWY_INLINE void encode_by_division(const bf16_t* x, float scale, uint8_t* codes) {
  const F32 d;
  const U16 d16;
  const hn::Rebind<uint8_t, U16> d8;
  const auto divisor = hn::Set(d, scale);
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(x));
  const auto magnitude = hn::And(bits, hn::Set(d16, 0x7FFF));
  const auto even = e4m3_magnitude(d, hn::Div(even_bf16(d, magnitude), divisor));
  const auto odd = e4m3_magnitude(d, hn::Div(odd_bf16(d, magnitude), divisor));
  // The codes are the low halves of the lanes.
  const auto code = hn::OddEven(hn::BitCast(d16, hn::ShiftLeft<16>(odd)), hn::BitCast(d16, even));
  const auto sign = hn::And(hn::ShiftRight<8>(bits), hn::Set(d16, 0x80));
  hn::StoreU(hn::DemoteTo(d8, hn::BitCast(I16(), hn::Or(code, sign))), d8, codes);
}

/// Codes of Lanes(U16()) elements of any kind; quotient(magnitudes) gives |x| / scale.
template <class Quotient>
HWY_INLINE void encode_any(const bf16_t* x, const Quotient& quotient, uint8_t* codes) {
  const F32 d;
  const U16 d16;
  const I16 di16;
  const hn::Rebind<uint8_t, U16> d8;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(x));
  const auto magnitude = hn::And(bits, hn::Set(d16, 0x7FFF));
  const auto code_of = [&](hn::Vec<F32> values) {
    return e4m3_magnitude(d, hn::Min(quotient(values), hn::Set(d, kE4m3Max)));
  };
  const auto even = code_of(even_bf16(d, magnitude));
  const auto odd = code_of(odd_bf16(d, magnitude));
  // The codes are the low halves of the lanes.
  const auto code = hn::OddEven(hn::BitCast(d16, hn::ShiftLeft<16>(odd)), hn::BitCast(d16, even));
  const auto sign = hn::And(hn::ShiftRight<8>(bits), hn::Set(d16, 0x80));
  const auto is_nan =
      hn::Gt(hn::BitCast(di16, magnitude), hn::Set(di16, static_cast<int16_t>(0x7F80)));
  const auto number = hn::BitCast(di16, hn::Or(code, sign));
  hn::StoreU(hn::DemoteTo(d8, hn::IfThenElse(is_nan, hn::Set(di16, 0x7F), number)), d8, codes);
}

/// encode_tile with vectors.
HWY_INLINE void encode_tile_simd(const bf16_t* x, int64_t count, const TileScale& scale,
                                 uint8_t* codes) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(U16()));
  int64_t i = 0;
  if (scale.reciprocal != 0) {
    const auto factor = hn::Set(d, scale.reciprocal);
    const auto quotient = [&](hn::Vec<F32> values) { return hn::Mul(values, factor); };
    for (; i + lanes <= count; i += lanes) encode_any(x + i, quotient, codes + i);
  } else {
    const auto divisor = hn::Set(d, scale.value);
    const auto quotient = [&](hn::Vec<F32> values) { return hn::Div(values, divisor); };
    for (; i + lanes <= count; i += lanes) encode_any(x + i, quotient, codes + i);
  }
  encode_tile(x + i, count - i, scale.value, codes + i);
}

/// Codes of 2 * Lanes(U16()) finite elements of at most 448 * scale, up to the rounding of scale.
/// Raises the lanes of *lowest to kSubnormalBinade or more where a code would be subnormal but not
/// zero: the step table does not give those.
constexpr uint8_t kSubnormalBinade = 0xE0;
HWY_INLINE void encode_by_steps(const StepTable& table, hn::Vec<I16> start, const bf16_t* x,
                                hn::Vec<U8>* lowest, uint8_t* codes) {
  const U16 d16;
  const I16 di16;
  const I8 d8;
  const U8 du8;
  const auto* const from = reinterpret_cast<const uint16_t*>(x);
  const auto x0 = hn::LoadU(d16, from);
  const auto x1 = hn::LoadU(d16, from + hn::Lanes(d16));
  const auto magnitude = hn::Set(d16, 0x7FFF);
  const auto u0 = hn::Sub(hn::BitCast(di16, hn::And(x0, magnitude)), start);
  const auto u1 = hn::Sub(hn::BitCast(di16, hn::And(x1, magnitude)), start);
  // The binade in bits 3..7: -32..-1, as unsigned numbers the largest, for subnormal codes, below
  // that for zeros.
  const auto binade = pack_blocks(hn::ShiftRight<4>(u0), hn::ShiftRight<4>(u1));
  *lowest = hn::Max(*lowest, hn::BitCast(du8, binade));
  const auto low = hn::Set(di16, 127);
  const auto within = pack_blocks(hn::And(u0, low), hn::And(u1, low));
  const auto cell =
      hn::And(hn::BitCast(du8, hn::ShiftRight<3>(hn::BitCast(d16, within))), hn::Set(du8, 15));
  const auto rank = hn::TableLookupBytes(hn::LoadDup128(du8, table.rank), cell);
  const auto before = hn::TableLookupBytes(hn::LoadDup128(du8, table.before), cell);
  const auto past = hn::VecFromMask(d8, hn::Gt(within, hn::BitCast(d8, before)));
  // (binade & ~7) + 8 + (rank - 1) + 1 if past; a mask counts as -1
  const auto code =
      hn::Add(hn::Or(binade, hn::Set(d8, int8_t{7})), hn::Sub(hn::BitCast(d8, rank), past));
  const auto sign = hn::And(pack_blocks(hn::BitCast(di16, x0), hn::BitCast(di16, x1)),
                            hn::Set(d8, static_cast<int8_t>(0x80)));
  hn::StoreU(hn::BitCast(du8, in_order(hn::Or(hn::Max(code, hn::Zero(d8)), sign))), du8, codes);
}

/// Codes of a tile whose elements are finite and at most 448 * scale in magnitude (up to the
/// rounding of scale), as they are when scale follows from the tile. `table` is of that scale.
HWY_INLINE void encode_finite_tile(const StepTable& table, const bf16_t* x, int64_t count,
                                   float scale, uint8_t* codes) {
  const U8 du8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(U16()));
  const auto exponent = static_cast<int>(std::bit_cast<uint32_t>(scale) >> 23);
  const auto start = hn::Set(I16(), static_cast<int16_t>(table.start + exponent * 128));
  auto lowest = hn::Zero(du8);
  int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    encode_by_steps(table, start, x + i, &lowest, codes + i);
  }
  if (HWY_UNLIKELY(!hn::AllTrue(du8, hn::Lt(lowest, hn::Set(du8, kSubnormalBinade))))) {
    for (i = 0; i + lanes <= count; i += lanes) encode_by_division(x + i, scale, codes + i);
  }
  encode_tile(x + i, count - i, scale, codes + i);
}

/// Encodes kTiles tiles of `count` channels. All maxima come first, then all scales, then the
/// codes: each step is a chain of latencies, which tiles side by side hide from one another.
template <int kTiles>
HWY_INLINE void quantize_tiles_simd(const bf16_t* const (&x)[kTiles], int64_t count,
                                    TileScaleRule rule, ScaleMode mode,
                                    uint8_t* const (&codes)[kTiles], float (&scales)[kTiles]) {
  uint16_t largest[kTiles];
  for (int t = 0; t < kTiles; ++t) largest[t] = tile_largest_bits(x[t], count);
  for (int t = 0; t < kTiles; ++t) scales[t] = rule(bf16_to_float(bf16_t{largest[t]}), mode);
  bool usual = true;  // no infinity, no NaN, no extreme scale
  for (int t = 0; t < kTiles; ++t) {
    usual = usual && largest[t] < 0x7F80 && is_moderate(scales[t]);
  }
  if (HWY_UNLIKELY(!usual)) {
    for (int t = 0; t < kTiles; ++t) scales[t] = quantize_tile(x[t], count, rule, mode, codes[t]);
    return;
  }
  const StepTables& tables = step_tables();
  for (int t = 0; t < kTiles; ++t) {
    StepTable own;
    const StepTable& table = step_table_of(tables, scales[t], largest[t], &own);
    encode_finite_tile(table, x[t], count, scales[t], codes[t]);
  }
}

/// Whether a code of the tile is NaN.
HWY_INLINE bool tile_has_nan_code(const uint8_t* codes, int64_t count) {
  const U8 d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d8));
  const auto nan = hn::Set(d8, 0x7F);
  auto largest = hn::Zero(d8);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    largest = hn::Max(largest, hn::And(hn::LoadU(d8, codes + i), nan));
  }
  bool any = !hn::AllTrue(d8, hn::Lt(largest, nan));
  for (; i < count; ++i) any = any || (codes[i] & 0x7F) == 0x7F;
  return any;
}

/// The bf16 values of a tile's codes by table. With m the low 3 bits of a code and e the 4 above
/// them, a normal code (e > 0) stands for (8 + m) * 2^(e - 10); times scale and rounded, it is
/// bits((8 + m) * 2^-10 * scale) + 128 * e, since powers of two commute with rounding as long as
/// everything is a normal number. Even and odd e share a table by the low 4 bits of the code; what
/// is left of e adds 256 each, which concerns the upper byte alone. Codes below 16 have a table of
/// their own, because those below 8 are subnormal: m * 2^-9.
struct ValueTable {
  alignas(16) uint8_t low[16];  // lower bytes, by the low 4 bits
  alignas(16) uint8_t high[16];
  alignas(16) uint8_t first_low[16];  // the same for codes below 16
  alignas(16) uint8_t first_high[16];
};

HWY_INLINE void make_value_table(float scale, ValueTable* table) {
  HWY_ALIGN static constexpr float kNormal[8] = {0x8p-10f, 0x9p-10f, 0xAp-10f, 0xBp-10f,
                                                 0xCp-10f, 0xDp-10f, 0xEp-10f, 0xFp-10f};
  HWY_ALIGN static constexpr float kSubnormal[8] = {0x0p-9f, 0x1p-9f, 0x2p-9f, 0x3p-9f,
                                                    0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f};
  const hn::CappedTag<float, 8> d;
  const hn::RebindToUnsigned<decltype(d)> d32;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const auto factor = hn::Set(d, scale);
  HWY_ALIGN uint16_t normals[8];
  HWY_ALIGN uint16_t subnormals[8];
  const auto round = [&](const float* values, uint16_t* bits) {  // to bf16, ties to even
    const auto b = hn::BitCast(d32, hn::Mul(hn::Load(d, values), factor));
    const auto lowest_kept = hn::And(hn::ShiftRight<16>(b), hn::Set(d32, 1u));
    const auto rounded = hn::Add(hn::Add(b, hn::Set(d32, 0x7FFFu)), lowest_kept);
    hn::Store(hn::TruncateTo(d16, hn::ShiftRight<16>(rounded)), d16, bits);
  };
  for (size_t m = 0; m < 8; m += hn::Lanes(d)) {
    round(kNormal + m, normals + m);
    round(kSubnormal + m, subnormals + m);
  }
  const hn::FixedTag<uint16_t, 8> entries;
  const hn::FixedTag<uint8_t, 16> bytes;
  const auto even = hn::Load(entries, normals);
  const auto odd = hn::BitCast(bytes, hn::Add(even, hn::Set(entries, uint16_t{128})));
  const auto store = [&](hn::Vec<decltype(bytes)> first_half, uint8_t* low, uint8_t* high) {
    hn::Store(hn::ConcatEven(bytes, odd, first_half), bytes, low);
    hn::Store(hn::ConcatOdd(bytes, odd, first_half), bytes, high);
  };
  store(hn::BitCast(bytes, even), table->low, table->high);
  store(hn::BitCast(bytes, hn::Load(entries, subnormals)), table->first_low, table->first_high);
}

/// out[i] = bf16(codes[i] * scale) for Lanes(U8()) codes that are not NaN.
template <bool kStream>
HWY_INLINE void decode_by_table(const ValueTable& table, const uint8_t* codes, bf16_t* out) {
  const U8 d8;
  const U16 d16;
  const auto code = spread(hn::LoadU(d8, codes));
  const auto index = hn::And(code, hn::Set(d8, 15));
  const auto shifted = hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, code)));
  const auto sixteens = hn::And(shifted, hn::Set(d8, 7));
  const auto is_first = hn::Eq(sixteens, hn::Zero(d8));
  const auto lookup = [&](const uint8_t* entries) {
    return hn::TableLookupBytes(hn::LoadDup128(d8, entries), index);
  };
  const auto low = hn::IfThenElse(is_first, lookup(table.first_low), lookup(table.low));
  const auto high = hn::IfThenElse(is_first, lookup(table.first_high), lookup(table.high));
  const auto sign = hn::And(code, hn::Set(d8, 0x80));
  const auto signed_high = hn::Or(hn::Add(high, sixteens), sign);
  auto* const to = reinterpret_cast<uint16_t*>(out);
  const auto store = [&](hn::Vec<U8> bytes, uint16_t* at) {
    if constexpr (kStream) {
      hn::Stream(hn::BitCast(d16, bytes), d16, at);
    } else {
      hn::StoreU(hn::BitCast(d16, bytes), d16, at);
    }
  };
  store(hn::InterleaveLower(d8, low, signed_high), to);
  store(hn::InterleaveUpper(d8, low, signed_high), to + hn::Lanes(d16));
}

/// out[t][i] = bf16(codes[t][i] * scales[t]) for kTiles tiles of `count` channels; side by side, as
/// in quantize_tiles_simd. kStream: with stores past the caches; `out` is then aligned to a vector,
/// and hwy::FlushStream() must follow before another thread reads.
template <bool kStream, int kTiles>
HWY_INLINE void dequantize_tiles_simd(const uint8_t* const (&codes)[kTiles], int64_t count,
                                      const float (&scales)[kTiles], bf16_t* const (&out)[kTiles]) {
  bool usual = kSpreads;
  for (int t = 0; t < kTiles; ++t) usual = usual && is_moderate(scales[t]);
  for (int t = 0; t < kTiles; ++t) usual = usual && !tile_has_nan_code(codes[t], count);
  if (HWY_UNLIKELY(!usual)) {
    for (int t = 0; t < kTiles; ++t) dequantize_tile(codes[t], count, scales[t], out[t]);
    return;
  }
  ValueTable tables[kTiles];
  for (int t = 0; t < kTiles; ++t) make_value_table(scales[t], &tables[t]);
  const auto lanes = static_cast<int64_t>(hn::Lanes(U8()));
  for (int t = 0; t < kTiles; ++t) {
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      decode_by_table<kStream>(tables[t], codes[t] + i, out[t] + i);
    }
    dequantize_tile(codes[t] + i, count - i, scales[t], out[t] + i);
  }
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

/// Encodes one tile and returns its scale.
HWY_INLINE float quantize_tile_simd(const bf16_t* x, int64_t count, TileScaleRule rule,
                                    ScaleMode mode, uint8_t* codes) {
  const bf16_t* const from[] = {x};
  uint8_t* const to[] = {codes};
  float scale[1];
  quantize_tiles_simd(from, count, rule, mode, to, scale);
  return scale[0];
}

/// Decodes one tile.
HWY_INLINE void dequantize_tile_simd(const uint8_t* codes, int64_t count, float scale,
                                     bf16_t* out) {
  const uint8_t* const from[] = {codes};
  bf16_t* const to[] = {out};
  const float scales[] = {scale};
  dequantize_tiles_simd<false>(from, count, scales, to);
}

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
