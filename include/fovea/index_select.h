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
  int64_t max_width = 0;   ///< Upper bound of a row's length; longer rows are cut to it.
  int64_t num_heads = 0;   ///< Hi.
  int64_t head_dim = 128;  ///< Di.
  int64_t topk = 0;        ///< K >= 0.
  IndexTransform transform = IndexTransform::kLocal;
  int64_t page_size = 0;  ///< P, of the index pool and of the page transform.
  int64_t logits_budget_bytes = int64_t{512}
                                << 20;  ///< Upper bound of the logits workspace, >= 1; one row is
                                        ///< always allowed. Changes no result.
};

/// As IndexLogitsTensors and TopkSelectTensors, without logits. E live rows, E <= T; rows E..T-1 of
/// `indices` (padding) become -1. Tensors that layout and transform do not use are ignored.
struct IndexSelectTensors {
  ConstTensorView q_fp8{};           ///< u8 [E, Hi, Di], e4m3
  ConstTensorView head_weight{};     ///< f32 [E, Hi]
  ConstTensorView k_fp8{};           ///< kRagged: u8 [S, Di], e4m3
  ConstTensorView k_scale{};         ///< kRagged: f32 [S]
  ConstTensorView k_start{};         ///< kRagged: i32 [E]; cut to [0, S]
  ConstTensorView k_end{};           ///< kRagged: i32 [E]; cut to [0, S]
  ConstTensorView index_pool{};      ///< kPaged: u8 [pages, >= P * (Di + 4)]
  ConstTensorView page_table{};      ///< kPaged layout or transform: i32 [R, max_pages]
  ConstTensorView token_table{};     ///< kPaged transform, instead of page_table: i32 [R, max_len]
  ConstTensorView row_to_request{};  ///< kPaged layout or transform: i32 [E..T]
  ConstTensorView row_len{};         ///< kPaged: i32 [E]
  ConstTensorView row_offset{};      ///< kRagged transform: i32 [E..T]
  ConstTensorView schedule{};        ///< optional, kPaged; changes no result
  TensorView indices{};              ///< i32 [T, K]
};

/// Indexer logits and selection in one call with a bounded workspace: what IndexLogits and then
/// TopkSelect give, bit for bit, without the logits of the whole batch in memory.
///
/// A row scores its keys (kRagged: [k_start, k_end) of the S keys; kPaged: the first row_len
/// positions of its request) and selects the K best of them, ascending, then -1; `transform` maps
/// the positions as in TopkSelect. Rows of at most K keys select all of them, and their keys and
/// queries are not read. kPaged layout: a row whose request is outside [0, R) is an empty row.
///
/// Rows are handled in chunks whose logits fit `logits_budget_bytes`; neither that, nor the thread
/// count, nor the other rows of the batch change a bit of a row.
///
/// Edges, NaN and untrusted contents: as the two operators. plan() throws Error(kInvalidArgument)
/// for a bound out of range, run() for tensors that contradict the plan, before it writes; run()
/// does not allocate. Thread-safe: one plan may run in several threads, each with its own
/// workspace.
///
/// Source: DeepSeek-V3.2 (lightning indexer and token selection); docs/index_select.md.
class FOVEA_API IndexSelect : public OperatorPlan<IndexSelectProblem, IndexSelectTensors> {
 public:
  static IndexSelect plan(const IndexSelectProblem& problem, const Device& device,
                          const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
