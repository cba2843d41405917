#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/index_logits.h"
#include "fovea/metadata.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct IndexSelectProblem {
  IndexLayout layout = IndexLayout::kPaged;
  int64_t max_rows = 0;    ///< Upper bound of T.
  int64_t max_width = 0;   ///< Upper bound of a row's length.
  int64_t num_heads = 0;   ///< Hi.
  int64_t head_dim = 128;  ///< Di.
  int64_t topk = 0;        ///< K.
  IndexTransform transform = IndexTransform::kLocal;
  int64_t page_size = 0;  ///< P, of the index pool and of the page transform.
  int64_t logits_budget_bytes =
      int64_t{512} << 20;  ///< Bound of the logits workspace: rows are handled in chunks of
                           ///< max(1, budget / (4 * max_width)). Changes no result.
};

/// As IndexLogitsTensors and TopkSelectTensors, without logits.
struct IndexSelectTensors {
  ConstTensorView q_fp8;           ///< u8 [T, Hi, Di]
  ConstTensorView head_weight;     ///< f32 [T, Hi]
  ConstTensorView k_fp8;           ///< kRagged: u8 [S, Di]
  ConstTensorView k_scale;         ///< kRagged: f32 [S]
  ConstTensorView k_start;         ///< kRagged: i32 [T]
  ConstTensorView k_end;           ///< kRagged: i32 [T]
  ConstTensorView index_pool;      ///< kPaged: u8 [pages, >= P * (Di + 4)]
  ConstTensorView page_table;      ///< kPaged layout or transform: i32 [R, max_pages]
  ConstTensorView token_table;     ///< kPaged transform, instead of page_table: i32 [R, max_len]
  ConstTensorView row_to_request;  ///< kPaged layout or transform: i32 [T]
  ConstTensorView row_len;         ///< kPaged: i32 [T]
  ConstTensorView row_offset;      ///< kRagged transform: i32 [T]
  ConstTensorView schedule;        ///< optional, kPaged
  TensorView indices;              ///< i32 [T, K]
};

/// Indexer logits and selection in one call with a bounded workspace: equal, bit for bit, to
/// index_logits then topk_select.
class FOVEA_API IndexSelect : public OperatorPlan<IndexSelectProblem, IndexSelectTensors> {
 public:
  static IndexSelect plan(const IndexSelectProblem& problem, const Device& device,
                          const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
