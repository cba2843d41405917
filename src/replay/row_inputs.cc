#include "src/replay/row_inputs.h"

#include <algorithm>
#include <array>

#include "src/core/tensor_generator.h"
#include "src/replay/hash.h"

namespace fovea::internal {
namespace {

constexpr int64_t kMaxRowWidth = 576;

}  // namespace

void RowInputs::latent_key(int64_t layer, uint64_t token_id, std::span<bf16_t> k) const {
  generate_noise({seed_, token_id, layer, TensorKind::kLatentK}, k);
}

void RowInputs::index_key(int64_t layer, uint64_t token_id, std::span<bf16_t> index_k) const {
  generate_noise({seed_, token_id, layer, TensorKind::kIndexK}, index_k);
}

int64_t RowInputs::target(int64_t layer, uint64_t token_id, int64_t position, int64_t group) const {
  return scale_to(hash_in(HashDomain::kTarget, seed_, layer, token_id, position, group),
                  std::max<int64_t>(position, 1));
}

void RowInputs::query(int64_t layer, const RowToken& row, std::span<bf16_t> q) const {
  const TensorStream stream{seed_, row.token_id, layer, TensorKind::kQ};
  std::array<bf16_t, kMaxRowWidth> key;
  const auto width = static_cast<int64_t>(key.size());
  for (int64_t group = 0; group < std::min(kTargets, num_heads_); ++group) {
    const int64_t pointed_to = target(layer, row.token_id, row.position, group);
    latent_key(layer, workload_.token_id(row.request, pointed_to), key);
    for (int64_t h = group; h < num_heads_; h += kTargets) {
      generate_noise_around(stream, {key, kQueryFactor, h * width},
                            q.subspan(static_cast<size_t>(h * width), key.size()));
    }
  }
}

void RowInputs::index_query(int64_t layer, const RowToken& row, std::span<bf16_t> index_q) const {
  const TensorStream stream{seed_, row.token_id, layer, TensorKind::kIndexQ};
  std::array<bf16_t, kMaxRowWidth> storage;
  const auto key = std::span(storage).first(static_cast<size_t>(model_.index_dim));
  for (int64_t group = 0; group < std::min(kTargets, model_.index_heads); ++group) {
    const int64_t pointed_to = target(layer, row.token_id, row.position, group);
    index_key(layer, workload_.token_id(row.request, pointed_to), key);
    for (int64_t h = group; h < model_.index_heads; h += kTargets) {
      generate_noise_around(stream, {key, kIndexQueryFactor, h * model_.index_dim},
                            index_q.subspan(static_cast<size_t>(h * model_.index_dim), key.size()));
    }
  }
}

void RowInputs::head_gate(int64_t layer, uint64_t token_id, std::span<float> gate) const {
  generate_noise({seed_, token_id, layer, TensorKind::kHeadGate}, gate);
  for (float& value : gate) value += 0.75f;
}

void RowInputs::norm(int64_t layer, std::span<float> weight, std::span<float> bias) const {
  generate_noise({seed_, 0, layer, TensorKind::kNormWeight}, weight);
  generate_noise({seed_, 0, layer, TensorKind::kNormBias}, bias);
  for (float& value : weight) value = 1.0f + value * 0.125f;
  for (float& value : bias) value *= 0.125f;
}

}  // namespace fovea::internal
