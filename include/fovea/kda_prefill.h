#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/kda.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct KdaPrefillProblem {
  KdaLayer layer;
  int64_t max_rows = 0;                         ///< Upper bound of T.
  int64_t max_sequences = 0;                    ///< Upper bound of N.
  int64_t max_snapshots = 0;                    ///< Upper bound of M.
  StateLayout state_layout = StateLayout::kVk;  ///< kKv: contiguous states only, without slots.
  int64_t chunk = 0;  ///< C: 16, 32 or 64; 0: the implementation's choice. Snapshots are legal at
                      ///< its multiples (0: of 64).
  /// Columns of V of one chain on a GPU: 16, 32, 64 or 128, a divisor of V; 0: the implementation's
  /// choice. It decides how much runs side by side, no bit of a result. A CPU does not look at it.
  int64_t v_columns = 0;
  CommitMode commit = CommitMode::kDirect;
  bool check = false;  ///< Device contents are judged before anything is written.
};

/// T rows of N sequences, packed: sequence n owns rows q_indptr[n] .. q_indptr[n+1] - 1. A dense
/// [B, T, ..] batch is the packed form with q_indptr = 0, T, 2T, ...
struct KdaPrefillTensors {
  ConstTensorView q{};         ///< bf16 [T, H, K]
  ConstTensorView k{};         ///< bf16 [T, H, K]
  ConstTensorView v{};         ///< bf16 [T, HV, V]
  ConstTensorView g{};         ///< bf16 or f32 [T, HV, K]
  ConstTensorView beta{};      ///< bf16 or f32 [T, HV]
  ConstTensorView q_indptr{};  ///< i32 or i64 [N+1]
  ConstTensorView a_log{};     ///< f32 [HV], as in KdaGateTensors
  ConstTensorView dt_bias{};   ///< optional f32 [HV, K]
  /// Optional, read and updated; f32 or bf16 (layer.state_dtype). With a slot list the pool
  /// [slots, HV, V, K]; otherwise [N, HV, V, K], or [N, HV, K, V] with kKv: entry n belongs to
  /// sequence n. Absent: every sequence starts at zero and nothing is stored.
  TensorView state{};
  ConstTensorView in_slot{};            ///< optional i32 [N]: where sequence n starts
  ConstTensorView out_slot{};           ///< optional i32 [N]: where its final state goes
  ConstTensorView has_initial_state{};  ///< optional u8 [N]; 0: starts at zero, whatever is stored
  ConstTensorView snapshot_seq{};       ///< optional i32 [M]
  ConstTensorView snapshot_pos{};       ///< i32 [M]: tokens of this call
  ConstTensorView snapshot_slot{};      ///< i32 [M]: slots of the same pool
  /// Optional f32 or bf16 (layer.state_dtype) [E, HV, V, K] in state_layout: the state before every
  /// chunk (of 64 rows, or of `chunk`), sequences one after another, ceil(len / chunk) entries
  /// each. Entries past the sum keep their bytes; entries past E are not written.
  TensorView chunk_states{};
  TensorView out{};     ///< bf16 [T, HV, V]
  TensorView report{};  ///< optional i32 [2], with check: KdaFault and the entry that shows it, or
                        ///< kNone and -1
};

/// Kimi Delta Attention over packed sequences: the recurrence of KdaLayer from each sequence's
/// initial state, computed by chunks.
///
/// State of sequence n: it starts from entry in_slot[n] (with has_initial_state[n], absent = 1),
/// from zero when that is absent, outside [0, slots), or has_initial_state[n] is 0; a state that is
/// not used as a start may hold NaN. The final state goes to out_slot[n]; absent or out of range:
/// nothing is stored, `out` is produced all the same. With one of the two lists given, the other
/// absent one means "none"; with neither, entry n of `state` is both. in_slot[n] may equal
/// out_slot[n] (in place) or differ (a fork). An out slot that is another sequence's in or out slot
/// is undefined.
///
/// Length 0: with in = out, or no lists, the bytes stay whatever has_initial_state says; otherwise
/// the out slot becomes a copy of the initial state, zeros where there is none.
///
/// Snapshots: the state of sequence snapshot_seq[m] after snapshot_pos[m] tokens of this call goes
/// to slot snapshot_slot[m], in the pool's type from the fp32 state. Legal positions are 0 (the
/// initial state), the length, and multiples of `chunk` (64 when free) in between. Another
/// position, or a sequence or slot out of range, writes nothing; a position is never rounded.
/// Snapshots need a slot list's pool, not an out slot.
///
/// Rows of no sequence (before q_indptr[0], at or past q_indptr[N]) are not read, and out is not
/// written there. Offsets are cut to [0, T] and raised to their predecessor.
///
/// Outputs before position p and snapshots at or before p have the same bits whatever stands at or
/// behind p, for any thread count and any batch mates. NaN in a row gives NaN from that row on in
/// the value heads that it touches.
///
/// With `check` a fault of the contents (KdaFault) is found before anything is written: on the CPU
/// run() throws Error(kInvalidArgument) naming it; on a GPU the call returns. Either way only
/// `report` has been written.
///
/// plan() throws Error(kInvalidArgument) for a value outside the ranges named above, and for slots
/// with kKv; run() for tensors that contradict the plan, before it writes; it does not allocate.
/// workspace_bytes() depends on the bounds alone. Thread-safe: each run needs its own workspace.
///
/// Source: Kimi Linear technical report; chunk form derived in docs/kda.md.
class FOVEA_API KdaPrefill : public OperatorPlan<KdaPrefillProblem, KdaPrefillTensors> {
 public:
  static KdaPrefill plan(const KdaPrefillProblem& problem, const Device& device,
                         const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
