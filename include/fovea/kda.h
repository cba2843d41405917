#pragma once

#include <cstdint>
#include <string_view>

#include "fovea/dtype.h"
#include "fovea/export.h"

namespace fovea {

/// What the tensor `g` of a KDA operator holds.
enum class GateKind : uint8_t {
  kSoftplus,    ///< raw: log decay = -exp(a_log) * softplus(g + dt_bias)
  kLowerBound,  ///< raw: log decay = lower_bound * sigmoid(exp(a_log) * (g + dt_bias))
  kGiven,       ///< the log decay itself, <= 0
};

/// "softplus", "lower_bound", "given".
FOVEA_API std::string_view to_string(GateKind kind) noexcept;

/// What the tensor `beta` of a KDA operator holds.
enum class BetaKind : uint8_t {
  kProb,   ///< beta itself, expected in [0, 1] (or [0, 2])
  kLogit,  ///< sigmoid(b), or 2 * sigmoid(b) with allow_neg_eigval
};

/// "prob", "logit".
FOVEA_API std::string_view to_string(BetaKind kind) noexcept;

/// Order of the two inner axes of a state.
enum class StateLayout : uint8_t {
  kVk,  ///< [.., V, K], K contiguous: pools
  kKv,  ///< [.., K, V]: contiguous states of engines that keep it so
};

/// "vk", "kv".
FOVEA_API std::string_view to_string(StateLayout layout) noexcept;

/// When an operator that updates a pool writes it.
enum class CommitMode : uint8_t {
  kDirect,  ///< As the work proceeds, after all that can be checked has been.
  kStaged,  ///< Final states and snapshots go to the workspace; the last step of the run copies
            ///< them, so that whatever fails before leaves the pool bit-identical.
};

/// "direct", "staged".
FOVEA_API std::string_view to_string(CommitMode mode) noexcept;

/// The gate of one KDA layer.
struct KdaGate {
  GateKind kind = GateKind::kSoftplus;
  float lower_bound = -5;      ///< kLowerBound: in [-5, 0).
  DType dtype = DType::kBf16;  ///< Of g: kBf16 or kF32.
};

/// What one KDA layer computes, per token and value head (S is K x V, decay and keys are rows):
///
///   S <- diag(exp(g)) S
///   u  = beta (v - S^T k)          // the decayed state
///   S <- S + k u^T
///   o  = scale S^T q               // the updated state
///
/// Grouped value heads: HV = G * H, value head h reads q and k of head h / G. With `normalise`,
/// q and k are first divided by sqrt(sum x^2 + 1e-6) over their K channels; a zero vector stays
/// zero.
///
/// Source: Kimi Linear technical report (gated delta rule with a decay per channel).
struct KdaLayer {
  int64_t num_heads = 0;        ///< H >= 1, heads of q and k.
  int64_t num_value_heads = 0;  ///< HV, a multiple of H: heads of v, g, beta and the state.
  int64_t head_dim_k = 128;     ///< K, 1..256.
  int64_t head_dim_v = 128;     ///< V, 1..256.
  KdaGate gate;
  BetaKind beta_kind = BetaKind::kProb;
  bool allow_neg_eigval = false;    ///< kLogit: beta = 2 * sigmoid(b); kProb: no meaning.
  bool normalise = false;           ///< L2-normalise q and k.
  float scale = 0;                  ///< Finite, > 0; 0: K^-1/2.
  DType beta_dtype = DType::kF32;   ///< Of beta: kBf16 or kF32.
  DType state_dtype = DType::kF32;  ///< Of stored states: kF32 or kBf16 (rounded to nearest even).
};

/// What `check` finds wrong with the device contents of a KDA call: the first fault in this order,
/// at its lowest entry. A slot below 0 is padding, never a fault; a snapshot with such a slot is
/// not looked at.
enum class KdaFault : int32_t {
  kNone,
  kOffsets,           ///< q_indptr falls, starts below 0 or ends past T; entry: the offset
  kInSlot,            ///< in_slot >= slots; entry: the sequence
  kOutSlot,           ///< out_slot (or slot) >= slots
  kDuplicateOutSlot,  ///< an active out slot of an earlier entry
  kSnapshotSequence,  ///< snapshot_seq outside [0, N); entry: the snapshot
  kSnapshotPosition,  ///< snapshot_pos that is none of the legal positions
  kSnapshotSlot,      ///< snapshot_slot >= slots, or an in or out slot of the call, or a duplicate
  kAccepted,          ///< accepted outside [0, rows_per_request]; entry: the request
};

/// "none", "offsets", ...
FOVEA_API std::string_view to_string(KdaFault fault) noexcept;

}  // namespace fovea
