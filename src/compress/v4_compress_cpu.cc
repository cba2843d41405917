#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/compress/v4_compress_cpu.cc"
#include "src/core/simd.h"
// These need the helpers of simd.h.
#include "src/core/fp8_tile_simd.h"
#include "src/core/simd_math.h"
// This needs fp8_tile_simd.h.
#include "src/core/v4_row_simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/compress/v4_compress_impl.h"
#include "src/core/parallel.h"

// Every completed row is a task of its own: it takes the tokens of its groups from the call or from
// the state. Channels lie in the lanes of vectors; tokens are added in the order of their
// positions, wherever they come from, so that the cut of a prompt into calls changes no bit. State
// is written in a second loop, when all rows are done.

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// Rows of a task: one in r of them completes a group.
constexpr int64_t kTaskRows = 32;

HWY_INLINE hn::Vec<F32> load_logit(F32 d, const CompressTerm& term, int64_t i) {
  const auto logit = hn::LoadU(d, term.logit + i);
  return term.ape != nullptr ? hn::Add(logit, hn::LoadU(d, term.ape + i)) : logit;
}

// While all logits are -inf, 0 is subtracted: -inf minus -inf would be NaN.
HWY_INLINE hn::Vec<F32> base_of(F32 d, hn::Vec<F32> largest) {
  const auto neg_inf = hn::Set(d, -std::numeric_limits<float>::infinity());
  return hn::IfThenElse(hn::Eq(largest, neg_inf), hn::Zero(d), largest);
}

// value / sum, 0 where no token has any weight.
HWY_INLINE hn::Vec<F32> quotient(F32 d, hn::Vec<F32> value, hn::Vec<F32> sum) {
  return hn::IfThenElse(hn::Eq(sum, hn::Zero(d)), hn::Zero(d), hn::Div(value, sum));
}

void stored_row(const CompressView& view, const CompressToken& token, int64_t row, float* e) {
  const F32 d;
  CompressTerm terms[128];
  const int64_t count = view.stored_terms(token, row, terms);
  for (int64_t i = 0; i < view.dim; i += static_cast<int64_t>(hn::Lanes(d))) {
    auto largest = hn::Set(d, -std::numeric_limits<float>::infinity());
    // A NaN logit needs no care: its weight is NaN, whatever became of the maximum.
    for (int64_t k = 0; k < count; ++k) largest = hn::Max(largest, load_logit(d, terms[k], i));
    const auto base = base_of(d, largest);
    auto sum = hn::Zero(d);
    auto value = hn::Zero(d);
    for (int64_t k = 0; k < count; ++k) {
      const auto weight = exp_f32(d, hn::Sub(load_logit(d, terms[k], i), base));
      sum = hn::Add(sum, weight);
      value = hn::MulAdd(weight, hn::LoadU(d, terms[k].value + i), value);
    }
    hn::Store(quotient(d, value, sum), d, e + i);
  }
}

// (m, l, a) of a group, [3][d].
struct OnlineSums {
  HWY_ALIGN float m[kMaxCompressDim];
  HWY_ALIGN float l[kMaxCompressDim];
  HWY_ALIGN float a[kMaxCompressDim];
};

// Of the group of the token in row `row`, up to that token.
void online_sums(const CompressView& view, const CompressToken& token, int64_t row,
                 OnlineSums* sums) {
  const F32 d;
  const int64_t span = token.position % view.ratio + 1;
  const int64_t here = view.tokens_here(token, row, span);
  CompressTerm terms[128];
  for (int64_t k = 0; k < here; ++k) terms[k] = view.term(token, row, here, here - 1 - k, 0);
  for (int64_t i = 0; i < view.dim; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto load = [&](int64_t part, float fresh) {
      return here < span ? hn::LoadU(d, view.online.row(token.state, part) + i) : hn::Set(d, fresh);
    };
    auto m = load(0, -std::numeric_limits<float>::infinity());
    auto l = load(1, 0.0f);
    auto a = load(2, 0.0f);
    for (int64_t k = 0; k < here; ++k) {
      const auto u = load_logit(d, terms[k], i);
      const auto largest = hn::Max(m, u);
      const auto base = base_of(d, largest);
      const auto keep = exp_f32(d, hn::Sub(m, base));
      const auto weight = exp_f32(d, hn::Sub(u, base));
      l = hn::MulAdd(l, keep, weight);
      a = hn::MulAdd(weight, hn::LoadU(d, terms[k].value + i), hn::Mul(a, keep));
      m = largest;
    }
    hn::Store(m, d, sums->m + i);
    hn::Store(l, d, sums->l + i);
    hn::Store(a, d, sums->a + i);
  }
}

