#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

enum class IndexLayout : uint8_t {
  kRagged,  ///< Keys in one contiguous array; row t scores [k_start, k_end).
  kPaged,   ///< Keys in pages of the index cache; row t scores positions 0..row_len-1 of its
            ///< request.
};

struct IndexLogitsProblem {
  IndexLayout layout = IndexLayout::kPaged;
  int64_t max_rows = 0;    ///< Upper bound of T.
  int64_t num_heads = 0;   ///< Hi.
  int64_t head_dim = 128;  ///< Di.
  int64_t page_size = 0;   ///< kPaged: P, 1..256.
};

struct IndexLogitsTensors {
  ConstTensorView q_fp8;        ///< u8 [T, Hi, Di]
  ConstTensorView head_weight;  ///< f32 [T, Hi]
  // kRagged
  ConstTensorView k_fp8;    ///< u8 [S, Di]
  ConstTensorView k_scale;  ///< f32 [S]
  ConstTensorView k_start;  ///< i32 [T]; cut to [0, S]
  ConstTensorView k_end;    ///< i32 [T]; cut to [0, S]
  // kPaged
  ConstTensorView index_pool;      ///< u8 [pages, >= P * (Di + 4)]
  ConstTensorView page_table;      ///< i32 [R, max_pages]
  ConstTensorView row_to_request;  ///< i32 [T]; outside [0, R): the row is unspecified
  ConstTensorView row_len;         ///< i32 [T]
  ConstTensorView schedule;  ///< optional i32 [workers+1, 2] of paged_schedule; changes no result
  TensorView logits;         ///< f32 [T, W], W at least the longest row (longer rows are cut to W);
                             ///< column = position - start; columns outside the row are unspecified
};

/// logit(t, j) = k_scale[j] * sum_h head_weight[t,h] * max(0, <q_fp8[t,h], k_fp8[j]>), accumulated
/// in fp32.
///
/// A key whose page is outside the pool: -inf. Rows of length <= 0 touch no memory.
class FOVEA_API IndexLogits : public OperatorPlan<IndexLogitsProblem, IndexLogitsTensors> {
 public:
  static IndexLogits plan(const IndexLogitsProblem& problem, const Device& device,
                          const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
