#include <cmath>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/workspace.h"
#include "src/mla/dense_mla_impl.h"

namespace fovea::internal {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// What one query row sees.
struct VisibleKeys {
  const DenseMlaKeys& keys;
  int64_t request;
  int64_t kv_head;
  int64_t count;  // keys 0 .. count - 1, except those of pages outside the pool

  const uint8_t* row(int64_t j) const { return keys.row(request, kv_head, j); }
  double value(const uint8_t* row, int64_t d) const { return decode_channel(keys.format, row, d); }
};

// One (row, head): lse = ln sum_j exp(s_j),  out = sum_j exp(s_j - lse) * k_j[0:512].
template <class Query>
void attend(const DenseMlaProblem& problem, const Query& q_at, const VisibleKeys& visible,
            double* scores, bf16_t* out, float* lse) {
  double largest = kNegInf;
  for (int64_t j = 0; j < visible.count; ++j) {
    const uint8_t* row = visible.row(j);
    if (row == nullptr) continue;
    double dot = 0;
    for (int64_t d = 0; d < problem.head_dim_qk; ++d) dot += q_at(d) * visible.value(row, d);
    scores[j] = logit_scale(problem) * dot;
    if (!(scores[j] <= largest)) largest = scores[j];  // a NaN score becomes the largest
  }
  double sum = 0;
  double values[kLatentDim] = {};
  for (int64_t j = 0; j < visible.count && largest != kNegInf; ++j) {
    const uint8_t* row = visible.row(j);
    if (row == nullptr) continue;
    const double weight = std::exp(scores[j] - largest);
    sum += weight;
    for (int64_t d = 0; d < kLatentDim; ++d) values[d] += weight * visible.value(row, d);
  }
  const bool empty = largest == kNegInf;
  *lse = static_cast<float>(empty ? kNegInf : largest + std::log(sum));
  for (int64_t d = 0; d < kLatentDim; ++d) {
    // V is the latent part of K, hence of the same scale.
    const double value = empty ? 0.0 : problem.k_scale * values[d] / sum;
    out[d] = bf16_from_float(static_cast<float>(value));
  }
}

}  // namespace

size_t dense_mla_ref_workspace(const DenseMlaProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<double>(max_keys(problem));
  return cutter.used_bytes();
}

void dense_mla_ref(const DenseMlaProblem& problem, const Device&, const DenseMlaTensors& tensors,
                   Workspace workspace) {
  double* scores = WorkspaceCutter(workspace).take<double>(max_keys(problem));
  const DenseMlaKeys keys = dense_mla_keys(problem, tensors);
  const bool q_is_fp8 = tensors.q.dtype == DType::kU8;
  const auto q = access<const bf16_t, 3>(q_is_fp8 ? ConstTensorView{} : tensors.q);
  const auto q_codes = access<const uint8_t, 3>(q_is_fp8 ? tensors.q : ConstTensorView{});
  const auto out = access<bf16_t, 3>(tensors.out);
  const auto lse = access<float, 2>(tensors.lse);
  RequestRanges ranges(static_cast<const int32_t*>(tensors.q_indptr.data), out.shape[0]);
  for (int64_t r = 0; r < tensors.page_table.shape[0]; ++r) {
    const RequestRange rows = ranges.next();
    for (int64_t i = 0; i < rows.count(); ++i) {
      const int64_t t = rows.begin + i;
      const int64_t count = visible_keys(problem.causal, i, rows.count(), keys.length(r));
      for (int64_t h = 0; h < problem.num_heads; ++h) {
        const auto q_at = [&](int64_t d) {
          return static_cast<double>(q_is_fp8 ? e4m3_to_float(q_codes(t, h, d))
                                              : bf16_to_float(q(t, h, d)));
        };
        const VisibleKeys visible{keys, r, h / heads_per_kv(problem), count};
        attend(problem, q_at, visible, scores, out.row(t, h), &lse(t, h));
      }
    }
  }
}

}  // namespace fovea::internal
