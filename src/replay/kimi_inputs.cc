#include "src/replay/kimi_inputs.h"

#include <algorithm>
#include <array>

#include "src/core/tensor_generator.h"

namespace fovea::internal {
namespace {

// Weight of the key of the earlier position in q: a power of two.
constexpr float kKimiQueryFactor = 0.5f;

}  // namespace

void KimiInputs::qkv(int64_t layer, uint64_t token_id, std::span<bf16_t> qkv) const {
  generate_noise({seed_, token_id, layer, TensorKind::kKdaQkv}, qkv);
}

void KimiInputs::gate(int64_t layer, uint64_t token_id, std::span<bf16_t> g) const {
  generate_noise({seed_, token_id, layer, TensorKind::kKdaGate}, g);
}

void KimiInputs::beta(int64_t layer, uint64_t token_id, std::span<float> beta) const {
  generate_noise({seed_, token_id, layer, TensorKind::kKdaBeta}, beta);
}

void KimiInputs::weights(int64_t layer, const KimiLayerWeights& weights) const {
  generate_noise({seed_, 0, layer, TensorKind::kConvWeight}, weights.conv_weight);
  generate_noise({seed_, 0, layer, TensorKind::kConvBias}, weights.conv_bias);
  generate_noise({seed_, 0, layer, TensorKind::kALog}, weights.a_log);
  generate_noise({seed_, 0, layer, TensorKind::kDtBias}, weights.dt_bias);
  for (float& value : weights.a_log) value -= 3.0f;
}

void KimiInputs::latent_key(int64_t layer, uint64_t token_id, std::span<bf16_t> k) const {
  generate_noise({seed_, token_id, layer, TensorKind::kLatentK}, k);
}

void KimiInputs::query(int64_t layer, const RowToken& row, std::span<bf16_t> q) const {
  const TensorStream stream{seed_, row.token_id, layer, TensorKind::kQ};
  std::array<bf16_t, kKimiRowWidth> key;
  for (int64_t group = 0; group < std::min(kTargets, num_heads_); ++group) {
    const int64_t pointed_to = target_position(seed_, layer, row, group);
    latent_key(layer, workload_.token_id(row.request, pointed_to), key);
    for (int64_t h = group; h < num_heads_; h += kTargets) {
      generate_noise_around(stream, {key, kKimiQueryFactor, h * kKimiRowWidth},
                            q.subspan(static_cast<size_t>(h * kKimiRowWidth), key.size()));
    }
  }
}

}  // namespace fovea::internal
