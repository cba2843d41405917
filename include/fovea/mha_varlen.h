#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct MhaVarlenProblem {
  int64_t max_rows = 0;       ///< Upper bound of T.
  int64_t max_keys = 0;       ///< Upper bound of S.
  int64_t max_requests = 0;   ///< Upper bound of R.
  int64_t num_heads = 0;      ///< H >= 1.
  int64_t head_dim_qk = 192;  ///< Channels of q and k.
  int64_t head_dim_v = 128;   ///< Channels of v and out.
  float softmax_scale = 0;    ///< Finite, > 0.
  bool causal = true;         ///< Right-aligned: row i of n sees keys 0 .. S_r - n + i.
};

struct MhaVarlenTensors {
  ConstTensorView q{};          ///< bf16 [T, H, 192]
  ConstTensorView k{};          ///< bf16 [S, H, 192]
  ConstTensorView v{};          ///< bf16 [S, H, 128]
  ConstTensorView q_indptr{};   ///< i32 [R+1]: rows of request r are q_indptr[r]..q_indptr[r+1]-1
  ConstTensorView kv_indptr{};  ///< i32 [R+1]: its keys
  TensorView out{};             ///< bf16 [T, H, 128]
  TensorView lse{};             ///< f32 [T, H], natural log
};

/// Dense multi-head attention over variable-length requests: the one-shot form of short prefills,
/// in which k and v hold the prefix and the new tokens of every request, expanded per head.
///
/// For row i of the n rows of a request with m keys, and every head h, over the visible keys j
/// (0 <= j < m, and j <= m - n + i when causal):
///   s_j = softmax_scale * dot(q[i,h,:], k[j,h,:])
///   lse[i,h] = ln sum_j exp(s_j)
///   out[i,h,:] = sum_j exp(s_j - lse[i,h]) * v[j,h,:]
///
/// A row without a visible key (m = 0, or the first rows of a causal request with n > m), or with
/// nothing but scores of -inf: out = 0, lse = -inf. Rows before q_indptr[0] and at or past
/// q_indptr[R] belong to no request: they are neither read nor written. A key that a row does not
/// see has no influence on it, even when it holds NaN; NaN in q or in a visible key gives NaN in
/// the rows and heads that use it only.
///
/// The offsets are device contents and never trusted: each is cut to [0, T] (or [0, S]) and raised
/// to its predecessor, so that requests never overlap.
///
/// Scores, softmax and sums are computed in fp32 or better, the result is rounded to bf16 once; on
/// a GPU each weight is rounded to bf16 for its product with a value, and for nothing else, so that
/// an element of out is off by up to 2^-8 sum_j exp(s_j - lse[i,h]) |v_j| more. The bits of a row
/// depend on its q and its request's keys alone: not on the thread count, nor on other requests,
/// nor on how many rows of its request are computed with it.
///
/// plan() throws Error(kInvalidArgument) for a bound or scale out of range. run() throws it, before
/// it writes, for tensors whose shapes or types contradict the plan; it does not allocate.
/// Thread-safe: one plan may run in several threads, each with its own workspace.
///
/// Source: scaled dot-product attention; multi-head form of latent attention as in DeepSeek-V2.
class FOVEA_API MhaVarlen : public OperatorPlan<MhaVarlenProblem, MhaVarlenTensors> {
 public:
  static MhaVarlen plan(const MhaVarlenProblem& problem, const Device& device,
                        const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
