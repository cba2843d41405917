#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/msa_block_scores.h"
#include "fovea/msa_select_blocks.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// The fields of MsaBlockScoresProblem and MsaSelectBlocksProblem.
struct MsaScoreSelectProblem {
  int64_t max_rows = 0;
  int64_t max_requests = 0;
  int64_t max_pages = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  ///< 0: num_heads.
  int64_t head_dim = 128;
  int64_t block_size = 0;
  int64_t page_size = 0;  ///< 0, or block_size: any other value is an error.
  BlockScore score = BlockScore::kMax;
  float index_scale = 1;
  int64_t topk = 0;
  int64_t init_blocks = 0;
  int64_t local_blocks = 1;
  IndexReduce index_reduce = IndexReduce::kPerGroup;
  BlocksLayout blocks_layout = BlocksLayout::kHeadMajor;
};

struct MsaScoreSelectTensors {
  ConstTensorView iq{};          ///< bf16 [T, Hi, Di]
  ConstTensorView index_k{};     ///< bf16 [slots, 1, Di]
  ConstTensorView page_table{};  ///< i32 [R, max_pages]
  ConstTensorView kv_len{};      ///< i32 [R]
  ConstTensorView q_indptr{};    ///< i32 [R+1]
  ConstTensorView q_offset{};    ///< optional i32 [R]
  TensorView blocks{};  ///< i32 [Hkv, T, K] or [T, Hkv, K] by blocks_layout; union: r * K columns
};

/// Block scores and block selection in one call: bit for bit what MsaBlockScores and then
/// MsaSelectBlocks of the same implementation give, without the scores of all rows in memory. A row
/// with at most K candidates is not scored: its queries and keys have no influence.
///
/// Formulas, edges, errors and guarantees: the two operators. The workspace depends on the bounds
/// alone and grows with max_pages and the number of threads, not with max_rows * max_pages.
///
/// Source: MiniMax-M3's sparse attention (arXiv 2606.13392); docs/msa_index.md.
class FOVEA_API MsaScoreSelect : public OperatorPlan<MsaScoreSelectProblem, MsaScoreSelectTensors> {
 public:
  static MsaScoreSelect plan(const MsaScoreSelectProblem& problem, const Device& device,
                             const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
