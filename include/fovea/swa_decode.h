#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/sparse_mla.h"
#include "fovea/tensor.h"

namespace fovea {

struct SwaDecodeProblem {
  int64_t max_rows = 0;     ///< Upper bound of T.
  int64_t num_heads = 0;    ///< H >= 1.
  int64_t width = 0;        ///< Wi, columns of swa_indices, >= 1; not tied to the window.
  int64_t window = 0;       ///< >= 1: no row attends to more columns than this.
  float softmax_scale = 0;  ///< Finite, > 0.
  RowFormat row_format = RowFormat::kR512;  ///< kR512, kV4 or kBf16.
  int64_t page_size = 0;  ///< Tokens per page of a packed (u8) pool; 0: kv is bf16 [S, 512].
  EmptyLse empty_lse = EmptyLse::kNegInf;
  int64_t fixed_splits = 0;  ///< As SparseMlaProblem::fixed_splits.
};

struct SwaDecodeTensors {
  ConstTensorView q;               ///< bf16 [T, H, 512]
  ConstTensorView kv;              ///< u8 [pages, page_bytes] with page_size, or bf16 [S, 512]
  ConstTensorView inv_scale = {};  ///< kR512 only: bf16 or f32 [pages * page_size, 1]
  ConstTensorView swa_indices;     ///< i32 or i64 [>= T, Wi], [1, >= T, Wi] or [>= T, 1, Wi]; slots
  ConstTensorView swa_lens;        ///< i32 or i64 [>= T]; leading columns to look at
  ConstTensorView sink = {};       ///< optional f32 [H], natural-log units
  TensorView out;                  ///< bf16 [T, H, 512]
  TensorView lse = {};             ///< optional f32 [T, H], natural log, sink excluded
};

/// One decode step of sliding-window attention over a paged cache whose rows are keys and values.
///
/// Row t looks at the first n_t = min(max(swa_lens[t], 0), Wi, window) columns of swa_indices[t]:
///   s_j = softmax_scale * dot(q[t,h,:], kv_j),
///   out[t,h,:] = sum_j exp(s_j) * kv_j / (sum_j exp(s_j) + exp(sink[h]))
/// over the columns j < n_t whose slot is in the cache. It is sparse_mla with the list of a window
/// and has its numbers, edges and determinism.
///
/// Edges. A column outside the cache (any negative value, or at least pages * page_size) is masked:
/// weight 0, its memory and any other in its place unread; it still counts as a column, so that it
/// hides none behind it. Columns from n_t on may hold anything. No valid column: out = 0 exactly,
/// lse = -inf (+inf with EmptyLse::kPosInf), whatever the sink. A slot that occurs twice counts
/// twice. Indices and lengths of 64 bits that 32 do not hold are outside the cache, and clamped.
/// Rows of swa_indices and swa_lens past T are ignored.
///
/// Throws Error(kInvalidArgument) from plan() for a value outside the tables above, from run() for
/// tensors that do not match, before anything is written. Contents of tensors are never an error.
/// run() does not allocate, wait or read device data on the host. Ownership, threads and streams:
/// OperatorPlan.
///
/// Source: the sliding-window decode of DeepSeek-V4 (docs/swa_decode.md).
class FOVEA_API SwaDecode : public OperatorPlan<SwaDecodeProblem, SwaDecodeTensors> {
 public:
  static SwaDecode plan(const SwaDecodeProblem& problem, const Device& device,
                        const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
