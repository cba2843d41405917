#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "fovea/dtype.h"
#include "src/core/row_layout.h"
#include "src/replay/row_targets.h"
#include "src/replay/v4_model.h"
#include "src/replay/workload.h"
#include "src/serving/v4_shapes.h"

/// The model-side tensors of a row of DeepSeek-V4 attention, made from the identity of its tokens.
namespace fovea::internal {

/// The first group of heads that leans to an entry; every second one does.
inline constexpr int64_t kEntryGroup = 1;

/// The token of its window that group `group` of a row's heads leans to.
inline int64_t window_target(uint64_t seed, int64_t layer, const RowToken& row, int64_t group,
                             int64_t window) {
  return row.position -
         scale_to(hash_in(HashDomain::kTarget, seed, layer, row.token_id, row.position, group),
                  std::min(window, row.position + 1));
}

/// The entry, of `count` > 0, that it leans to.
inline int64_t entry_target(uint64_t seed, int64_t layer, const RowToken& row, int64_t group,
                            int64_t count) {
  return scale_to(
      hash_in(HashDomain::kTarget, seed, layer, row.token_id, row.position, group, count), count);
}

/// What a layer has once. A ratio's spans are looked at only where the layer has it.
struct V4LayerWeights {
  std::span<float> sink;                          ///< [H]
  std::span<float> ape, norm_weight;              ///< [ratio, c * 512], [512]
  std::span<float> index_ape, index_norm_weight;  ///< ratio 4: [4, 256], [128]
};

/// Makes rows. Everything depends on seed, layer, the request's own tokens and the position alone.
/// Immutable; thread-safe.
class V4Inputs {
 public:
  V4Inputs(const ModelSpec& model, const Workload& workload, int64_t num_heads, uint64_t seed)
      : model_(model),
        shape_(v4_shape(model)),
        workload_(workload),
        num_heads_(num_heads),
        seed_(seed) {}

  int64_t ratio(int64_t layer) const { return v4_ratio(model_, layer); }

  /// kv: bf16 [512], rotated.
  void window_key(int64_t layer, uint64_t token_id, std::span<bf16_t> kv) const;
  /// Values and logits of the compressor: f32 [2 * c * 512], of the indexer's [512].
  void gate(int64_t layer, uint64_t token_id, std::span<float> gate) const;
  void index_gate(int64_t layer, uint64_t token_id, std::span<float> gate) const;
  /// q: bf16 [H, 512], rotated; noise + half a key of the window, or, every second group of heads
  /// of a layer with entries, + half the values that weigh most in one of them.
  void query(int64_t layer, const RowToken& row, std::span<bf16_t> q) const;
  /// index_q: bf16 [Hi, 128], rotated; noise + the values that weigh most in an entry's index key.
  void index_query(int64_t layer, const RowToken& row, std::span<bf16_t> index_q) const;
  /// head_gate: f32 [Hi]; noise + 3/4, now and then below 0.
  void head_gate(int64_t layer, uint64_t token_id, std::span<float> gate) const;
  /// Noise; in `ape` one token of each group stands out, so that queries can lean to an entry.
  void weights(int64_t layer, const V4LayerWeights& weights) const;

  /// The table of a layer, rows 0..num_positions-1: f32 [64] each. Base 10000 for ratio 0; 160000
  /// with YaRN (factor 16, original context 65536, beta 32 and 1) otherwise.
  static void cos_sin(bool compresses, int64_t num_positions, float* table);

  const ModelSpec& model() const { return model_; }
  const V4Shape& shape() const { return shape_; }
  const Workload& workload() const { return workload_; }
  int64_t num_heads() const { return num_heads_; }

 private:
  // What of an entry queries lean to: the values of its anchor, 0 in the channels that turn.
  void lean_to(int64_t layer, int64_t request, int64_t entry, bool index,
               std::span<bf16_t> base) const;

  const ModelSpec& model_;
  const V4Shape& shape_;
  const Workload& workload_;
  int64_t num_heads_;
  uint64_t seed_;
};

}  // namespace fovea::internal
