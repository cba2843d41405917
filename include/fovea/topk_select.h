#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/metadata.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct TopkSelectProblem {
  int64_t max_rows = 0;   ///< Upper bound of T.
  int64_t max_width = 0;  ///< Upper bound of W, the columns of logits.
  int64_t topk = 0;       ///< K >= 1.
  IndexTransform transform = IndexTransform::kLocal;
  int64_t page_size = 0;  ///< kPaged with page_table: P.
};

struct TopkSelectTensors {
  ConstTensorView logits;   ///< f32 [T, W]
  ConstTensorView row_len;  ///< i32 [T]
  ConstTensorView
      row_start;  ///< optional i32 [T]: first column of the window (negative counts as 0)
  ConstTensorView page_table;      ///< kPaged: i32 [R, max_pages], or token_table
  ConstTensorView token_table;     ///< kPaged: i32 [R, max_len], slot of each position
  ConstTensorView row_to_request;  ///< kPaged: i32 [T]; optional with token_table (then row t)
  ConstTensorView row_offset;      ///< kRagged: i32 [T]
  TensorView indices;              ///< i32 [T, K]
};

/// The K largest logits of each row, exactly, ascending by position, then -1.
class FOVEA_API TopkSelect : public OperatorPlan<TopkSelectProblem, TopkSelectTensors> {
 public:
  static TopkSelect plan(const TopkSelectProblem& problem, const Device& device,
                         const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
