#pragma once

#include <cstdint>

#include "fovea/kda.h"
#include "fovea/tensor.h"
#include "src/core/workspace.h"
#include "src/kda/kda_rows.h"

/// Checks that the operators of the room share.
namespace fovea::internal {

/// Offsets and slots are int32 in the tensors.
inline constexpr int64_t kMaxKdaCount = INT32_MAX;

/// dtype is one of f32 and bf16.
void check_float_type(const char* op, const char* name, DType dtype);
void check_kda_gate(const char* op, const KdaGate& gate);
void check_kda_layer(const char* op, const KdaLayer& layer);

/// a_log and dt_bias against the kind of the gate.
void check_gate_tensors(const char* op, const KdaGate& gate, int64_t num_value_heads,
                        int64_t head_dim_k, const ConstTensorView& a_log,
                        const ConstTensorView& dt_bias);
/// Every tensor of `rows` has `num_rows` rows of the layer's shape.
void check_kda_rows(const char* op, const KdaLayer& layer, const KdaRows& rows, int64_t num_rows);
/// The same for an operator that takes `qkv` [T, 2*H*K + HV*V] instead of q, k and v.
void check_kda_rows(const char* op, const KdaLayer& layer, const KdaRows& separate,
                    const ConstTensorView& qkv, int64_t num_rows);
/// An i32 or i64 vector of 1 .. max_sequences + 1 offsets.
void check_indptr(const char* op, const ConstTensorView& q_indptr, int64_t max_sequences);
/// Requires of a tensor that passed check_tensor and is written that no two of its elements share
/// memory: sorted by stride, every axis steps over all that the smaller ones reach. In an
/// overlapping view one element's value would appear in another.
void check_no_aliasing(const char* op, const char* name, const ConstTensorView& tensor);
/// An i32 vector [count], or absent.
void check_slots(const char* op, const char* name, const ConstTensorView& slots, int64_t count);
/// `report` is i32 [2] and comes with `check` only.
void check_report(const char* op, const ConstTensorView& report, bool check);

/// A fault of device contents and the entry that shows it; -1 without one.
struct KdaFinding {
  KdaFault fault = KdaFault::kNone;
  int64_t entry = -1;
};

/// The contents that `check` judges; absent lists are not looked at.
struct KdaContents {
  ConstTensorView q_indptr{};  // i32 or i64 [N+1]
  int64_t num_rows = 0;        // T
  ConstTensorView in_slot{}, out_slot{};
  int64_t slots = 0;  // of the pool
  ConstTensorView snapshot_seq{}, snapshot_pos{}, snapshot_slot{};
  int64_t snapshot_interval = 64;   // 1: every position is legal
  bool out_slots_are_read = false;  // they may repeat
};

/// The contents of a commit that `check` judges.
struct CommitContents {
  ConstTensorView in_slot{}, slot{}, accepted{}, track_slot{}, track_accepted{};
  int64_t slots = 0;             // of the pool
  int64_t rows_per_request = 0;  // Td
};

/// Workspace of find_fault for up to `max_slots` in and out slots and `max_snapshots` snapshots:
/// elements of int64_t.
inline int64_t fault_scratch_elements(int64_t max_slots, int64_t max_snapshots) {
  return 2 * max_slots + max_snapshots;
}

/// The first fault in the order of KdaFault, at its lowest entry. Does not allocate.
KdaFinding find_fault(const KdaContents& contents, int64_t* scratch);

/// The same for a commit, with fault_scratch_elements(R, 0). An out slot is active where its count
/// commits something; a track slot counts as an out slot, its entry is the request.
KdaFinding find_commit_fault(const CommitContents& contents, int64_t* scratch);

/// Writes `report` where there is one and throws Error(kInvalidArgument) for a fault.
void report_fault(const char* op, const KdaFinding& finding, const TensorView& report);

}  // namespace fovea::internal
