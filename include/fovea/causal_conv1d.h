#pragma once

#include <cstdint>
#include <string_view>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// Inputs that the convolution looks at: the row's own and the three before it.
inline constexpr int64_t kConvWidth = 4;
/// Rows of a window: the raw inputs that the next row needs.
inline constexpr int64_t kConvHistory = kConvWidth - 1;

/// What the rows of a call are.
enum class ConvMode : uint8_t {
  kPrefill,  ///< Packed sequences; windows are updated.
  kUpdate,   ///< One row per sequence; windows are updated.
  kVerify,   ///< Td drafted rows per request; windows are only read.
};

/// "prefill", "update", "verify".
FOVEA_API std::string_view to_string(ConvMode mode) noexcept;

/// Order of the two inner axes of a window pool.
enum class WindowLayout : uint8_t {
  kWd,  ///< [slots, 3, D], channels contiguous
  kDw,  ///< [slots, D, 3]
};

/// "wd", "dw".
FOVEA_API std::string_view to_string(WindowLayout layout) noexcept;

enum class ConvActivation : uint8_t {
  kSilu,  ///< y * sigmoid(y)
  kNone,
};

/// "silu", "none".
FOVEA_API std::string_view to_string(ConvActivation activation) noexcept;

struct CausalConv1dProblem {
  ConvMode mode = ConvMode::kPrefill;
  int64_t num_channels = 0;           ///< D >= 1.
  int64_t max_rows = 0;               ///< Upper bound of T.
  int64_t max_sequences = 0;          ///< kPrefill: upper bound of N.
  int64_t max_snapshots = 0;          ///< kPrefill: upper bound of M.
  int64_t rows_per_request = 1;       ///< kVerify: Td >= 1.
  DType weight_dtype = DType::kBf16;  ///< Of weight: kBf16 or kF32.
  DType bias_dtype = DType::kBf16;    ///< Of bias, if there is one: kBf16 or kF32.
  ConvActivation activation = ConvActivation::kSilu;
  WindowLayout window_layout = WindowLayout::kWd;
  bool check = false;  ///< As in KdaPrefillProblem.
};

struct CausalConv1dTensors {
  ConstTensorView x{};         ///< bf16 [T, D], raw inputs
  ConstTensorView weight{};    ///< [D, 4]; entry 3 belongs to the row itself
  ConstTensorView bias{};      ///< optional [D]
  TensorView window_state{};   ///< optional bf16 [slots, 3, D] or [slots, D, 3], oldest first;
                               ///< kVerify only reads it
  ConstTensorView q_indptr{};  ///< kPrefill: i32 or i64 [N+1]
  ConstTensorView in_slot{};   ///< kPrefill: optional i32 [N]
  ConstTensorView out_slot{};  ///< kPrefill: optional i32 [N]
  ConstTensorView slot{};      ///< kUpdate: optional i32 [T]; kVerify: optional i32 [R]
  ConstTensorView has_initial_state{};  ///< optional u8 [N], [T] or [R]; 0: a history of zeros
  ConstTensorView snapshot_seq{};       ///< kPrefill: optional i32 [M]
  ConstTensorView snapshot_pos{};       ///< i32 [M]: any position 0..len
  ConstTensorView snapshot_slot{};      ///< i32 [M]
  ConstTensorView parent{};             ///< kVerify: optional i32 [Td], as in KdaVerifyTensors
  TensorView out{};                     ///< bf16 [T, D]
  TensorView window_scratch{};  ///< kVerify: optional bf16 [R, Td, 3, D]: the window after each row
  TensorView report{};          ///< optional i32 [2], with check: a KdaFault and its entry
};

/// Depthwise causal convolution of width 4, as in front of linear attention:
///
///   y[t,d] = activation(bias[d] + sum_{w=0..3} weight[d,w] x[t - 3 + w, d])
///
/// where inputs before the first row of the call come from the sequence's window (its last three
/// raw inputs), or are zero without an initial state. Sums in fp32 in the order w = 0..3, bias
/// first; rounded to bf16 once.
///
/// After L rows the window is the last three of (old window, inputs), so that L = 1 and 2 shift.
/// Slots, lengths of 0, rows of no sequence and snapshots follow KdaPrefill, except that a snapshot
/// position may be any of 0..len; kUpdate follows KdaDecode, kVerify KdaVerify (with `parent`, the
/// history of a row is its path). The window has three rows by contract, never by a stride.
///
/// plan() throws Error(kInvalidArgument) for a value out of range; run() for tensors that
/// contradict the plan, before it writes; it does not allocate. Same bits for any thread count and
/// for any cut of a sequence into calls. Thread-safe.
///
/// Source: short convolution of Mamba-style layers; windows as serving engines keep them.
class FOVEA_API CausalConv1d : public OperatorPlan<CausalConv1dProblem, CausalConv1dTensors> {
 public:
  static CausalConv1d plan(const CausalConv1dProblem& problem, const Device& device,
                           const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
