// Rows of a KDA layer as vectors: decoding, normalisation, gate, beta. Included after
// src/core/simd.h by *_cpu.cc files, once per instruction set.

#if defined(FOVEA_KDA_KDA_ROW_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_KDA_KDA_ROW_SIMD_H_
#undef FOVEA_KDA_KDA_ROW_SIMD_H_
#else
#define FOVEA_KDA_KDA_ROW_SIMD_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "fovea/kda.h"
#include "src/core/simd_math.h"
#include "src/kda/kda_chunk_scratch.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

using Rows = hn::CappedTag<float, 16>;
inline constexpr int kLanes = HWY_LANES(float) < 16 ? HWY_LANES(float) : 16;

/// Decodes `count` values and fills up with zeros to `padded`.
HWY_INLINE void load_row(const bf16_t* from, int64_t count, int64_t padded, float* to) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(load_bf16(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = bf16_to_float(from[i]);
  std::fill(to + i, to + padded, 0.0f);
}

HWY_INLINE void load_row(const float* from, int64_t count, int64_t padded, float* to) {
  std::copy_n(from, count, to);
  std::fill(to + count, to + padded, 0.0f);
}

/// Rounds `count` values.
HWY_INLINE void store_row(const float* from, int64_t count, bf16_t* to) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    store_bf16(d, round_to_bf16(d, hn::LoadU(d, from + i)), to + i);
  for (; i < count; ++i) to[i] = bf16_from_float(from[i]);
}

HWY_INLINE void store_row(const float* from, int64_t count, float* to) {
  std::copy_n(from, count, to);
}

/// Asks for the lines of `bytes` bytes in the L1 cache. Inlined, and so should its callers be: GCC
/// drops the call of a function that does nothing else.
HWY_INLINE void prefetch_lines(const void* from, int64_t bytes) {
  const char* data = static_cast<const char*>(from);
  for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(data + offset);
  __builtin_prefetch(data + bytes - 1);
}

/// row *= factor, after division by sqrt(sum row^2 + 1e-6) when `normalise`. `padded` is a multiple
/// of kKdaRowGroup; values past the row are zero. Order of the sum: lane by lane, two vectors
/// alternating, then across lanes.
HWY_INLINE void scale_row(bool normalise, float factor, int64_t padded, float* row) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  if (normalise) {
    auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
    for (int64_t i = 0; i < padded; i += 2 * lanes) {
      const auto x0 = hn::LoadU(d, row + i);
      const auto x1 = hn::LoadU(d, row + i + lanes);
      sum0 = hn::MulAdd(x0, x0, sum0);
      sum1 = hn::MulAdd(x1, x1, sum1);
    }
    const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
    factor /= std::sqrt(sum + 1e-6f);
  }
  if (factor == 1.0f) return;
  const auto f = hn::Set(d, factor);
  for (int64_t i = 0; i < padded; i += lanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, row + i), f), d, row + i);
}

/// The 8 sums across lanes of 8 vectors, to sums[0..7].
HWY_INLINE void sums_of_8(const hn::Vec<Rows> (&part)[8], float* sums) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  const hn::CappedTag<float, 8> d8;
  using V8 = hn::Vec<decltype(d8)>;
  const hn::Repartition<double, decltype(d8)> d64;
  V8 p[8];
  for (int i = 0; i < 8; ++i) {
#if HWY_TARGET == HWY_AVX3
    p[i] = hn::Add(hn::LowerHalf(d8, part[i]), hn::UpperHalf(d8, part[i]));
#else
    p[i] = part[i];
#endif
  }
  V8 pair[4];
  for (int i = 0; i < 4; ++i) {
    pair[i] = hn::Add(hn::InterleaveLower(d8, p[2 * i], p[2 * i + 1]),
                      hn::InterleaveUpper(d8, p[2 * i], p[2 * i + 1]));
  }
  V8 four[2];
  for (int i = 0; i < 2; ++i) {
    const auto x = hn::BitCast(d64, pair[2 * i]), y = hn::BitCast(d64, pair[2 * i + 1]);
    four[i] = hn::Add(hn::BitCast(d8, hn::InterleaveLower(d64, x, y)),
                      hn::BitCast(d8, hn::InterleaveUpper(d64, x, y)));
  }
  hn::StoreU(hn::Add(hn::ConcatLowerLower(d8, four[1], four[0]),
                     hn::ConcatUpperUpper(d8, four[1], four[0])),
             d8, sums);
