#include <algorithm>
#include <cmath>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/workspace.h"
#include "src/msa/msa_index_impl.h"

namespace fovea::internal {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

double dot(const bf16_t* a, const bf16_t* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(bf16_to_float(a[i])) * static_cast<double>(bf16_to_float(b[i]));
  }
  return sum;
}

}  // namespace

// max: the largest product over the visible tokens of the block. lse: ln sum exp of them.
float msa_block_score_ref(const MsaBlockScoresProblem& problem, const MsaIndexKeys& keys,
                          const bf16_t* iq, const MsaRow& row, int64_t n, double* products) {
  const int64_t visible = msa_visible_tokens(row, n, problem.block_size, /*causal=*/true);
  if (visible == 0) return static_cast<float>(kNegInf);
  const int64_t slot = keys.first_slot(row.request, n);
  if (slot < 0) return static_cast<float>(kNegInf);
  double largest = kNegInf;
  bool has_nan = false;
  for (int64_t j = 0; j < visible; ++j) {
    products[j] = static_cast<double>(problem.index_scale) *
                  dot(iq, keys.index_k.row(slot + j, 0), problem.head_dim);
    has_nan = has_nan || std::isnan(products[j]);
    largest = std::max(largest, products[j]);
  }
  if (has_nan) return std::numeric_limits<float>::quiet_NaN();
  if (problem.score == BlockScore::kMax || std::isinf(largest)) return static_cast<float>(largest);
  double sum = 0;
  for (int64_t j = 0; j < visible; ++j) sum += std::exp(products[j] - largest);
  return static_cast<float>(largest + std::log(sum));
}

size_t msa_block_scores_ref_workspace(const MsaBlockScoresProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<MsaRow>(problem.max_rows);
  cutter.take<double>(problem.block_size);
  return cutter.used_bytes();
}

void msa_block_scores_ref(const MsaBlockScoresProblem& problem, const Device&,
                          const MsaBlockScoresTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  auto* rows = cutter.take<MsaRow>(problem.max_rows);
  auto* products = cutter.take<double>(problem.block_size);
  const auto iq = access<const bf16_t, 3>(tensors.iq);
  const auto scores = access<float, 3>(tensors.scores);
  const MsaIndexKeys keys{access<const bf16_t, 3>(tensors.index_k),
                          access<const int32_t, 2>(tensors.page_table), problem.block_size};
  read_msa_rows(msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset, iq.shape[0],
                          scores.shape[2], problem.block_size),
                rows);
  for (int64_t h = 0; h < problem.num_heads; ++h) {
    for (int64_t t = 0; t < iq.shape[0]; ++t) {
      for (int64_t n = 0; n < scores.shape[2]; ++n) {
        scores(h, t, n) = rows[t].is_empty() ? static_cast<float>(kNegInf)
                                             : msa_block_score_ref(problem, keys, iq.row(t, h),
                                                                   rows[t], n, products);
      }
    }
  }
}

}  // namespace fovea::internal
