#pragma once

#include <cstdint>
#include <memory>

#include "fovea/kda.h"
#include "src/replay/model_family.h"

/// Models that mix Kimi Delta Attention with full attention over a latent cache.
namespace fovea::internal {

/// Kinds of their layers.
inline constexpr char kKdaKind[] = "kda";
inline constexpr char kMlaKind[] = "mla";

struct KimiShape {
  int64_t head_dim_k = 128;  ///< A multiple of 4.
  int64_t head_dim_v = 128;
  float softmax_scale = 0;  ///< Of the full-attention layers.
};

std::shared_ptr<const ModelFamily> make_kimi_family(const KimiShape& shape);

/// The shape of a model of this family.
const KimiShape& kimi_shape(const ModelSpec& model);

/// A KDA layer of `num_heads` local heads: softplus gate, beta from logits, q and k normalised.
KdaLayer kimi_layer(const KimiShape& shape, int64_t num_heads);

/// Whether a layer is a KDA layer; the draft model's is none.
bool is_kda_layer(const ModelSpec& model, int64_t layer);

ModelSpec kimi_linear();

}  // namespace fovea::internal
