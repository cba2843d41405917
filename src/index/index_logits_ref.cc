#include <algorithm>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/index/index_logits_impl.h"
#include "src/index/index_page.h"

namespace fovea::internal {
namespace {

// One key: its codes and scale, or "not held" (its page is outside the pool).
struct Key {
  const uint8_t* codes = nullptr;
  double scale = 0;
};

// k_scale * sum_h head_weight[h] * max(0, <q[h], k>); NaN wherever a NaN takes part.
double logit(const IndexLogitsProblem& problem, const Accessor<const uint8_t, 3>& q_fp8,
             const Accessor<const float, 2>& head_weight, int64_t t, const Key& key) {
  double sum = 0;
  for (int64_t h = 0; h < problem.num_heads; ++h) {
    double dot = 0;
    for (int64_t d = 0; d < problem.head_dim; ++d) {
      dot += static_cast<double>(e4m3_to_float(q_fp8(t, h, d))) *
             static_cast<double>(e4m3_to_float(key.codes[d]));
    }
    sum += static_cast<double>(head_weight(t, h)) * (dot < 0 ? 0 : dot);
  }
  return key.scale * sum;
}

// Calls key_at(position) for the row's keys; column = position - first.
template <class KeyAt>
void score_row(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors, int64_t t,
               int64_t first, int64_t end, KeyAt key_at) {
  const auto q_fp8 = access<const uint8_t, 3>(tensors.q_fp8);
  const auto head_weight = access<const float, 2>(tensors.head_weight);
  const auto logits = access<float, 2>(tensors.logits);
  for (int64_t j = first; j < std::min(end, first + logits.shape[1]); ++j) {
    const Key key = key_at(j);
    logits(t, j - first) = key.codes != nullptr
                               ? static_cast<float>(logit(problem, q_fp8, head_weight, t, key))
                               : -std::numeric_limits<float>::infinity();
  }
}

void score_ragged(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors) {
  const auto k_fp8 = access<const uint8_t, 2>(tensors.k_fp8);
  const auto k_scale = access<const float, 1>(tensors.k_scale);
  const auto k_start = access<const int32_t, 1>(tensors.k_start);
  const auto k_end = access<const int32_t, 1>(tensors.k_end);
  const int64_t num_keys = k_fp8.shape[0];
  for (int64_t t = 0; t < k_start.shape[0]; ++t) {
    score_row(problem, tensors, t, std::clamp<int64_t>(k_start(t), 0, num_keys),
              std::clamp<int64_t>(k_end(t), 0, num_keys), [&](int64_t j) {
                return Key{k_fp8.row(j), k_scale(j)};
              });
  }
}

void score_paged(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors) {
  const IndexPages<const uint8_t> pages(tensors.index_pool, problem.page_size, problem.head_dim);
  const auto page_table = access<const int32_t, 2>(tensors.page_table);
  const auto row_to_request = access<const int32_t, 1>(tensors.row_to_request);
  const auto row_len = access<const int32_t, 1>(tensors.row_len);
  for (int64_t t = 0; t < row_len.shape[0]; ++t) {
    const int64_t r = row_to_request(t);
    if (r < 0 || r >= page_table.shape[0]) continue;
    score_row(problem, tensors, t, 0, row_len(t), [&](int64_t j) {
      const int64_t column = j / problem.page_size;
      const int64_t offset = j % problem.page_size;
      const int64_t page = column < page_table.shape[1] ? page_table(r, column) : -1;
      if (!pages.holds(page)) return Key{};
      return Key{pages.codes(page, offset), load_scale(pages.scale(page, offset))};
    });
  }
}

}  // namespace

void index_logits_ref(const IndexLogitsProblem& problem, const Device&,
                      const IndexLogitsTensors& tensors, Workspace) {
  if (problem.layout == IndexLayout::kRagged)
    score_ragged(problem, tensors);
  else
    score_paged(problem, tensors);
}

}  // namespace fovea::internal
