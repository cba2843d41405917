#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// Problem of index_quantize.
struct IndexQuantizeProblem {
  int64_t max_rows = 0;    ///< Upper bound of T.
  int64_t num_heads = 0;   ///< Hi, index heads, 1..4096 (64 in models).
  int64_t head_dim = 128;  ///< Di, 1..16384.
  int64_t rope_dim = 64;   ///< First channels that are rotated; even, <= Di, 0 for none.
  RopeStyle rope_style = RopeStyle::kHalfSplit;
  bool hadamard = false;  ///< Rotate q and k by the Sylvester-Hadamard matrix * Di^-1/2; Di must be
                          ///< a power of two.
  ScaleMode scale_mode = ScaleMode::kFp32;  ///< Set it to the checkpoint's scale format.
};

/// Tensors of index_quantize. The five of q (q, head_gate, q_fp8, q_scale, head_weight) may be left
/// out together, and so may the five of k (k, norm_weight, norm_bias, k_fp8, k_scale).
struct IndexQuantizeTensors {
  ConstTensorView q;            ///< bf16 [T, Hi, Di]
  ConstTensorView k;            ///< bf16 [T, Di], before the LayerNorm
  ConstTensorView norm_weight;  ///< f32 [Di]
  ConstTensorView norm_bias;    ///< f32 [Di]
  ConstTensorView head_gate;    ///< f32 [T, Hi]
  ConstTensorView positions;  ///< i32 [T]; clamped to the rows of cos_sin; not read if rope_dim = 0
  ConstTensorView cos_sin;    ///< f32 [max_pos, rope_dim]: rope/2 cosines, then rope/2 sines
  TensorView q_fp8;           ///< u8 [T, Hi, Di], e4m3 codes
  TensorView q_scale;         ///< f32 [T, Hi]
  TensorView k_fp8;           ///< u8 [T, Di]
  TensorView k_scale;         ///< f32 [T]
  TensorView head_weight;     ///< f32 [T, Hi] = head_gate * Hi^-1/2 * Di^-1/2 * q_scale
};

/// Index queries, keys and head weights of one layer, ready for index_logits: LayerNorm of k (mean
/// and variance, eps 1e-6), rope, optional Hadamard rotation, e4m3 quantisation with one scale per
/// row of Di channels.
///
///   k <- (k - mean) / sqrt(variance + 1e-6) * norm_weight + norm_bias
///   rope, first rope_dim channels, pairs (i, i + rope/2) or (2i, 2i + 1):
///     (a, b) <- (a cos - b sin, b cos + a sin), angle row = positions[t]
///   hadamard: x_i <- Di^-1/2 sum_j (-1)^popcount(i & j) x_j
///   a = max(max|x|, 1e-4);  kFp32: scale = a / 448;  kPow2: the power of two at or above it
///   code = e4m3(x / scale), IEEE division, nearest even, saturating
///   head_weight = head_gate * Hi^-1/2 * Di^-1/2 * q_scale
///
/// LayerNorm, rope and rotation each compute in fp32 and round to bf16; the reference computes in
/// fp64, so an implementation may differ from it in the last bf16 bit before quantisation. Given
/// the same bf16 values, codes and scales are equal in every implementation.
///
/// NaN becomes the code 0x7F, an infinity the largest code; neither enters a scale. A NaN spreads
/// over its own row where LayerNorm or rotation mix channels, never further. T = 0 does nothing.
/// Query and cache must use one scale mode. The caller owns all memory.
///
/// plan() throws Error(kInvalidArgument) for bounds outside the table above, run() for tensors that
/// do not fit the plan, before anything is written. Bitwise equal for any number of threads and
/// whatever other rows the call has. Thread-safe: one workspace per concurrent run.
///
/// Source: DeepSeek-V3.2 (lightning indexer); docs/index_quantize.md.
class FOVEA_API IndexQuantize : public OperatorPlan<IndexQuantizeProblem, IndexQuantizeTensors> {
 public:
  static IndexQuantize plan(const IndexQuantizeProblem& problem, const Device& device,
                            const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
