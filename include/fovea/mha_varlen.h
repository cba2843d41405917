#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct MhaVarlenProblem {
  int64_t max_rows = 0;      ///< Upper bound of T.
  int64_t max_keys = 0;      ///< Upper bound of S.
  int64_t max_requests = 0;  ///< Upper bound of R.
  int64_t num_heads = 0;     ///< H.
  int64_t head_dim_qk = 192;
  int64_t head_dim_v = 128;
  float softmax_scale = 0;  ///< Finite, > 0.
  bool causal = true;       ///< Right-aligned: row i of n sees keys 0 .. S_r - n + i.
};

struct MhaVarlenTensors {
  ConstTensorView q;          ///< bf16 [T, H, 192]
  ConstTensorView k;          ///< bf16 [S, H, 192]
  ConstTensorView v;          ///< bf16 [S, H, 128]
  ConstTensorView q_indptr;   ///< i32 [R+1]
  ConstTensorView kv_indptr;  ///< i32 [R+1]
  TensorView out;             ///< bf16 [T, H, 128]; rows at or past q_indptr[R] are not written
  TensorView lse;             ///< f32 [T, H], natural log
};

/// Dense multi-head attention over variable-length requests: the one-shot form of short prefills.
class FOVEA_API MhaVarlen : public OperatorPlan<MhaVarlenProblem, MhaVarlenTensors> {
 public:
  static MhaVarlen plan(const MhaVarlenProblem& problem, const Device& device,
                        const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
