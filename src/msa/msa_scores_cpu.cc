#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/msa/msa_scores_cpu.cc"
#include "src/core/simd.h"
// This needs the helpers of simd.h.
#include "src/core/simd_math.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/msa/msa_scores_driver.h"

// Lanes hold keys: a tile of kKeyVectors vectors of keys is widened to fp32 and transposed,
// packed[channel][key], so that a channel takes a few key vectors and one broadcast per query.
HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

using U32 = hn::ScalableTag<uint32_t>;

// Registers: AVX-512 has 32: 6 queries x 4 key vectors of sums, 4 keys, one broadcast. Elsewhere
// count on 16: 6 x 2.
constexpr int kKeyVectors = HWY_TARGET <= HWY_AVX3 ? 4 : 2;
constexpr int64_t kLanes = HWY_LANES(float);
constexpr int64_t kKeyTile = kKeyVectors * kLanes;
static_assert(kMsaMaxKeyTile % kKeyTile == 0);

#if HWY_TARGET == HWY_SCALAR

HWY_INLINE void pack_channels(const bf16_t* const* rows, int64_t channel, float* out) {
  for (int64_t c = 0; c < 8; ++c) out[c * kKeyTile] = bf16_to_float(rows[0][channel + c]);
}

#else

// 8 channels of every fourth row, one row per 128-bit block.
HWY_INLINE hn::Vec<U32> load_blocks(const bf16_t* const* rows, int64_t channel) {
  const hn::Full128<uint32_t> d128;
  const auto block = [&](int b) {
    return hn::LoadU(d128, reinterpret_cast<const uint32_t*>(rows[4 * b] + channel));
  };
#if HWY_TARGET == HWY_AVX2
  const U32 d;
  return hn::Combine(d, block(1), block(0));
#elif HWY_TARGET <= HWY_AVX3
  const U32 d;
  const hn::Full256<uint32_t> d256;
  return hn::Combine(d, hn::Combine(d256, block(3), block(2)),
                     hn::Combine(d256, block(1), block(0)));
#else
  return block(0);
#endif
}

// 8 channels of kLanes rows: channel c of row l at out[c * kKeyTile + l].
HWY_INLINE void pack_channels(const bf16_t* const* rows, int64_t channel, float* out) {
  const F32 d;
  const U32 du;
  const hn::Repartition<uint64_t, U32> d64;
  const auto wide = [&](hn::Vec<U32> v) HWY_ATTR { return hn::BitCast(d64, v); };
  const auto a0 = load_blocks(rows, channel);
  const auto a1 = load_blocks(rows + 1, channel);
  const auto a2 = load_blocks(rows + 2, channel);
  const auto a3 = load_blocks(rows + 3, channel);
  // Transposes 4 x 4 pairs of channels inside each 128-bit block: lane l then holds row l.
  const auto low01 = wide(hn::InterleaveLower(du, a0, a1));
  const auto high01 = wide(hn::InterleaveUpper(du, a0, a1));
  const auto low23 = wide(hn::InterleaveLower(du, a2, a3));
  const auto high23 = wide(hn::InterleaveUpper(du, a2, a3));
  const hn::Vec<U32> pairs[4] = {hn::BitCast(du, hn::InterleaveLower(d64, low01, low23)),
                                 hn::BitCast(du, hn::InterleaveUpper(d64, low01, low23)),
                                 hn::BitCast(du, hn::InterleaveLower(d64, high01, high23)),
                                 hn::BitCast(du, hn::InterleaveUpper(d64, high01, high23))};
  for (int64_t i = 0; i < 4; ++i) {
    hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(pairs[i])), d, out + 2 * i * kKeyTile);
    hn::StoreU(hn::BitCast(d, hn::And(pairs[i], hn::Set(du, 0xFFFF0000u))), d,
               out + (2 * i + 1) * kKeyTile);
  }
}

#endif  // HWY_SCALAR

// Keys [first, first + kKeyTile) of the block; those past the last one are copies of it, whose
// products nobody reads.
void pack_keys(const MsaScoreTask& task, int64_t first) {
  for (int64_t vector = 0; vector < kKeyTile; vector += kLanes) {
    const bf16_t* rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t key = std::min(first + vector + lane, task.num_keys - 1);
      rows[lane] = task.keys + key * task.key_stride;
      if (task.next_keys == nullptr) continue;
      const auto* ahead = reinterpret_cast<const char*>(task.next_keys + key * task.key_stride);
      for (int64_t byte = 0; byte < task.head_dim * 2; byte += 64)
        __builtin_prefetch(ahead + byte, 0, 2);
    }
    for (int64_t channel = 0; channel < task.head_dim; channel += 8)
      pack_channels(rows, channel, task.packed + channel * kKeyTile + vector);
  }
}

