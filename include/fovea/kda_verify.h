#pragma once

#include <cstdint>
#include <string_view>

#include "fovea/export.h"
#include "fovea/kda.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// What a verify keeps for the commit.
enum class VerifyMode : uint8_t {
  kStates,   ///< The state after each row: [R, Td, HV, V, K].
  kRecords,  ///< What rebuilds it: [R, Td, HV, 2K + V], k as used, log decay (natural), then u.
};

/// "states", "records".
FOVEA_API std::string_view to_string(VerifyMode mode) noexcept;

struct KdaVerifyProblem {
  KdaLayer layer;
  VerifyMode mode = VerifyMode::kStates;
  int64_t max_requests = 0;      ///< Upper bound of R.
  int64_t rows_per_request = 0;  ///< Td >= 1.
  bool check = false;            ///< As in KdaPrefillProblem.
};

/// Row r * Td + t is draft token t of request r.
struct KdaVerifyTensors {
  ConstTensorView q{};                  ///< bf16 [R*Td, H, K]
  ConstTensorView k{};                  ///< bf16 [R*Td, H, K]
  ConstTensorView v{};                  ///< bf16 [R*Td, HV, V]
  ConstTensorView qkv{};                ///< instead of q, k, v: bf16 [R*Td, 2*H*K + HV*V]
  ConstTensorView g{};                  ///< bf16 or f32 [R*Td, HV, K]
  ConstTensorView beta{};               ///< bf16 or f32 [R*Td, HV]
  ConstTensorView a_log{};              ///< f32 [HV], as in KdaGateTensors
  ConstTensorView dt_bias{};            ///< optional f32 [HV, K]
  ConstTensorView state{};              ///< f32 or bf16 [slots, HV, V, K], only read
  ConstTensorView slot{};               ///< optional i32 [R]; absent: request r owns entry r
  ConstTensorView has_initial_state{};  ///< optional u8 [R]; 0: starts at zero
  ConstTensorView
      parent{};          ///< optional i32 [Td]: the row after which row t comes, in -1..t-1
                         ///< (-1: the committed state); anything else counts as -1. Absent: t - 1.
  TensorView out{};      ///< bf16 [R*Td, HV, V]
  TensorView scratch{};  ///< f32, of the mode's shape
  TensorView report{};   ///< optional i32 [2], with check
};

/// The recurrence of KdaLayer over Td drafted rows of each request, from the request's committed
/// state, which is never written; what kda_commit needs goes to `scratch`.
///
/// A request whose slot is outside [0, slots) is padding: its rows of out and scratch are 0. Row t
/// has the bits that it has without the rows behind it, for any thread count and batch mates.
/// Errors as KdaPrefill.
class FOVEA_API KdaVerify : public OperatorPlan<KdaVerifyProblem, KdaVerifyTensors> {
 public:
  static KdaVerify plan(const KdaVerifyProblem& problem, const Device& device,
                        const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
