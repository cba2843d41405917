#include "src/replay/dsa_inputs.h"

#include <algorithm>
#include <array>

#include "src/core/tensor_generator.h"

namespace fovea::internal {
void DsaInputs::latent_key(int64_t layer, uint64_t token_id, std::span<bf16_t> k) const {
  generate_noise({seed_, token_id, layer, TensorKind::kLatentK}, k);
}

void DsaInputs::index_key(int64_t layer, uint64_t token_id, std::span<bf16_t> index_k) const {
  generate_noise({seed_, token_id, layer, TensorKind::kIndexK}, index_k);
}

void DsaInputs::query(int64_t layer, const RowToken& row, std::span<bf16_t> q) const {
  const TensorStream stream{seed_, row.token_id, layer, TensorKind::kQ};
  std::array<bf16_t, kDsaRowWidth> key;
  const auto width = static_cast<int64_t>(key.size());
  for (int64_t group = 0; group < std::min(kTargets, num_heads_); ++group) {
    const int64_t pointed_to = target_position(seed_, layer, row, group);
    latent_key(layer, workload_.token_id(row.request, pointed_to), key);
    for (int64_t h = group; h < num_heads_; h += kTargets) {
      generate_noise_around(stream, {key, kQueryFactor, h * width},
                            q.subspan(static_cast<size_t>(h * width), key.size()));
    }
  }
}

void DsaInputs::index_query(int64_t layer, const RowToken& row, std::span<bf16_t> index_q) const {
  const TensorStream stream{seed_, row.token_id, layer, TensorKind::kIndexQ};
  std::array<bf16_t, kDsaRowWidth> storage;
  const auto key = std::span(storage).first(static_cast<size_t>(shape_.index_dim));
  for (int64_t group = 0; group < std::min(kTargets, shape_.index_heads); ++group) {
    const int64_t pointed_to = target_position(seed_, layer, row, group);
    index_key(layer, workload_.token_id(row.request, pointed_to), key);
    for (int64_t h = group; h < shape_.index_heads; h += kTargets) {
      generate_noise_around(stream, {key, kIndexQueryFactor, h * shape_.index_dim},
                            index_q.subspan(static_cast<size_t>(h * shape_.index_dim), key.size()));
    }
  }
}

void DsaInputs::head_gate(int64_t layer, uint64_t token_id, std::span<float> gate) const {
  generate_noise({seed_, token_id, layer, TensorKind::kHeadGate}, gate);
  for (float& value : gate) value += 0.75f;
}

void DsaInputs::norm(int64_t layer, std::span<float> weight, std::span<float> bias) const {
  generate_noise({seed_, 0, layer, TensorKind::kNormWeight}, weight);
  generate_noise({seed_, 0, layer, TensorKind::kNormBias}, bias);
  for (float& value : weight) value = 1.0f + value * 0.125f;
  for (float& value : bias) value *= 0.125f;
}

}  // namespace fovea::internal