#else
  const Rows d;
  for (int i = 0; i < 8; ++i) sums[i] = hn::GetLane(hn::SumOfLanes(d, part[i]));
#endif
}

/// ln(1 + t) of every lane for t in [0, 1], within 2^-22 relative; NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> log1p_of_fraction(D d, hn::Vec<D> t) {
  // 2 atanh(s) with s = t / (2 + t) <= 1/3, and a minimax polynomial of atanh(s) / s in s^2
  // (2^-25.8).
  const auto s = hn::Div(t, hn::Add(t, hn::Set(d, 2.0f)));
  const auto u = hn::Mul(s, s);
  auto p = hn::Set(d, 0.1342574954f);
  p = hn::MulAdd(p, u, hn::Set(d, 0.14118309319f));
  p = hn::MulAdd(p, u, hn::Set(d, 0.20003780722f));
  p = hn::MulAdd(p, u, hn::Set(d, 0.33333319425f));
  const auto twice = hn::Add(s, s);
  return hn::MulAdd(hn::Mul(p, u), twice, twice);
}

/// The gate of one value head.
struct GateHead {
  GateKind kind;
  float lower_bound;
  float rate;            ///< exp(a_log), finite
  const float* dt_bias;  ///< [K], may be null
};

/// `a_log` may be null: 0.
HWY_INLINE GateHead gate_head(const KdaGate& gate, const float* a_log, const float* dt_bias) {
  // A finite rate: 0 * inf would be NaN where 0 is meant.
  const float rate = a_log != nullptr ? std::exp(*a_log) : 1.0f;
  return {gate.kind, gate.lower_bound,
          rate > std::numeric_limits<float>::max() ? std::numeric_limits<float>::max() : rate,
          dt_bias};
}

/// In place: raw gate values to log decays (natural). `bias` is padded with zeros; `padded` is at
/// most 256.
///
/// One loop for each function: their chains of dependent steps are long, and only loops with few
/// steps leave room in the CPU's window for enough vectors at a time.
inline void log_decay_row(const GateHead& head, const float* bias, int64_t padded, float* row) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto one = hn::Set(d, 1.0f);
  if (head.kind == GateKind::kSoftplus) {
    // softplus(a) = max(a, 0) + ln(1 + e^-|a|); a maximum may drop a NaN, which e^-|a| keeps.
    HWY_ALIGN float exponential[256];
    for (int64_t i = 0; i < padded; i += lanes) {
      const auto a = hn::Add(hn::LoadU(d, row + i), hn::LoadU(d, bias + i));
      hn::StoreU(hn::Max(a, hn::Zero(d)), d, row + i);
      hn::Store(exp_f32(d, hn::Neg(hn::Abs(a))), d, exponential + i);
    }
    const auto minus_rate = hn::Set(d, -head.rate);
    for (int64_t i = 0; i < padded; i += lanes) {
      const auto tail = log1p_of_fraction(d, hn::Load(d, exponential + i));
      hn::StoreU(hn::Mul(minus_rate, hn::Add(hn::LoadU(d, row + i), tail)), d, row + i);
    }
  } else if (head.kind == GateKind::kLowerBound) {
    const auto minus_rate = hn::Set(d, -head.rate);
    for (int64_t i = 0; i < padded; i += lanes) {
      const auto a = hn::Add(hn::LoadU(d, row + i), hn::LoadU(d, bias + i));
      hn::StoreU(exp_f32(d, hn::Mul(minus_rate, a)), d, row + i);
    }
    const auto bound = hn::Set(d, head.lower_bound);
    for (int64_t i = 0; i < padded; i += lanes)
      hn::StoreU(hn::Div(bound, hn::Add(hn::LoadU(d, row + i), one)), d, row + i);
  }
}

/// In place: what the tensor beta holds to what the recurrence takes. `padded` as above.
HWY_INLINE void activate_beta(const KdaLayer& layer, int64_t padded, float* beta) {
  if (layer.beta_kind == BetaKind::kProb) return;
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto top = hn::Set(d, layer.allow_neg_eigval ? 2.0f : 1.0f);
  for (int64_t i = 0; i < padded; i += lanes) {
    const auto e = exp_f32(d, hn::Neg(hn::LoadU(d, beta + i)));
    hn::StoreU(hn::Div(top, hn::Add(e, hn::Set(d, 1.0f))), d, beta + i);
  }
}

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
