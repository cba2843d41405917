#pragma once

#include "src/replay/v4_model.h"

namespace fovea::test {

/// A small DeepSeek-V4: one layer of each ratio, few heads, a short window.
inline internal::ModelSpec tiny_v4() {
  internal::ModelSpec model = internal::deepseek_v4_flash();
  model.name = "tiny-v4";
  model.num_heads = 4;
  model.topk = 12;
  internal::V4Shape shape;
  shape.window = 24;
  shape.index_heads = 8;
  model.family = internal::make_v4_family(shape);
  model.layer_kinds = {internal::kSwaKind, internal::kCsaKind, internal::kHcaKind};
  return model;
}

}  // namespace fovea::test
