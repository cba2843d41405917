#pragma once

#include <cstdint>
#include <span>

#include "fovea/dtype.h"
#include "src/replay/msa_model.h"
#include "src/replay/row_targets.h"
#include "src/replay/workload.h"

/// The model-side tensors of a row of block-sparse attention, made from the identity of its tokens.
namespace fovea::internal {

/// Makes rows. Everything depends on seed, layer, the request's own tokens and the position alone.
/// Immutable; thread-safe.
class MsaInputs {
 public:
  MsaInputs(const RunSetup& setup)  // NOLINT: what a run is set up with
      : model_(setup.model),
        shape_(msa_shape(setup.model)),
        workload_(setup.workload),
        num_heads_(setup.num_heads()),
        num_kv_heads_(msa_kv_heads(setup)),
        block_size_(msa_block_size(setup)),
        topk_(setup.topk),
        seed_(setup.seed) {}

  /// k, v: bf16 [Hkv, D].
  void key(int64_t layer, uint64_t token_id, std::span<bf16_t> k) const;
  void value(int64_t layer, uint64_t token_id, std::span<bf16_t> v) const;
  /// index_k: bf16 [Di].
  void index_key(int64_t layer, uint64_t token_id, std::span<bf16_t> index_k) const;

  /// q: bf16 [Hq, D]; noise + twice the key, in the head's KV head, of that KV head's target.
  void query(int64_t layer, const RowToken& row, std::span<bf16_t> q) const;
  /// index_q: bf16 [Hkv, Di]; noise + the index key of the head's target, whose block it so
  /// selects.
  void index_query(int64_t layer, const RowToken& row, std::span<bf16_t> index_q) const;

  const ModelSpec& model() const { return model_; }
  const MsaShape& shape() const { return shape_; }
  const Workload& workload() const { return workload_; }
  int64_t num_heads() const { return num_heads_; }
  int64_t num_kv_heads() const { return num_kv_heads_; }
  int64_t block_size() const { return block_size_; }
  int64_t topk() const { return topk_; }  ///< Blocks.

 private:
  // The token that KV head g of a row points to.
  uint64_t target(int64_t layer, const RowToken& row, int64_t g) const;

  const ModelSpec& model_;
  const MsaShape& shape_;
  const Workload& workload_;
  int64_t num_heads_, num_kv_heads_, block_size_, topk_;
  uint64_t seed_;
};

}  // namespace fovea::internal