// products[query][key] for kQueries queries and one tile of keys.
template <int kQueries>
HWY_NOINLINE void dot_tile(const float* HWY_RESTRICT queries, const float* HWY_RESTRICT packed,
                           int64_t head_dim, int64_t product_stride, float* HWY_RESTRICT products) {
  const F32 d;
  hn::Vec<F32> sum[kQueries][kKeyVectors];
#pragma GCC unroll 6
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < kKeyVectors; ++v) sum[q][v] = hn::Zero(d);
  }
  for (int64_t c = 0; c < head_dim; ++c) {
    hn::Vec<F32> key[kKeyVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kKeyVectors; ++v) key[v] = hn::LoadU(d, packed + c * kKeyTile + v * kLanes);
#pragma GCC unroll 6
    for (int q = 0; q < kQueries; ++q) {
      const auto query = hn::Set(d, queries[q * head_dim + c]);
#pragma GCC unroll 4
      for (int v = 0; v < kKeyVectors; ++v) sum[q][v] = hn::MulAdd(query, key[v], sum[q][v]);
    }
  }
#pragma GCC unroll 6
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < kKeyVectors; ++v)
      hn::StoreU(sum[q][v], d, products + q * product_stride + v * kLanes);
  }
}

void dot_queries(const MsaScoreTask& task, int64_t first_key) {
  int64_t q = 0;
  const auto step = [&](auto count) {
    constexpr int kQueries = decltype(count)::value;
    for (; q + kQueries <= task.num_queries; q += kQueries) {
      dot_tile<kQueries>(task.queries + q * task.head_dim, task.packed, task.head_dim,
                         task.product_stride, task.products + q * task.product_stride + first_key);
    }
  };
  if (task.num_queries != 4 && task.num_queries != 8) step(std::integral_constant<int, 6>());
  step(std::integral_constant<int, 4>());
  step(std::integral_constant<int, 2>());
  step(std::integral_constant<int, 1>());
}

// The block score of one query. Products of tokens that it does not see are replaced, not weighted:
// they may be NaN.
float reduce(const MsaScoreTask& task, float* products, int64_t visible) {
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  if (visible == 0) return kNegInf;
  const F32 d;
  const auto neg_inf = hn::Set(d, kNegInf);
  const auto scale = hn::Set(d, task.index_scale);
  const auto lane = hn::Iota(d, 0.0f);
  auto largest = neg_inf;
  auto nan = hn::Zero(d);  // 1 in lanes that met a NaN
  for (int64_t k = 0; k < visible; k += kLanes) {
    const auto sees = hn::Lt(lane, hn::Set(d, static_cast<float>(visible - k)));
    const auto product = hn::IfThenElse(sees, hn::Mul(scale, hn::LoadU(d, products + k)), neg_inf);
    hn::StoreU(product, d, products + k);
    nan = hn::IfThenElse(hn::Eq(product, product), nan, hn::Set(d, 1.0f));
    largest = hn::Max(largest, product);
  }
  if (hn::GetLane(hn::MaxOfLanes(d, nan)) > 0) return std::numeric_limits<float>::quiet_NaN();
  const float most = hn::GetLane(hn::MaxOfLanes(d, largest));
  if (task.score == BlockScore::kMax || std::isinf(most)) return most;
  auto sum = hn::Zero(d);
  for (int64_t k = 0; k < visible; k += kLanes)
    sum = hn::Add(sum, exp_f32(d, hn::Sub(hn::LoadU(d, products + k), hn::Set(d, most))));
  return most + std::log(hn::GetLane(hn::SumOfLanes(d, sum)));
}

void score_block(const MsaScoreTask& task) {
  for (int64_t first = 0; first < task.num_keys; first += kKeyTile) {
    pack_keys(task, first);
    dot_queries(task, first);
  }
  for (int64_t q = 0; q < task.num_queries; ++q)
    task.results[q] = reduce(task, task.products + q * task.product_stride, task.visible[q]);
}

MsaScoreKernel score_kernel() { return score_block; }

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(score_kernel);

MsaScoreKernel msa_score_kernel() {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  return HWY_DYNAMIC_DISPATCH(score_kernel)();
}

}  // namespace fovea::internal
#endif
