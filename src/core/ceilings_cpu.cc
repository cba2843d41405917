#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/core/ceilings_cpu.cc"
#include "src/core/simd.h"

#include <hwy/cache_control.h>

#include <algorithm>

#include "fovea/device.h"
#include "src/core/ceilings_kernels.h"

#if HWY_ONCE && HWY_ARCH_X86
#include <immintrin.h>
#endif

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

using U64 = hn::ScalableTag<uint64_t>;
using Granule64 = hn::CappedTag<uint64_t, 2>;  // at most 16 bytes, of which a row is a multiple

// Chains per loop: two units of latency 4 or 5 need 8 to 10 independent ones, and 12 leave
// registers for the factor and the addend where there are 16.
constexpr int kChains = 12;

float fma_chains(int64_t iterations, int64_t* num_flops) {
  const F32 d;
  // x -> x / 2 + 1 stays near 2. The values come from memory that the compiler cannot see through.
  volatile float factor_source = 0.5f;
  volatile float addend_source = 1.0f;
  const auto factor = hn::Set(d, factor_source);
  const auto addend = hn::Set(d, addend_source);
  auto x0 = hn::Set(d, 0.0f), x1 = hn::Set(d, 1.0f), x2 = hn::Set(d, 2.0f);
  auto x3 = hn::Set(d, 3.0f), x4 = hn::Set(d, 4.0f), x5 = hn::Set(d, 5.0f);
  auto x6 = hn::Set(d, 6.0f), x7 = hn::Set(d, 7.0f), x8 = hn::Set(d, 8.0f);
  auto x9 = hn::Set(d, 9.0f), x10 = hn::Set(d, 10.0f), x11 = hn::Set(d, 11.0f);
  for (int64_t i = 0; i < iterations; ++i) {
    x0 = hn::MulAdd(x0, factor, addend);
    x1 = hn::MulAdd(x1, factor, addend);
    x2 = hn::MulAdd(x2, factor, addend);
    x3 = hn::MulAdd(x3, factor, addend);
    x4 = hn::MulAdd(x4, factor, addend);
    x5 = hn::MulAdd(x5, factor, addend);
    x6 = hn::MulAdd(x6, factor, addend);
    x7 = hn::MulAdd(x7, factor, addend);
    x8 = hn::MulAdd(x8, factor, addend);
    x9 = hn::MulAdd(x9, factor, addend);
    x10 = hn::MulAdd(x10, factor, addend);
    x11 = hn::MulAdd(x11, factor, addend);
  }
  const auto low = hn::Add(hn::Add(hn::Add(x0, x1), hn::Add(x2, x3)), hn::Add(x4, x5));
  const auto high = hn::Add(hn::Add(hn::Add(x6, x7), hn::Add(x8, x9)), hn::Add(x10, x11));
  *num_flops = iterations * kChains * static_cast<int64_t>(hn::Lanes(d)) * 2;
  return hn::GetLane(hn::Add(low, high));
}

uint64_t read_all(const uint8_t* data, int64_t bytes) {
  const U64 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* words = reinterpret_cast<const uint64_t*>(data);
  auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  for (int64_t i = 0; i < bytes / 8; i += 4 * lanes) {
    sum0 = hn::Add(sum0, hn::Load(d, words + i));
    sum1 = hn::Add(sum1, hn::Load(d, words + i + lanes));
    sum2 = hn::Add(sum2, hn::Load(d, words + i + 2 * lanes));
    sum3 = hn::Add(sum3, hn::Load(d, words + i + 3 * lanes));
  }
  return hn::GetLane(hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3)));
}

void copy_all(const uint8_t* from, uint8_t* to, int64_t bytes) {
  const U64 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* source = reinterpret_cast<const uint64_t*>(from);
  auto* target = reinterpret_cast<uint64_t*>(to);
  for (int64_t i = 0; i < bytes / 8; i += 2 * lanes) {
    const auto first = hn::Load(d, source + i);
    const auto second = hn::Load(d, source + i + lanes);
    hn::Stream(first, d, target + i);
    hn::Stream(second, d, target + i + lanes);
  }
  hwy::FlushStream();
}

HWY_INLINE uint64_t read_row(const uint64_t* words, int64_t num_words) {
  const U64 d;
  const Granule64 d_tail;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto tail_lanes = static_cast<int64_t>(hn::Lanes(d_tail));
  auto sum0 = hn::Zero(d), sum1 = sum0;
  auto tail = hn::Zero(d_tail);
  int64_t i = 0;
  for (; i + 2 * lanes <= num_words; i += 2 * lanes) {
    sum0 = hn::Add(sum0, hn::LoadU(d, words + i));
    sum1 = hn::Add(sum1, hn::LoadU(d, words + i + lanes));
  }
  for (; i < num_words; i += tail_lanes) tail = hn::Add(tail, hn::LoadU(d_tail, words + i));
  return hn::GetLane(hn::Add(sum0, sum1)) + hn::GetLane(tail);
}

uint64_t gather_rows(const uint8_t* pool, int64_t row_bytes, const int32_t* rows, int64_t num_rows,
                     int64_t rows_ahead) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    if (rows_ahead > 0 && i + rows_ahead < num_rows) {
      const uint8_t* next = pool + rows[i + rows_ahead] * row_bytes;
      for (int64_t byte = 0; byte < row_bytes; byte += 64) hwy::Prefetch(next + byte);
    }
    sum += read_row(reinterpret_cast<const uint64_t*>(pool + rows[i] * row_bytes), row_bytes / 8);
  }
  return sum;
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(fma_chains);
HWY_EXPORT(read_all);
HWY_EXPORT(copy_all);
HWY_EXPORT(gather_rows);

float run_fma_chains(int64_t iterations, int64_t* num_flops) {
  return HWY_DYNAMIC_DISPATCH(fma_chains)(iterations, num_flops);
}

uint64_t read_stream(const uint8_t* data, int64_t bytes) {
  return HWY_DYNAMIC_DISPATCH(read_all)(data, bytes);
}

void copy_stream(const uint8_t* from, uint8_t* to, int64_t bytes) {
  HWY_DYNAMIC_DISPATCH(copy_all)(from, to, bytes);
}

uint64_t read_rows(const uint8_t* pool, int64_t row_bytes, const int32_t* rows, int64_t num_rows,
                   int64_t rows_ahead) {
  return HWY_DYNAMIC_DISPATCH(gather_rows)(pool, row_bytes, rows, num_rows, rows_ahead);
}

#if HWY_ARCH_X86
// 16 lanes of two products each; 12 chains as above.
__attribute__((target("avx512f,avx512bf16"))) float run_bf16_dots(int64_t iterations,
                                                                  int64_t* num_flops) {
  constexpr int kDotChains = 12;
  volatile int ones_source = 0x3F803F80;  // two bf16 ones
  const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(ones_source));
  __m512 x[kDotChains];
  for (int c = 0; c < kDotChains; ++c) x[c] = _mm512_set1_ps(static_cast<float>(c));
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kDotChains; ++c) x[c] = _mm512_dpbf16_ps(x[c], ones, ones);
  }
  for (int c = 1; c < kDotChains; ++c) x[0] = _mm512_add_ps(x[0], x[c]);
  *num_flops = iterations * kDotChains * 16 * 2 * 2;
  return _mm512_cvtss_f32(x[0]);
}
#else
float run_bf16_dots(int64_t, int64_t* num_flops) {
  *num_flops = 0;
  return 0;
}
#endif

}  // namespace fovea::internal
#endif
