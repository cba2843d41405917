#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/kda.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

/// The four stages of a chunked KDA prefill, each an operator of its own: what kernel engineers
/// test and time one by one. KdaPrefill is their composition (it may fuse them).
///
/// Rows are packed as in KdaPrefillTensors. Chunks of C rows start anew with every sequence; chunks
/// are counted sequence by sequence, ceil(len / C) each, E in all; an array [E, ..] may be longer,
/// and of a shorter one the chunks that it lacks are left out. G is the inclusive sum, within the
/// row's chunk, of the log decay in base 2, each term clamped to >= -160.
namespace fovea {

struct KdaStageProblem {
  KdaLayer layer;
  int64_t max_rows = 0;
  int64_t max_sequences = 0;
  int64_t chunk = 64;  ///< C: 16, 32 or 64.
  /// Of k_hat, q_hat, p, x, w, u0, kr, u: kF32, or kBf16 as matrix units take them.
  DType stage_dtype = DType::kF32;
};

struct KdaStageGateTensors {
  ConstTensorView q{}, k{};     ///< bf16 [T, H, K]
  ConstTensorView g{};          ///< bf16 or f32 [T, HV, K]
  ConstTensorView q_indptr{};   ///< i32 or i64 [N+1]
  ConstTensorView a_log{};      ///< f32 [HV]
  ConstTensorView dt_bias{};    ///< optional f32 [HV, K]
  TensorView g_sum{};           ///< f32 [T, HV, K]: G
  TensorView q_hat{}, k_hat{};  ///< stage_dtype [T, H, K]: normalised, or copies; q not yet scaled
};

/// K1: gate, its sums, normalised q and k.
class FOVEA_API KdaStageGate : public OperatorPlan<KdaStageProblem, KdaStageGateTensors> {
 public:
  static KdaStageGate plan(const KdaStageProblem& problem, const Device& device,
                           const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

struct KdaStageIntraTensors {
  ConstTensorView q_hat{}, k_hat{};  ///< stage_dtype [T, H, K]
  ConstTensorView g_sum{};           ///< f32 [T, HV, K]
  ConstTensorView v{};               ///< bf16 [T, HV, V]
  ConstTensorView beta{};            ///< bf16 or f32 [T, HV]
  ConstTensorView q_indptr{};        ///< i32 or i64 [N+1]
  TensorView p{};  ///< stage_dtype [T, HV, C]: P_ij, 0 above the diagonal and past the chunk's rows
  TensorView x{};  ///< stage_dtype [T, HV, C]: (I + A)^-1
  TensorView w{};  ///< stage_dtype [T, HV, K]: X diag(beta) (k * exp2(G))
  TensorView u0{};  ///< stage_dtype [T, HV, V]: X diag(beta) V
  TensorView kr{};  ///< stage_dtype [T, HV, K]: k_j * exp2(G_last - G_j)
};

/// K2: what a chunk needs to know of itself. A_ij = beta_i sum_c k_ic k_jc exp2(G_ic - G_jc) for
/// j < i; P_ij = sum_c q_ic k_jc exp2(G_ic - G_jc) for j <= i.
class FOVEA_API KdaStageIntra : public OperatorPlan<KdaStageProblem, KdaStageIntraTensors> {
 public:
  static KdaStageIntra plan(const KdaStageProblem& problem, const Device& device,
                            const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

struct KdaStageInterTensors {
  ConstTensorView w{}, kr{};        ///< stage_dtype [T, HV, K]
  ConstTensorView u0{};             ///< stage_dtype [T, HV, V]
  ConstTensorView g_sum{};          ///< f32 [T, HV, K]
  ConstTensorView q_indptr{};       ///< i32 or i64 [N+1]
  ConstTensorView initial_state{};  ///< optional f32 [N, HV, V, K]
  TensorView chunk_states{};        ///< f32 [E, HV, V, K]: the state that enters each chunk
  TensorView u{};                   ///< stage_dtype [T, HV, V]: U = U0 - W S0
  TensorView final_state{};         ///< optional f32 [N, HV, V, K]
};

/// K3: the chain over chunks. S1 = diag(exp2(G_last)) S0 + Kr^T U.
class FOVEA_API KdaStageInter : public OperatorPlan<KdaStageProblem, KdaStageInterTensors> {
 public:
  static KdaStageInter plan(const KdaStageProblem& problem, const Device& device,
                            const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

struct KdaStageOutputTensors {
  ConstTensorView q_hat{};         ///< stage_dtype [T, H, K]
  ConstTensorView g_sum{};         ///< f32 [T, HV, K]
  ConstTensorView p{};             ///< stage_dtype [T, HV, C]
  ConstTensorView chunk_states{};  ///< f32 [E, HV, V, K]
  ConstTensorView u{};             ///< stage_dtype [T, HV, V]
  ConstTensorView q_indptr{};      ///< i32 or i64 [N+1]
  TensorView out{};                ///< bf16 [T, HV, V]
};

/// K4: O = scale * ((q * exp2(G)) S0 + P U).
class FOVEA_API KdaStageOutput : public OperatorPlan<KdaStageProblem, KdaStageOutputTensors> {
 public:
  static KdaStageOutput plan(const KdaStageProblem& problem, const Device& device,
                             const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
