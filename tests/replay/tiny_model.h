#pragma once

#include "src/replay/dsa_model.h"

namespace fovea::test {

/// The shapes of a small DeepSeek-V3.2: few heads, narrow selection, three layers.
inline internal::ModelSpec tiny_model() {
  internal::ModelSpec model = internal::deepseek_v32();
  model.name = "tiny";
  model.num_heads = 4;
  internal::DsaShape shape = internal::dsa_shape(model);
  shape.index_heads = 8;
  model.family = internal::make_dsa_family(shape);
  model.topk = 6;
  model.layer_kinds.assign(3, "dsa");
  return model;
}

}  // namespace fovea::test
