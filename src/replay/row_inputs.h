#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/dtype.h"
#include "src/replay/model_presets.h"
#include "src/replay/workload.h"

/// The model-side tensors of a row, made from the identity of its tokens.
namespace fovea::internal {

/// Rows point to at most this many earlier positions: head h points to that of group h % kTargets.
/// Several index heads share one, so that the indexer really selects it, and the attention heads
/// of the group then find their key among the selected.
inline constexpr int64_t kTargets = 8;

/// Weight of the key of the earlier position in q and in the index query: powers of two.
inline constexpr float kQueryFactor = 0.5f;
inline constexpr float kIndexQueryFactor = 1.0f;

/// A row of a request by its token, which may be one that was drafted wrong. The tokens before it
/// are the request's own.
struct RowToken {
  int64_t request = 0;
  int64_t position = 0;
  uint64_t token_id = 0;
};

/// Makes rows. Everything depends on seed, layer, the request's own tokens and the position alone.
/// Immutable; thread-safe.
class RowInputs {
 public:
  RowInputs(const ModelSpec& model, const Workload& workload, int64_t num_heads, uint64_t seed)
      : model_(model), workload_(workload), num_heads_(num_heads), seed_(seed) {}

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

  /// The earlier position (0 for the first row) that group `group` of a row's heads points to.
  int64_t target(int64_t layer, uint64_t token_id, int64_t position, int64_t group) const;

  const ModelSpec& model() const { return model_; }
  const Workload& workload() const { return workload_; }
  int64_t num_heads() const { return num_heads_; }

 private:
  const ModelSpec& model_;
  const Workload& workload_;
  int64_t num_heads_;
  uint64_t seed_;
};

}  // namespace fovea::internal
