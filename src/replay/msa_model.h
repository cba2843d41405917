#pragma once

#include <cstdint>
#include <memory>

#include "src/replay/model_family.h"

/// Models with block-sparse attention.
namespace fovea::internal {

/// Kinds of their layers; the draft model's layer is a sparse one.
inline constexpr char kDenseKind[] = "dense";
inline constexpr char kSparseKind[] = "sparse";

struct MsaShape {
  int64_t num_kv_heads = 4;  ///< Before tensor parallel; index heads too.
  int64_t head_dim = 128;    ///< Of queries, keys and values; a multiple of 32.
  int64_t index_dim = 128;   ///< A multiple of 32.
  int64_t block_size = 128;  ///< Tokens of a block.
  int64_t init_blocks = 0;
  int64_t local_blocks = 1;
};

std::shared_ptr<const ModelFamily> make_msa_family(const MsaShape& shape);

/// The shape of a model of this family.
const MsaShape& msa_shape(const ModelSpec& model);

/// Whether a layer attends to every block.
bool is_dense_layer(const ModelSpec& model, int64_t layer);

/// Page sizes of a model with such blocks: whole blocks, or a part of one, which then is the block.
PageRule msa_page_rule(int64_t block_size);

/// Tokens of a block in a run: the model's, or its page where that is smaller.
int64_t msa_block_size(const RunSetup& setup);

/// KV heads of a rank: with more ranks than heads one, which several ranks hold.
int64_t msa_kv_heads(const RunSetup& setup);

ModelSpec minimax_m3();

}  // namespace fovea::internal