void online_row(const CompressView& view, const CompressToken& token, int64_t row, float* e) {
  const F32 d;
  OnlineSums sums;
  online_sums(view, token, row, &sums);
  for (int64_t i = 0; i < view.dim; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::Store(quotient(d, hn::Load(d, sums.a + i), hn::Load(d, sums.l + i)), d, e + i);
}

// RMSNorm, rope, one rounding to bf16. The sum of squares adds lanes first, then across them.
void finish_row(const V4CompressProblem& problem, const CompressView& view,
                const CompressToken& token, const float* norm_weight, float* e, bf16_t* out) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto squares = hn::Zero(d);
  for (int64_t i = 0; i < view.dim; i += lanes) {
    const auto x = hn::Load(d, e + i);
    squares = hn::MulAdd(x, x, squares);
  }
  const float mean = hn::GetLane(hn::SumOfLanes(d, squares)) / static_cast<float>(view.dim);
  const auto factor = hn::Set(d, 1.0f / std::sqrt(mean + problem.eps));
  for (int64_t i = 0; i < view.dim; i += lanes) {
    hn::Store(hn::Mul(hn::Mul(hn::Load(d, e + i), factor), hn::LoadU(d, norm_weight + i)), d,
              e + i);
  }
  const float* rotation = view.rotation(token);
  for (int64_t pair = 0; pair < kCompressRopeDim / 2; ++pair) {
    float* x = e + view.dim - kCompressRopeDim + 2 * pair;
    const float cosine = rotation[pair], sine = rotation[kCompressRopeDim / 2 + pair];
    const float turned = x[0] * cosine - x[1] * sine;
    x[1] = x[1] * cosine + x[0] * sine;
    x[0] = turned;
  }
  for (int64_t i = 0; i < view.dim; i += lanes)
    store_bf16(d, round_to_bf16(d, hn::Load(d, e + i)), out + i);
}

void pack(const V4CompressProblem& problem, const CompressView& view, int32_t slot,
          const bf16_t* x) {
  if (problem.row_format == RowFormat::kBf16) {
    std::memcpy(view.pool.record(slot, 2 * view.dim), x, static_cast<size_t>(2 * view.dim));
    return;
  }
  if (problem.row_format == RowFormat::kV4) {
    pack_v4_row_simd(x, view.pool.v4_data(slot), view.pool.v4_scales(slot));
    return;
  }
  const bf16_t* const from[] = {x};
  uint8_t* const to[] = {view.pool.i132_codes(slot, view.dim)};
  float scale[1];
  quantize_tiles_simd(from, view.dim, index_tile_scale, problem.scale_mode, to, scale);
  std::memcpy(view.pool.i132_scale(slot, view.dim), scale, sizeof(scale));
}

void complete_row(const V4CompressProblem& problem, const CompressView& view,
                  const float* norm_weight, int64_t row) {
  view.emitted(row) = -1;
  const CompressToken token = view.token(row);
  if (!token.valid() || !view.completes_group(token)) return;
  const int32_t slot = view.slot(token);
  if (slot < 0) return;
  HWY_ALIGN float e[kMaxCompressDim];
  HWY_ALIGN bf16_t rounded[kMaxCompressDim];
  if (view.ring > 0)
    stored_row(view, token, row, e);
  else
    online_row(view, token, row, e);
  finish_row(problem, view, token, norm_weight, e, rounded);
  pack(problem, view, slot, rounded);
  view.emitted(row) = slot;
}

void store_row(const CompressView& view, int64_t row) {
  const F32 d;
  const CompressToken token = view.token(row);
  if (!token.valid()) return;
  if (view.ring > 0) {
    if (!view.stays(token, row)) return;
    const int64_t entry = token.position % view.ring;
    const int64_t channels = view.groups * view.dim;
    const CompressTerm term = view.term(token, row, 1, 0, 0);
    std::copy_n(term.value, channels, view.stored.row(token.state, entry, 0));
    float* const logits = view.stored.row(token.state, entry, 1);
    for (int64_t i = 0; i < channels; i += static_cast<int64_t>(hn::Lanes(d)))
      hn::StoreU(load_logit(d, term, i), d, logits + i);
    return;
  }
  if (view.has_token(token, row, 1)) return;
  OnlineSums sums;
  if (view.completes_group(token)) {
    std::fill_n(sums.m, view.dim, -std::numeric_limits<float>::infinity());
    std::fill_n(sums.l, view.dim, 0.0f);
    std::fill_n(sums.a, view.dim, 0.0f);
  } else {
    online_sums(view, token, row, &sums);
  }
  std::copy_n(sums.m, view.dim, view.online.row(token.state, 0));
  std::copy_n(sums.l, view.dim, view.online.row(token.state, 1));
  std::copy_n(sums.a, view.dim, view.online.row(token.state, 2));
}

void v4_compress(const V4CompressProblem& problem, const Device& device,
                 const V4CompressTensors& tensors) {
  const CompressView view(problem, tensors);
  const auto* norm_weight = static_cast<const float*>(tensors.norm_weight.data);
  const ThreadScope threads(device.num_threads);
  ParallelFor(view.num_rows, kTaskRows, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) complete_row(problem, view, norm_weight, row);
  });
  ParallelFor(view.num_rows, kTaskRows, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) store_row(view, row);
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(v4_compress);

void v4_compress_cpu(const V4CompressProblem& problem, const Device& device,
                     const V4CompressTensors& tensors, Workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(v4_compress)(problem, device, tensors);
}

}  // namespace fovea::internal
#endif
