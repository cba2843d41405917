#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/dtype.h"
#include "src/replay/dsa_model.h"
#include "src/replay/row_targets.h"
#include "src/replay/workload.h"

/// The model-side tensors of a row of DeepSeek sparse attention, made from the identity of its
/// tokens.
namespace fovea::internal {

/// Channels of a latent key and of an absorbed query head: latent, then rope.
inline constexpr int64_t kDsaRowWidth = 576;

/// Weight of the key of the earlier position in q and in the index query: powers of two.
inline constexpr float kQueryFactor = 0.5f;
inline constexpr float kIndexQueryFactor = 1.0f;

/// Makes rows. Everything depends on seed, layer, the request's own tokens and the position alone.
/// Immutable; thread-safe.
class DsaInputs {
 public:
  DsaInputs(const ModelSpec& model, const Workload& workload, int64_t num_heads, uint64_t seed)
      : model_(model),
        shape_(dsa_shape(model)),
        workload_(workload),
        num_heads_(num_heads),
        seed_(seed) {}

  /// k: bf16 [576], latent then rope.
  void latent_key(int64_t layer, uint64_t token_id, std::span<bf16_t> k) const;

  /// index_k: bf16 [Di], before its LayerNorm.
  void index_key(int64_t layer, uint64_t token_id, std::span<bf16_t> index_k) const;

  /// q: bf16 [H, 576] of the local heads; noise + kQueryFactor * latent_key(target of the head).
  void query(int64_t layer, const RowToken& row, std::span<bf16_t> q) const;
  void query(int64_t layer, int64_t request, int64_t position, std::span<bf16_t> q) const {
    query(layer, {request, position, workload_.token_id(request, position)}, q);
  }

  /// index_q: bf16 [Hi, Di]; noise + kIndexQueryFactor * index_key(target of the head).
  void index_query(int64_t layer, const RowToken& row, std::span<bf16_t> index_q) const;
  void index_query(int64_t layer, int64_t request, int64_t position,
                   std::span<bf16_t> index_q) const {
    index_query(layer, {request, position, workload_.token_id(request, position)}, index_q);
  }

  /// gate: f32 [Hi]; noise + 0.75, so that about one in ten is negative.
  void head_gate(int64_t layer, uint64_t token_id, std::span<float> gate) const;

  /// Weight and bias of the index key's LayerNorm: 1 + noise / 8 and noise / 8, f32 [Di].
  void norm(int64_t layer, std::span<float> weight, std::span<float> bias) const;

  const ModelSpec& model() const { return model_; }
  const DsaShape& shape() const { return shape_; }
  const Workload& workload() const { return workload_; }
  int64_t num_heads() const { return num_heads_; }

 private:
  const ModelSpec& model_;
  const DsaShape& shape_;
  const Workload& workload_;
  int64_t num_heads_;
  uint64_t seed_;
};

}  // namespace fovea::internal
