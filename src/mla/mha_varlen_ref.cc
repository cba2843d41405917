#include <cmath>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/workspace.h"
#include "src/mla/mha_varlen_impl.h"

namespace fovea::internal {
namespace {

double dot(const bf16_t* a, const bf16_t* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(bf16_to_float(a[i])) * static_cast<double>(bf16_to_float(b[i]));
  }
  return sum;
}

}  // namespace

size_t mha_varlen_ref_workspace(const MhaVarlenProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<double>(problem.max_keys);
  return cutter.used_bytes();
}

// lse = ln sum_j exp(s_j),  out = sum_j exp(s_j - lse) * v_j, over the visible keys of each row.
void mha_varlen_ref(const MhaVarlenProblem& problem, const Device&, const MhaVarlenTensors& tensors,
                    Workspace workspace) {
  constexpr double kNegInf = -std::numeric_limits<double>::infinity();
  double* scores = WorkspaceCutter(workspace).take<double>(problem.max_keys);
  const auto q = access<const bf16_t, 3>(tensors.q);
  const auto k = access<const bf16_t, 3>(tensors.k);
  const auto v = access<const bf16_t, 3>(tensors.v);
  const auto out = access<bf16_t, 3>(tensors.out);
  const auto lse = access<float, 2>(tensors.lse);
  RequestRanges row_ranges(static_cast<const int32_t*>(tensors.q_indptr.data), out.shape[0]);
  RequestRanges key_ranges(static_cast<const int32_t*>(tensors.kv_indptr.data), k.shape[0]);
  for (int64_t r = 0; r + 1 < tensors.q_indptr.shape[0]; ++r) {
    const RequestRange rows = row_ranges.next();
    const RequestRange keys = key_ranges.next();
    for (int64_t i = 0; i < rows.count(); ++i) {
      const int64_t visible = visible_keys(problem.causal, i, rows.count(), keys.count());
      const int64_t t = rows.begin + i;
      for (int64_t h = 0; h < problem.num_heads; ++h) {
        double largest = kNegInf;
        for (int64_t j = 0; j < visible; ++j) {
          scores[j] = static_cast<double>(problem.softmax_scale) *
                      dot(q.row(t, h), k.row(keys.begin + j, h), problem.head_dim_qk);
          if (!(scores[j] <= largest)) largest = scores[j];  // a NaN score becomes the largest
        }
        const bool empty = largest == kNegInf;
        double sum = 0;
        for (int64_t j = 0; j < visible && !empty; ++j) sum += std::exp(scores[j] - largest);
        const double log_sum = empty ? kNegInf : largest + std::log(sum);
        lse(t, h) = static_cast<float>(log_sum);
        for (int64_t d = 0; d < problem.head_dim_v; ++d) {
          double value = 0;
          for (int64_t j = 0; j < visible && !empty; ++j) {
            value += std::exp(scores[j] - log_sum) *
                     static_cast<double>(bf16_to_float(v(keys.begin + j, h, d)));
          }
          out(t, h, d) = bf16_from_float(static_cast<float>(value));
        }
      }
    }
  }
}

}  // namespace fovea::internal
