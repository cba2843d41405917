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

/// Problem of index_logits.
struct IndexLogitsProblem {
  IndexLayout layout = IndexLayout::kPaged;
  int64_t max_rows = 0;    ///< Upper bound of T.
  int64_t num_heads = 0;   ///< Hi, 1..4096.
  int64_t head_dim = 128;  ///< Di, 1..16384.
  int64_t page_size = 0;   ///< kPaged: P, 1..256.
};

/// Tensors of index_logits; those of the other layout are not looked at.
struct IndexLogitsTensors {
  ConstTensorView q_fp8;        ///< u8 [T, Hi, Di], e4m3
  ConstTensorView head_weight;  ///< f32 [T, Hi], any sign
  // kRagged
  ConstTensorView k_fp8;    ///< u8 [S, Di], e4m3
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

/// Lightning-indexer logits of query rows against quantised keys:
///
///   logit(t, j) = k_scale[j] * sum_h head_weight[t,h] * max(0, <q_fp8[t,h], k_fp8[j]>)
///
/// The products are exact, sums and weights are fp32 (of implementation cuda_sm90 the sums over
/// channels have fewer bits, docs/index_logits.md): channels, then heads, then the scale, each in
/// an order that the implementation fixes (on the CPU 0..Di-1 and 0..Hi-1). So the bits of one
/// logit depend on its query and key alone: not on layout, page size, other rows, key alignment or
/// thread count; ragged equals paged. (They may differ between implementations, instruction sets
/// and GPUs.)
///
/// A key past the page table or on a page outside the pool is not read: its logit is -inf. A NaN
/// code or weight gives NaN in the row, a NaN key code or scale in the column that it belongs to,
/// nowhere else. Rows without keys (length <= 0, k_end <= k_start, a request outside the table)
/// touch no memory; nothing past a row's keys is read. Addresses are 64-bit. T = 0 does nothing.
/// The caller owns all memory.
///
/// plan() throws Error(kInvalidArgument) for bounds outside the table above, run() for tensors that
/// do not fit the plan, before anything is written. Thread-safe: one workspace per concurrent run.
///
/// Source: DeepSeek-V3.2 (lightning indexer); docs/index_logits.md.
class FOVEA_API IndexLogits : public OperatorPlan<IndexLogitsProblem, IndexLogitsTensors> {
 public:
  static IndexLogits plan(const IndexLogitsProblem& problem, const Device& device,
                          const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
