#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/kda.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct KdaGateProblem {
  int64_t max_rows = 0;         ///< Upper bound of T.
  int64_t num_value_heads = 0;  ///< HV >= 1.
  int64_t head_dim_k = 128;     ///< K, 1..256.
  KdaGate gate;
};

struct KdaGateTensors {
  ConstTensorView g{};  ///< bf16 or f32 (gate.dtype) [T, HV, K]
  ConstTensorView
      a_log{};  ///< f32 [HV]; kSoftplus needs it, kLowerBound: absent means 0; kGiven: none
  ConstTensorView dt_bias{};  ///< optional f32 [HV, K]; kGiven: none
  TensorView log_decay{};     ///< f32 [T, HV, K], natural log, <= 0 for raw gates, not clamped
};

/// Log decay of a KDA layer, per token, value head and key channel, with a = g + dt_bias computed
/// in fp32 and A = exp(a_log):
///   kSoftplus:   -A * softplus(a), softplus(x) = x above 20, else ln(1 + exp(x))
///   kLowerBound: lower_bound * sigmoid(A * a)
///   kGiven:      g
///
/// NaN in g gives NaN in that element only. Rows, heads and channels are independent; the bits of
/// an element depend on its own inputs alone, for any thread count.
///
/// plan() throws Error(kInvalidArgument) for a bound, a lower_bound outside [-5, 0) or a type out
/// of range; run() for tensors that contradict the plan (a missing a_log, one that kGiven does not
/// take), before it writes; it does not allocate. Thread-safe.
///
/// Source: Kimi Linear technical report; the bounded gate as in FlashKDA.
class FOVEA_API KdaGateActivation : public OperatorPlan<KdaGateProblem, KdaGateTensors> {
 public:
  static KdaGateActivation plan(const KdaGateProblem& problem, const Device& device,
                                const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
