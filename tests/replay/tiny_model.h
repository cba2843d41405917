#pragma once

#include "src/replay/model_presets.h"

namespace fovea::test {

/// The shapes of a small DeepSeek-V3.2: few heads, narrow selection, three layers.
inline internal::ModelSpec tiny_model() {
  internal::ModelSpec model = internal::find_model("deepseek-v3.2");
  model.name = "tiny";
  model.num_heads = 4;
  model.index_heads = 8;
  model.topk = 6;
  model.layer_kinds.assign(3, "dsa");
  return model;
}

}  // namespace fovea::test
