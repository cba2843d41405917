#pragma once

#include "src/replay/kimi_model.h"

namespace fovea::test {

/// A small Kimi Linear: two KDA layers and one of full attention.
inline internal::ModelSpec tiny_kimi(int64_t head_dim_k = 16, int64_t head_dim_v = 32) {
  internal::ModelSpec model = internal::kimi_linear();
  model.name = "tiny-kimi";
  model.num_heads = 4;
  internal::KimiShape shape = internal::kimi_shape(model);
  shape.head_dim_k = head_dim_k;
  shape.head_dim_v = head_dim_v;
  model.family = internal::make_kimi_family(shape);
  model.layer_kinds = {internal::kKdaKind, internal::kKdaKind, internal::kMlaKind};
  model.pattern_layers = {0, 1, 2};
  return model;
}

}  // namespace fovea::test
