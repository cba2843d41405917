#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "fovea/numeric.h"
#include "src/compress/v4_compress_impl.h"
#include "src/core/fp8_tile.h"
#include "src/core/v4_row.h"

namespace fovea::internal {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// u of a term: ape is added in fp32, as the state holds the sum.
float logit_of(const CompressTerm& term, int64_t i) {
  return term.ape != nullptr ? term.logit[i] + term.ape[i] : term.logit[i];
}

// e of the group that a token completes, from tokens kept one by one:
//   e[i] = sum_t softmax_t(u_t[i]) * value_t[i].
void stored_row(const CompressView& view, const CompressToken& token, int64_t row, double* e) {
  CompressTerm terms[128];
  const int64_t count = view.stored_terms(token, row, terms);
  for (int64_t i = 0; i < view.dim; ++i) {
    double largest = kNegInf;
    for (int64_t k = 0; k < count; ++k) {
      const double u = logit_of(terms[k], i);
      if (!(u <= largest)) largest = u;  // a NaN becomes the largest
    }
    double sum = 0, value = 0;
    for (int64_t k = 0; k < count && largest != kNegInf; ++k) {
      const double weight = std::exp(logit_of(terms[k], i) - largest);
      sum += weight;
      value += weight * terms[k].value[i];
    }
    e[i] = sum == 0 ? 0 : value / sum;
  }
}

// (m, l, a) of one channel after a token more, each rounded to what the state holds.
void add_token(float u, float value, float* m, float* l, float* a) {
  const double largest = u > *m || std::isnan(u) ? u : *m;
  const double base = largest == kNegInf ? 0 : largest;
  const double keep = std::exp(*m - base), weight = std::exp(u - base);
  *l = static_cast<float>(*l * keep + weight);
  *a = static_cast<float>(*a * keep + weight * value);
  *m = static_cast<float>(largest);
}

// (m, l, a) of the group of the token in row `row`, up to that token; channels [dim] each.
void online_sums(const CompressView& view, const CompressToken& token, int64_t row, float* m,
                 float* l, float* a) {
  const int64_t span = token.position % view.ratio + 1;
  const int64_t here = view.tokens_here(token, row, span);
  for (int64_t i = 0; i < view.dim; ++i) {
    const bool continued = here < span;
    m[i] = continued ? view.online(token.state, 0, i) : -std::numeric_limits<float>::infinity();
    l[i] = continued ? view.online(token.state, 1, i) : 0.0f;
    a[i] = continued ? view.online(token.state, 2, i) : 0.0f;
    for (int64_t back = here - 1; back >= 0; --back) {
      const CompressTerm term = view.term(token, row, here, back, 0);
      add_token(logit_of(term, i), term.value[i], &m[i], &l[i], &a[i]);
    }
  }
}

void online_row(const CompressView& view, const CompressToken& token, int64_t row, double* e) {
  float m[kMaxCompressDim], l[kMaxCompressDim], a[kMaxCompressDim];
  online_sums(view, token, row, m, l, a);
  for (int64_t i = 0; i < view.dim; ++i)
    e[i] = l[i] == 0 ? 0 : static_cast<double>(a[i]) / static_cast<double>(l[i]);
}

// RMSNorm, rope, one rounding to bf16.
void finish_row(const V4CompressProblem& problem, const CompressView& view,
                const CompressToken& token, const float* norm_weight, double* e, bf16_t* out) {
  double squares = 0;
  for (int64_t i = 0; i < view.dim; ++i) squares += e[i] * e[i];
  const double rms =
      std::sqrt(squares / static_cast<double>(view.dim) + static_cast<double>(problem.eps));
  for (int64_t i = 0; i < view.dim; ++i) e[i] = e[i] / rms * static_cast<double>(norm_weight[i]);
  const float* rotation = view.rotation(token);
  for (int64_t pair = 0; pair < kCompressRopeDim / 2; ++pair) {
    double* x = e + view.dim - kCompressRopeDim + 2 * pair;
    const double cosine = rotation[pair], sine = rotation[kCompressRopeDim / 2 + pair];
    const double turned = x[0] * cosine - x[1] * sine;
    x[1] = x[1] * cosine + x[0] * sine;
    x[0] = turned;
  }
  for (int64_t i = 0; i < view.dim; ++i) out[i] = bf16_from_float(static_cast<float>(e[i]));
}

void pack(const V4CompressProblem& problem, const CompressView& view, int32_t slot,
          const bf16_t* x) {
  if (problem.row_format == RowFormat::kBf16) {
    std::memcpy(view.pool.record(slot, 2 * view.dim), x, static_cast<size_t>(2 * view.dim));
    return;
  }
  if (problem.row_format == RowFormat::kV4) {
    pack_v4_row(x, view.pool.v4_data(slot), view.pool.v4_scales(slot));
    return;
  }
  const float scale = quantize_tile(x, view.dim, index_tile_scale, problem.scale_mode,
                                    view.pool.i132_codes(slot, view.dim));
  std::memcpy(view.pool.i132_scale(slot, view.dim), &scale, sizeof(scale));
}

// Ring entry t mod S takes token t, unless a later one of this call does.
void store_token(const CompressView& view, const CompressToken& token, int64_t row) {
  if (!view.stays(token, row)) return;
  const int64_t entry = token.position % view.ring;
  const CompressTerm term = view.term(token, row, 1, 0, 0);
  for (int64_t i = 0; i < view.groups * view.dim; ++i) {
    view.stored(token.state, entry, 0, i) = term.value[i];
    view.stored(token.state, entry, 1, i) = logit_of(term, i);
  }
}

// What the last token of a request leaves.
void store_online(const CompressView& view, const CompressToken& token, int64_t row) {
  if (view.has_token(token, row, 1)) return;
  float sums[3][kMaxCompressDim];
  if (view.completes_group(token)) {
    std::fill_n(sums[0], view.dim, -std::numeric_limits<float>::infinity());
    std::fill_n(sums[1], view.dim, 0.0f);
    std::fill_n(sums[2], view.dim, 0.0f);
  } else {
    online_sums(view, token, row, sums[0], sums[1], sums[2]);
  }
  for (int64_t part = 0; part < 3; ++part)
    std::copy_n(sums[part], view.dim, view.online.row(token.state, part));
}

}  // namespace

void v4_compress_ref(const V4CompressProblem& problem, const Device&,
                     const V4CompressTensors& tensors, Workspace) {
  const CompressView view(problem, tensors);
  const auto* norm_weight = static_cast<const float*>(tensors.norm_weight.data);
  double e[kMaxCompressDim];
  bf16_t packed[kMaxCompressDim];
  for (int64_t row = 0; row < view.num_rows; ++row) {
    view.emitted(row) = -1;
    const CompressToken token = view.token(row);
    if (!token.valid() || !view.completes_group(token)) continue;
    const int32_t slot = view.slot(token);
    if (slot < 0) continue;
    if (view.ring > 0)
      stored_row(view, token, row, e);
    else
      online_row(view, token, row, e);
    finish_row(problem, view, token, norm_weight, e, packed);
    pack(problem, view, slot, packed);
    view.emitted(row) = slot;
  }
  // Only now: rows above read what the state was.
  for (int64_t row = 0; row < view.num_rows; ++row) {
    const CompressToken token = view.token(row);
    if (!token.valid()) continue;
    if (view.ring > 0)
      store_token(view, token, row);
    else
      store_online(view, token, row);
  }
}

}  // namespace fovea::internal
