// One token of the recurrence over rows of a state in fp32. Included after src/core/simd.h by
// *_cpu.cc files, once per instruction set.

#if defined(FOVEA_KDA_KDA_STEP_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_KDA_KDA_STEP_SIMD_H_
#undef FOVEA_KDA_KDA_STEP_SIMD_H_
#else
#define FOVEA_KDA_KDA_STEP_SIMD_H_
#endif

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

/// State rows that one pass takes: their sums keep eight registers busy, which covers the latency
/// of a multiply-add.
inline constexpr int kStepRows = 4;

/// One token of one value head. Rows have `padded` channels, a multiple of two vectors.
struct StepToken {
  const float* decay;  ///< exp(log decay)
  const float* key;
  const float* query;  ///< times scale
  float query_key;     ///< dot(query, key)
  float beta;
};

/// The sums over the lanes of four vectors: 128-bit blocks are turned, then added in order.
HWY_INLINE void sums_of_4(F32 d, const hn::Vec<F32> (&parts)[4], float* sums) {
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < 4; ++i) sums[i] = hn::GetLane(parts[i]);
  static_cast<void>(d);
#else
  const hn::Repartition<double, F32> d64;
  const auto pair = [&](int i) {
    return hn::BitCast(d64, hn::Add(hn::InterleaveLower(d, parts[i], parts[i + 1]),
                                    hn::InterleaveUpper(d, parts[i], parts[i + 1])));
  };
  const auto low = pair(0), high = pair(2);
  const auto four = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, low, high)),
                            hn::BitCast(d, hn::InterleaveUpper(d64, low, high)));
  constexpr size_t kMaxLanes = hn::MaxLanes(F32());
  HWY_ALIGN float blocks[kMaxLanes];
  hn::Store(four, d, blocks);
  const hn::FixedTag<float, 4> d4;
  auto sum = hn::Load(d4, blocks);
  for (size_t block = 4; block < hn::Lanes(d); block += 4) {
    sum = hn::Add(sum, hn::Load(d4, blocks + block));
  }
  hn::StoreU(sum, d4, sums);
#endif
}

/// S <- diag(decay) S; u = beta (v - S key); S <- S + u key^T; out = S query, for kRows rows of the
/// state at `from`, written to `to` (which may be `from`). Order of the sums over channels: lane by
/// lane in ascending vectors, then across lanes; a row's bits do not depend on kRows.
template <int kRows>
HWY_INLINE void step_rows(const StepToken& token, int64_t padded, const float* from,
                          int64_t from_stride, float* to, int64_t to_stride, const float* v,
                          float* out, float* u) {
  static_assert(kRows <= kStepRows);
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<F32> recalled[kStepRows], asked[kStepRows];
  for (int r = 0; r < kStepRows; ++r) recalled[r] = asked[r] = hn::Zero(d);
  for (int64_t i = 0; i < padded; i += lanes) {
    const auto decay = hn::LoadU(d, token.decay + i);
    const auto key = hn::LoadU(d, token.key + i);
    const auto query = hn::LoadU(d, token.query + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto s = hn::Mul(hn::LoadU(d, from + r * from_stride + i), decay);
      hn::StoreU(s, d, to + r * to_stride + i);
      recalled[r] = hn::MulAdd(s, key, recalled[r]);
      asked[r] = hn::MulAdd(s, query, asked[r]);
    }
  }
  float recalled_sums[kStepRows], asked_sums[kStepRows];
  sums_of_4(d, recalled, recalled_sums);
  sums_of_4(d, asked, asked_sums);
  for (int r = 0; r < kRows; ++r) {
    u[r] = token.beta * (v[r] - recalled_sums[r]);
    out[r] = asked_sums[r] + token.query_key * u[r];
  }
  for (int64_t i = 0; i < padded; i += lanes) {
    const auto key = hn::LoadU(d, token.key + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      float* const at = to + r * to_stride + i;
      hn::StoreU(hn::MulAdd(hn::Set(d, u[r]), key, hn::LoadU(d, at)), d, at);
    }
  }
}

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
