#pragma once

#include <cstdint>
#include <span>

#include "fovea/dtype.h"
#include "src/replay/kimi_model.h"
#include "src/replay/row_targets.h"
#include "src/replay/workload.h"

/// The model-side tensors of a row of a model with KDA and full-attention layers, made from the
/// identity of its tokens.
namespace fovea::internal {

/// Channels of a latent key and of an absorbed query head.
inline constexpr int64_t kKimiRowWidth = 576;

/// What a KDA layer has once.
struct KimiLayerWeights {
  std::span<bf16_t> conv_weight;  ///< [D, 4]
  std::span<bf16_t> conv_bias;    ///< [D]
  std::span<float> a_log;         ///< [H]
  std::span<float> dt_bias;       ///< [H, K]
};

/// Makes rows. Everything depends on seed, layer, the request's own tokens and the position alone.
/// Immutable; thread-safe.
class KimiInputs {
 public:
  KimiInputs(const ModelSpec& model, const Workload& workload, int64_t num_heads, uint64_t seed)
      : model_(model),
        shape_(kimi_shape(model)),
        workload_(workload),
        num_heads_(num_heads),
        seed_(seed) {}

  /// D: channels of q|k|v of the local heads.
  int64_t num_channels() const { return num_heads_ * (2 * shape_.head_dim_k + shape_.head_dim_v); }

  /// Raw inputs of the convolution: bf16 [D].
  void qkv(int64_t layer, uint64_t token_id, std::span<bf16_t> qkv) const;
  /// Raw gate: bf16 [H, K].
  void gate(int64_t layer, uint64_t token_id, std::span<bf16_t> g) const;
  /// Logit of beta: f32 [H].
  void beta(int64_t layer, uint64_t token_id, std::span<float> beta) const;
  /// Noise, with rates exp(a_log) about exp(-3): a state forgets in about 30 tokens, in some heads
  /// in hundreds.
  void weights(int64_t layer, const KimiLayerWeights& weights) const;

  /// k: bf16 [576].
  void latent_key(int64_t layer, uint64_t token_id, std::span<bf16_t> k) const;
  /// q: bf16 [H, 576]; noise + half the latent key of the head's target.
  void query(int64_t layer, const RowToken& row, std::span<bf16_t> q) const;

  const ModelSpec& model() const { return model_; }
  const KimiShape& shape() const { return shape_; }
  const Workload& workload() const { return workload_; }
  int64_t num_heads() const { return num_heads_; }

 private:
  const ModelSpec& model_;
  const KimiShape& shape_;
  const Workload& workload_;
  int64_t num_heads_;
  uint64_t seed_;
};

}  // namespace fovea::internal
