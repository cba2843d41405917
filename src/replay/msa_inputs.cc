#include "src/replay/msa_inputs.h"

#include <vector>

#include "src/core/tensor_generator.h"

namespace fovea::internal {
namespace {

// Weights of the target's key in q and index q: powers of two. A logit of the target is about 8
// above the others, so that it has a good part of the softmax, and its block the largest score.
constexpr float kMsaQueryFactor = 2.0f;
constexpr float kMsaIndexQueryFactor = 1.0f;

}  // namespace

void MsaInputs::key(int64_t layer, uint64_t token_id, std::span<bf16_t> k) const {
  generate_noise({seed_, token_id, layer, TensorKind::kMsaK}, k);
}

void MsaInputs::value(int64_t layer, uint64_t token_id, std::span<bf16_t> v) const {
  generate_noise({seed_, token_id, layer, TensorKind::kMsaV}, v);
}

void MsaInputs::index_key(int64_t layer, uint64_t token_id, std::span<bf16_t> index_k) const {
  generate_noise({seed_, token_id, layer, TensorKind::kIndexK}, index_k);
}

uint64_t MsaInputs::target(int64_t layer, const RowToken& row, int64_t g) const {
  return workload_.token_id(row.request, target_position(seed_, layer, row, g % kTargets));
}

void MsaInputs::query(int64_t layer, const RowToken& row, std::span<bf16_t> q) const {
  const TensorStream stream{seed_, row.token_id, layer, TensorKind::kQ};
  const int64_t dim = shape_.head_dim, group = num_heads_ / num_kv_heads_;
  std::vector<bf16_t> keys(static_cast<size_t>(num_kv_heads_ * dim));
  for (int64_t g = 0; g < num_kv_heads_; ++g) {
    key(layer, target(layer, row, g), keys);
    const auto own =
        std::span(keys).subspan(static_cast<size_t>(g * dim), static_cast<size_t>(dim));
    const int64_t first = g * group * dim;
    generate_noise_around(stream, {own, kMsaQueryFactor, first},
                          q.subspan(static_cast<size_t>(first), static_cast<size_t>(group * dim)));
  }
}

void MsaInputs::index_query(int64_t layer, const RowToken& row, std::span<bf16_t> index_q) const {
  const TensorStream stream{seed_, row.token_id, layer, TensorKind::kIndexQ};
  const int64_t dim = shape_.index_dim;
  std::vector<bf16_t> pointed_to(static_cast<size_t>(dim));
  for (int64_t g = 0; g < num_kv_heads_; ++g) {
    index_key(layer, target(layer, row, g), pointed_to);
    generate_noise_around(stream, {pointed_to, kMsaIndexQueryFactor, g * dim},
                          index_q.subspan(static_cast<size_t>(g * dim), pointed_to.size()));
  }
}

}  // namespace fovea::internal
