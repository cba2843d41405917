#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/kda.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct KdaDecodeProblem {
  KdaLayer layer;
  int64_t max_rows = 0;  ///< Upper bound of T.
  bool check = false;    ///< As in KdaPrefillProblem.
};

struct KdaDecodeTensors {
  ConstTensorView q{};        ///< bf16 [T, H, K]
  ConstTensorView k{};        ///< bf16 [T, H, K]
  ConstTensorView v{};        ///< bf16 [T, HV, V]
  ConstTensorView qkv{};      ///< instead of q, k, v: bf16 [T, 2*H*K + HV*V], q then k then v
  ConstTensorView g{};        ///< bf16 or f32 [T, HV, K]
  ConstTensorView beta{};     ///< bf16 or f32 [T, HV]
  ConstTensorView a_log{};    ///< f32 [HV], as in KdaGateTensors
  ConstTensorView dt_bias{};  ///< optional f32 [HV, K]
  TensorView state{};         ///< f32 or bf16 [slots, HV, V, K], updated in place
  ConstTensorView slot{};     ///< optional i32 [T]; absent: row t owns entry t
  ConstTensorView has_initial_state{};  ///< optional u8 [T]; 0: starts at zero
  TensorView out{};                     ///< bf16 [T, HV, V]
  TensorView report{};                  ///< optional i32 [2], with check
};

/// One step of the recurrence of KdaLayer for T independent sequences of one token each.
///
/// A row whose slot is outside [0, slots) is padding: its rows of out are 0, no state is read or
/// written. Active slots must be distinct; `check` reports duplicates. Everything else as
/// KdaPrefill with sequences of length 1: fp32 arithmetic, the state rounded once when it is
/// stored. Batch mates and thread count change no bit of a row.
class FOVEA_API KdaDecode : public OperatorPlan<KdaDecodeProblem, KdaDecodeTensors> {
 public:
  static KdaDecode plan(const KdaDecodeProblem& problem, const Device& device,
                        const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
