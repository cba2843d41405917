#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

/// What stands between a model's projections and latent attention.
namespace fovea {

/// Problem of concat_absorbed_q.
struct ConcatAbsorbedQProblem {
  int64_t max_rows = 0;   ///< Upper bound of T.
  int64_t num_heads = 0;  ///< H >= 1.
};

struct ConcatAbsorbedQTensors {
  ConstTensorView q_nope;  ///< bf16 [T, H, 512], times W_uk already
  ConstTensorView q_rope;  ///< bf16 [T, H, 64], after rope
  TensorView q;            ///< bf16 [T, H, 576] = q_nope | q_rope
};

/// Joins the two parts of an absorbed query: a pure copy, every bit pattern (NaN too) as it is.
///
/// Strides in T and H are free, so that the parts may be columns of wider buffers. `q` must not
/// overlap its sources. T = 0 does nothing. run() throws Error(kInvalidArgument) for tensors that
/// do not fit the plan, before anything is written; it never allocates. Exact; thread-safe.
///
/// Source: multi-head latent attention of DeepSeek-V2 in absorbed form; docs/concat_absorbed_q.md.
class FOVEA_API ConcatAbsorbedQ
    : public OperatorPlan<ConcatAbsorbedQProblem, ConcatAbsorbedQTensors> {
 public:
  static ConcatAbsorbedQ plan(const ConcatAbsorbedQProblem& problem, const Device& device,
                              const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

/// Problem of mla_rope_quantize.
struct MlaRopeQuantizeProblem {
  int64_t max_rows = 0;                            ///< Upper bound of T.
  int64_t num_heads = 0;                           ///< H >= 1; only read with q.
  RopeStyle rope_style = RopeStyle::kInterleaved;  ///< Of the model's main rope.
  float q_scale = 1;                               ///< Finite, > 0.
  float k_scale = 1;                               ///< Finite, > 0; of the layer's f576 cache.
};

/// Tensors of mla_rope_quantize. The three of q (q_nope, q_rope, q_fp8) may be left out together,
/// and so may the three of k (k_nope, k_rope, k_fp8).
struct MlaRopeQuantizeTensors {
  ConstTensorView q_nope;     ///< bf16 [T, H, 512]
  ConstTensorView q_rope;     ///< bf16 [T, H, 64], before rope
  ConstTensorView k_nope;     ///< bf16 [T, 512]
  ConstTensorView k_rope;     ///< bf16 [T, 64], before rope
  ConstTensorView positions;  ///< i32 [T], of the whole sequence; clamped to the rows of cos_sin
  ConstTensorView cos_sin;    ///< f32 [max_pos, 64]: 32 cosines, then 32 sines
  TensorView q_fp8;           ///< u8 [T, H, 576], e4m3 codes
  TensorView k_fp8;           ///< u8 [T, 576], e4m3 codes: records of an f576 cache
};

/// Queries and keys of latent attention for an f576 cache: rope and quantisation in one pass.
///
///   rope, pairs (i, i + 32) or (2i, 2i + 1): (a, b) <- (a cos - b sin, b cos + a sin)
///   code = e4m3(x / scale), x being nope | rope, IEEE division, nearest even, saturating
///
/// Each product, sum and quotient is rounded to fp32 and x is not rounded to bf16 before it is
/// quantised, so that the codes are equal in every implementation. NaN becomes the code 0x7F,
/// an infinity or a quotient beyond 448 the largest code of its sign. Rope must not have been
/// applied before. T = 0 does nothing. The caller owns all memory; outputs must not overlap inputs.
///
/// plan() throws Error(kInvalidArgument) for bounds or scales outside the table above, run() for
/// tensors that do not fit the plan, before anything is written; contents are never an error. run()
/// never allocates. Bitwise equal for any number of threads and whatever other rows there are.
/// Thread-safe.
///
/// Source: per-tensor fp8 latent cache of DeepSeek sparse attention; docs/mla_rope_quantize.md.
class FOVEA_API MlaRopeQuantize
    : public OperatorPlan<MlaRopeQuantizeProblem, MlaRopeQuantizeTensors> {
 public:
  static MlaRopeQuantize plan(const MlaRopeQuantizeProblem& problem, const Device& device,
                              const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
