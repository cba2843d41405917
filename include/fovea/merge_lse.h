#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct MergeLseProblem {
  int64_t num_parts = 0;       ///< P >= 1.
  int64_t max_rows = 0;        ///< Upper bound of T.
  int64_t num_heads = 0;       ///< H.
  int64_t head_dim = 0;        ///< D.
  DType dtype = DType::kBf16;  ///< Of out_parts and out: kBf16 or kF32.
};

struct MergeLseTensors {
  ConstTensorView out_parts;  ///< [P, T, H, D]
  ConstTensorView
      lse_parts;  ///< f32 [P, T, H]; not finite: the part counts as empty and its rows are not read
  ConstTensorView sink;  ///< optional f32 [H]
  TensorView out;        ///< [T, H, D]
  TensorView lse;        ///< f32 [T, H], sink excluded
};

/// Merges attention over disjoint key sets (splits, caches, ranks) into attention over their union.
///
///   lse = ln sum_p exp(lse_p),   out = sum_p exp(lse_p - lse) * out_p / (1 + exp(sink[h] - lse))
///
/// Every lse is a natural logarithm without the sink; the parts must have been computed without it.
/// A part whose lse is not finite is empty. With one live part and no sink its output and lse come
/// back bit for bit. No live part: out exactly 0, lse -inf, whatever the sink.
///
/// The parts are added in their order in fp32: a row's bits depend on its own parts alone. Throws
/// Error(kInvalidArgument) from plan() for bounds or types outside the tables above and from run()
/// for tensors that do not match, before anything is written. Ownership, threads and streams:
/// OperatorPlan.
///
/// Source: the decomposition of softmax over disjoint sets; docs/merge_lse.md.
class FOVEA_API MergeLse : public OperatorPlan<MergeLseProblem, MergeLseTensors> {
 public:
  static MergeLse plan(const MergeLseProblem& problem, const Device& device,
                       const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
