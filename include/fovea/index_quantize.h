#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct IndexQuantizeProblem {
  int64_t max_rows = 0;    ///< Upper bound of T.
  int64_t num_heads = 0;   ///< Hi, index heads (64 in models).
  int64_t head_dim = 128;  ///< Di.
  int64_t rope_dim = 64;   ///< First channels that are rotated; even, <= Di, 0 for none.
  RopeStyle rope_style = RopeStyle::kHalfSplit;
  bool hadamard = false;  ///< Rotate q and k by the Sylvester-Hadamard matrix * Di^-1/2; Di must be
                          ///< a power of two.
  ScaleMode scale_mode = ScaleMode::kFp32;  ///< Set it to the checkpoint's scale format.
};

struct IndexQuantizeTensors {
  ConstTensorView q;            ///< bf16 [T, Hi, Di]
  ConstTensorView k;            ///< bf16 [T, Di], before the LayerNorm
  ConstTensorView norm_weight;  ///< f32 [Di]
  ConstTensorView norm_bias;    ///< f32 [Di]
  ConstTensorView head_gate;    ///< f32 [T, Hi]
  ConstTensorView positions;    ///< i32 [T]; clamped to the rows of cos_sin
  ConstTensorView cos_sin;      ///< f32 [max_pos, rope_dim]: rope/2 cosines, then rope/2 sines
  TensorView q_fp8;             ///< u8 [T, Hi, Di], e4m3 codes
  TensorView q_scale;           ///< f32 [T, Hi]
  TensorView k_fp8;             ///< u8 [T, Di]
  TensorView k_scale;           ///< f32 [T]
  TensorView head_weight;       ///< f32 [T, Hi] = head_gate * Hi^-1/2 * Di^-1/2 * q_scale
};

/// LayerNorm of k, rope, optional Hadamard rotation and fp8 quantisation of index queries and keys.
class FOVEA_API IndexQuantize : public OperatorPlan<IndexQuantizeProblem, IndexQuantizeTensors> {
 public:
  static IndexQuantize plan(const IndexQuantizeProblem& problem, const Device& device,
                            const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
