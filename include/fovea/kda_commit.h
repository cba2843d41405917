#pragma once

#include <cstdint>

#include "fovea/causal_conv1d.h"
#include "fovea/export.h"
#include "fovea/kda_verify.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct KdaCommitProblem {
  int64_t num_value_heads = 0;  ///< HV >= 1.
  int64_t head_dim_k = 128;     ///< K, 1..256.
  int64_t head_dim_v = 128;     ///< V, 1..256.
  DType state_dtype = DType::kF32;
  VerifyMode mode = VerifyMode::kStates;
  int64_t max_requests = 0;      ///< Upper bound of R.
  int64_t rows_per_request = 0;  ///< Td >= 1.
  /// L >= 1: every layer in one call, see KdaCommitTensors; 0: one layer.
  int64_t num_layers = 0;
  WindowLayout window_layout = WindowLayout::kWd;
  bool check = false;  ///< As in KdaPrefillProblem.
};

/// With num_layers = L the tensors of a layer begin with an axis [L]: scratch [L, R, Td, HV, V * K]
/// (states, one axis for V and K) or [L, R, Td, HV, 2K + V], state [L, slots, HV, V, K],
/// window_scratch [L, R, Td, 3, D], window_state [L, slots, 3, D] or [L, slots, D, 3]. Counts and
/// slots are those of every layer.
struct KdaCommitTensors {
  ConstTensorView scratch{};   ///< f32, as the verify wrote it
  ConstTensorView accepted{};  ///< i32 [R]: tokens of the verify that stay, its first one included
  ConstTensorView slot{};      ///< i32 [R]: where the state goes
  TensorView state{};          ///< f32 or bf16 [slots, HV, V, K], updated
  ConstTensorView in_slot{};   ///< optional i32 [R], kRecords: where the verify read; absent: slot
  ConstTensorView has_initial_state{};  ///< optional u8 [R], kRecords: as in the verify
  ConstTensorView parent{};             ///< optional i32 [Td], as in the verify
  ConstTensorView track_slot{};         ///< optional i32 [R]: a second destination
  ConstTensorView track_accepted{};     ///< i32 [R]; with track_slot: its own count
  ConstTensorView window_scratch{};  ///< optional bf16 [R, Td, 3, D], of the convolution's verify
  TensorView window_state{};  ///< with window_scratch: bf16 [slots, 3, D] or [slots, D, 3], updated
  TensorView report{};        ///< optional i32 [2], with check
};

/// Makes the accepted part of a verify the committed state.
///
/// With a = accepted[r], m = a - 1 the last node that stays (with `parent`, a is 1 + the accepted
/// node) and G_j the sum of the log decays of the nodes on the path from the committed state up to
/// and including node j:
///   kStates:  S = scratch[r, m]
///   kRecords: S = diag(exp(G_m)) S0 + sum_j (k_j * exp(G_m - G_j)) u_j^T over the path to m
/// S is rounded once to the pool's type and stored in slot[r]; window_scratch[r, m] becomes the
/// window of the same slot. a = 0, or a outside [0, Td]: nothing is committed. A slot outside
/// [0, slots): nothing is stored there. track_slot[r] receives the state and window of
/// track_accepted[r] in the same way; slots and track slots that are written must be distinct.
///
/// in_slot[r] may be slot[r] or another slot, but not one that a different request writes; outside
/// [0, slots) the verify kept nothing for the request, and nothing is committed (kRecords). A
/// state that is not used as S0 may hold NaN.
///
/// Nothing but the written slots changes. Thread count and batch mates change no bit. Errors as
/// KdaPrefill.
class FOVEA_API KdaCommit : public OperatorPlan<KdaCommitProblem, KdaCommitTensors> {
 public:
  static KdaCommit plan(const KdaCommitProblem& problem, const Device& device,
                        const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
