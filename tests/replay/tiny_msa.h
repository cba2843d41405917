#pragma once

#include "src/replay/msa_model.h"

namespace fovea::test {

/// A small MiniMax-M3: a dense layer and two sparse ones, lists of 3 blocks, the first one and the
/// own one among them.
inline internal::ModelSpec tiny_msa(int64_t block_size = 16, int64_t dim = 32) {
  internal::ModelSpec model = internal::minimax_m3();
  model.name = "tiny-msa";
  model.num_heads = 8;
  model.topk = 3;
  internal::MsaShape shape = internal::msa_shape(model);
  shape.head_dim = shape.index_dim = dim;
  shape.block_size = block_size;
  shape.init_blocks = 1;
  model.page = internal::msa_page_rule(block_size);
  model.family = internal::make_msa_family(shape);
  model.layer_kinds = {internal::kDenseKind, internal::kSparseKind, internal::kSparseKind};
  model.pattern_layers = {0, 1, 2};
  return model;
}

}  // namespace fovea::test
