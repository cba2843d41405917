#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/metadata.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct TopkSelectProblem {
  int64_t max_rows = 0;   ///< Upper bound of T.
  int64_t max_width = 0;  ///< Upper bound of W, the columns of logits; at most 2^31 - 1.
  int64_t topk = 0;       ///< K >= 0 (0: rows of no entries), at most 2^31 - 1.
  IndexTransform transform = IndexTransform::kLocal;
  int64_t page_size = 0;  ///< kPaged with page_table: P >= 1; with token_table 0 or 1, because its
                          ///< entries are slots. Otherwise unused.
};

/// E = the rows of row_len and logits; E <= T, and rows E..T-1 of `indices` (padding) become -1.
/// Tensors that the transform does not use are ignored.
struct TopkSelectTensors {
  ConstTensorView logits{};       ///< f32 [E, W]; only columns of a row's window are read
  ConstTensorView row_len{};      ///< i32 [E]: entries of the window; <= 0 is an empty row
  ConstTensorView row_start{};    ///< optional i32 [E]: first column of the window (negative counts
                                  ///< as 0); absent: 0. The window is cut to the W columns.
  ConstTensorView page_table{};   ///< kPaged: i32 [R, max_pages], or token_table, never both
  ConstTensorView token_table{};  ///< kPaged: i32 [R, max_len], slot of each position
  ConstTensorView row_to_request{};  ///< kPaged: i32 [E..T]; optional with token_table (then row t
                                     ///< uses table row t, and R must not exceed T)
  ConstTensorView row_offset{};      ///< kRagged: i32 [E..T]
  TensorView indices{};              ///< i32 [T, K]
};

/// The K largest logits of each row's window, exactly: the selection of sparse attention.
///
/// Row t gives, in ascending order of position, the min(len, K) positions (relative to row_start)
/// with the largest logits, then -1. The order of logits is that of fp32 values with -0 equal to
/// +0, infinities ordinary, NaN below -inf; equal logits, NaN among themselves too, go to the lower
/// position. len <= K: positions 0..len-1, and the logits are not read. len <= 0: all -1.
///
/// Then each position becomes
///   kLocal   itself;
///   kPaged   page_table[r][pos / P] * P + pos % P, or token_table[r][pos], with r =
///            row_to_request[t]; -1 in its place where the table has no such column, the entry is
///            negative or the slot exceeds int32; the whole row is -1 when r is outside [0, R);
///   kRagged  pos + row_offset[t]; -1 where that is negative or exceeds int32.
///
/// The result depends on the row alone: it is the same on every implementation, for any number of
/// threads and whatever the other rows are. No value of a tensor is an error.
///
/// plan() throws Error(kInvalidArgument) for a bound out of range. run() throws it, before it
/// writes, for tensors whose shapes or types contradict the plan or one another; it does not
/// allocate. Thread-safe: one plan may run in several threads, each with its own workspace.
///
/// Source: selection of DeepSeek-V3.2's sparse attention; tie and NaN rules: docs/topk_select.md.
class FOVEA_API TopkSelect : public OperatorPlan<TopkSelectProblem, TopkSelectTensors> {
 public:
  static TopkSelect plan(const TopkSelectProblem& problem, const Device& device,
                         const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
