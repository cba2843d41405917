#include "src/kda/kda_checks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "src/core/check.h"
#include "src/kda/kda_state.h"

namespace fovea::internal {
namespace {

// Slots in ascending order, each with the entry it stands at: slot * 2^32 + entry.
int64_t keyed(int32_t slot, int64_t entry) { return (int64_t{slot} << 32) | entry; }

const int32_t* values(const ConstTensorView& view) {
  return static_cast<const int32_t*>(view.data);
}

// Appends the slots in [0, slots) of a list.
int64_t* gather(const ConstTensorView& list, int64_t slots, int64_t* end) {
  if (!list.defined()) return end;
  for (int64_t i = 0; i < list.shape[0]; ++i) {
    const int32_t slot = values(list)[i];
    if (slot >= 0 && slot < slots) *end++ = keyed(slot, i);
  }
  return end;
}

// The lowest entry whose slot an earlier entry has too; -1: none. Sorts.
int64_t first_duplicate(int64_t* begin, int64_t* end) {
  std::sort(begin, end);
  int64_t lowest = -1;
  for (const int64_t* key = begin; key + 1 < end; ++key) {
    if ((key[0] >> 32) != (key[1] >> 32)) continue;
    const int64_t entry = key[1] & 0xFFFFFFFF;
    if (lowest < 0 || entry < lowest) lowest = entry;
  }
  return lowest;
}

bool has_slot(const int64_t* begin, const int64_t* end, int32_t slot) {
  const int64_t* found = std::lower_bound(begin, end, keyed(slot, 0));
  return found != end && (*found >> 32) == slot;
}

int64_t find_offset_fault(const KdaContents& contents) {
  const PackedOffsets offsets(contents.q_indptr, contents.num_rows);
  int64_t previous = 0;
  for (int64_t i = 0; i <= offsets.sequences; ++i) {
    const int64_t value = offsets.raw(i);
    if (value < previous || value > contents.num_rows) return i;
    previous = value;
  }
  return -1;
}

int64_t find_large_slot(const ConstTensorView& list, int64_t slots) {
  if (!list.defined()) return -1;
  for (int64_t i = 0; i < list.shape[0]; ++i) {
    if (values(list)[i] >= slots) return i;
  }
  return -1;
}

KdaFinding find_snapshot_fault(const KdaContents& contents, int64_t* scratch) {
  const PackedOffsets offsets(contents.q_indptr, contents.num_rows);
  const int64_t count = contents.snapshot_seq.shape[0];
  const auto is_padding = [&](int64_t i) { return values(contents.snapshot_slot)[i] < 0; };
  for (int64_t i = 0; i < count; ++i) {
    if (is_padding(i)) continue;
    const int32_t sequence = values(contents.snapshot_seq)[i];
    if (sequence < 0 || sequence >= offsets.sequences) return {KdaFault::kSnapshotSequence, i};
  }
  for (int64_t i = 0; i < count; ++i) {
    if (is_padding(i)) continue;
    const int32_t sequence = values(contents.snapshot_seq)[i];
    const int64_t length = offsets.raw(sequence + 1) - offsets.raw(sequence);
    if (!snapshot_is_legal(values(contents.snapshot_pos)[i], length, contents.snapshot_interval)) {
      return {KdaFault::kSnapshotPosition, i};
    }
  }
  int64_t* used_end = gather(contents.in_slot, contents.slots, scratch);
  used_end = gather(contents.out_slot, contents.slots, used_end);
  std::sort(scratch, used_end);
  int64_t lowest = -1;
  for (int64_t i = 0; i < count && lowest < 0; ++i) {
    const int32_t slot = values(contents.snapshot_slot)[i];
    if (slot >= contents.slots || has_slot(scratch, used_end, slot)) lowest = i;
  }
  int64_t* own_end = gather(contents.snapshot_slot, contents.slots, used_end);
  const int64_t duplicate = first_duplicate(used_end, own_end);
  if (duplicate >= 0 && (lowest < 0 || duplicate < lowest)) lowest = duplicate;
  if (lowest >= 0) return {KdaFault::kSnapshotSlot, lowest};
  return {};
}

std::string text_of(const KdaFinding& finding) {
  const std::string at = "[" + std::to_string(finding.entry) + "]";
  switch (finding.fault) {
    case KdaFault::kNone:
      break;
    case KdaFault::kOffsets:
      return "q_indptr" + at + " is below its predecessor or outside 0 .. rows";
    case KdaFault::kInSlot:
      return "in_slot" + at + " is not below the number of slots; pass -1 for none";
    case KdaFault::kOutSlot:
      return "out slot" + at + " is not below the number of slots; pass -1 for none";
    case KdaFault::kDuplicateOutSlot:
      return "out slot" + at + " is also the out slot of an earlier entry";
    case KdaFault::kSnapshotSequence:
      return "snapshot_seq" + at + " is no sequence of the call";
    case KdaFault::kSnapshotPosition:
      return "snapshot_pos" + at +
             " is neither 0, the length of its sequence, nor a multiple of the chunk in between";
    case KdaFault::kSnapshotSlot:
      return "snapshot_slot" + at +
             " is not below the number of slots, or in use by the call or an earlier snapshot";
    case KdaFault::kAccepted:
      return "accepted" + at + " is outside 0 .. rows_per_request";
  }
  return {};
}

}  // namespace

void check_float_type(const char* op, const char* name, DType dtype) {
  if (dtype == DType::kBf16 || dtype == DType::kF32) return;
  invalid(op, std::string(name) + " = " + std::string(to_string(dtype)) + ", expected bf16 or f32");
}

void check_kda_gate(const char* op, const KdaGate& gate) {
  check_float_type(op, "gate.dtype", gate.dtype);
  if (gate.kind > GateKind::kGiven) invalid(op, "gate.kind is none of GateKind");
  if (gate.kind == GateKind::kLowerBound && !(gate.lower_bound >= -5 && gate.lower_bound < 0)) {
    invalid(op, "lower_bound = " + std::to_string(gate.lower_bound) + ", expected [-5, 0)");
  }
}

void check_kda_layer(const char* op, const KdaLayer& layer) {
  constexpr int64_t kMaxHeadDim = 256;
  check_range(op, "num_heads", layer.num_heads, 1, kMaxKdaCount);
  check_range(op, "num_value_heads", layer.num_value_heads, 1, kMaxKdaCount);
  if (layer.num_value_heads % layer.num_heads != 0) {
    invalid(op, "num_value_heads = " + std::to_string(layer.num_value_heads) +
                    ", expected a multiple of num_heads = " + std::to_string(layer.num_heads));
  }
  check_range(op, "head_dim_k", layer.head_dim_k, 1, kMaxHeadDim);
  check_range(op, "head_dim_v", layer.head_dim_v, 1, kMaxHeadDim);
  check_kda_gate(op, layer.gate);
  if (layer.beta_kind > BetaKind::kLogit) invalid(op, "beta_kind is none of BetaKind");
  if (layer.scale != 0) check_positive_finite(op, "scale", layer.scale);
  check_float_type(op, "beta_dtype", layer.beta_dtype);
  check_float_type(op, "state_dtype", layer.state_dtype);
}

void check_gate_tensors(const char* op, const KdaGate& gate, int64_t num_value_heads,
                        int64_t head_dim_k, const ConstTensorView& a_log,
                        const ConstTensorView& dt_bias) {
  if (gate.kind == GateKind::kGiven) {
    if (a_log.defined()) invalid(op, "a_log is taken by raw gates only; gate is given");
    if (dt_bias.defined()) invalid(op, "dt_bias is taken by raw gates only; gate is given");
    return;
  }
  if (gate.kind == GateKind::kSoftplus) {
    check_tensor(op, "a_log", a_log, DType::kF32, {num_value_heads});
  } else {
    check_optional(op, "a_log", a_log, DType::kF32, {num_value_heads});
  }
  check_optional(op, "dt_bias", dt_bias, DType::kF32, {num_value_heads, head_dim_k});
}

void check_kda_rows(const char* op, const KdaLayer& layer, const KdaRows& rows, int64_t num_rows) {
  const int64_t heads = layer.num_heads;
  const int64_t value_heads = layer.num_value_heads;
  check_tensor(op, "q", rows.q, DType::kBf16, {num_rows, heads, layer.head_dim_k});
  check_tensor(op, "k", rows.k, DType::kBf16, {num_rows, heads, layer.head_dim_k});
  check_tensor(op, "v", rows.v, DType::kBf16, {num_rows, value_heads, layer.head_dim_v});
  check_tensor(op, "g", rows.g, layer.gate.dtype, {num_rows, value_heads, layer.head_dim_k});
  check_tensor(op, "beta", rows.beta, layer.beta_dtype, {num_rows, value_heads});
  check_gate_tensors(op, layer.gate, value_heads, layer.head_dim_k, rows.a_log, rows.dt_bias);
}

void check_kda_rows(const char* op, const KdaLayer& layer, const KdaRows& separate,
                    const ConstTensorView& qkv, int64_t num_rows) {
  if (qkv.defined()) {
    if (separate.q.defined() || separate.k.defined() || separate.v.defined()) {
      invalid(op, "qkv comes instead of q, k and v; pass one form");
    }
    const int64_t keys = layer.num_heads * layer.head_dim_k;
    check_tensor(op, "qkv", qkv, DType::kBf16,
                 {num_rows, 2 * keys + layer.num_value_heads * layer.head_dim_v});
  }
  check_kda_rows(op, layer, split_qkv(layer, separate, qkv), num_rows);
}

void check_indptr(const char* op, const ConstTensorView& q_indptr, int64_t max_sequences) {
  const DType dtype = q_indptr.dtype == DType::kI64 ? DType::kI64 : DType::kI32;
  check_tensor(op, "q_indptr", q_indptr, dtype, {kAnyExtent});
  check_range(op, "q_indptr.shape[0]", q_indptr.shape[0], 1, max_sequences + 1);
}

void check_no_aliasing(const char* op, const char* name, const ConstTensorView& tensor) {
  if (tensor.num_elements() == 0) return;
  // The axes with more than one entry are visited by ascending stride.
  std::array<bool, kMaxRank> visited{};
  int64_t reach = 1;  // elements from the first to the last one of the visited axes
  for (int step = 0; step < tensor.rank; ++step) {
    int next = -1;
    for (int axis = 0; axis < tensor.rank; ++axis) {
      const auto i = static_cast<size_t>(axis);
      if (visited[i] || tensor.shape[i] <= 1) continue;
      if (next < 0 || tensor.stride[i] < tensor.stride[static_cast<size_t>(next)]) next = axis;
    }
    if (next < 0) return;
    const auto i = static_cast<size_t>(next);
    visited[i] = true;
    if (tensor.stride[i] < reach) {
      invalid(op, std::string(name) + " = " + to_string(tensor) +
                      ": its elements overlap along axis " + std::to_string(next) +
                      " and are written; expected a stride of at least " + std::to_string(reach));
    }
    reach += (tensor.shape[i] - 1) * tensor.stride[i];
  }
}

void check_slots(const char* op, const char* name, const ConstTensorView& slots, int64_t count) {
  check_optional(op, name, slots, DType::kI32, {count});
}

void check_report(const char* op, const ConstTensorView& report, bool check) {
  if (report.defined() && !check) invalid(op, "report is written with check only; set check");
  check_optional(op, "report", report, DType::kI32, {2});
}

KdaFinding find_fault(const KdaContents& contents, int64_t* scratch) {
  int64_t entry = -1;
  if (contents.q_indptr.defined()) {
    entry = find_offset_fault(contents);
    if (entry >= 0) return {KdaFault::kOffsets, entry};
  }
  entry = find_large_slot(contents.in_slot, contents.slots);
  if (entry >= 0) return {KdaFault::kInSlot, entry};
  entry = find_large_slot(contents.out_slot, contents.slots);
  if (entry >= 0) return {KdaFault::kOutSlot, entry};
  if (contents.out_slots_are_read) return {};
  entry = first_duplicate(scratch, gather(contents.out_slot, contents.slots, scratch));
  if (entry >= 0) return {KdaFault::kDuplicateOutSlot, entry};
  if (contents.snapshot_seq.defined()) return find_snapshot_fault(contents, scratch);
  return {};
}

KdaFinding find_commit_fault(const CommitContents& contents, int64_t* scratch) {
  int64_t entry = find_large_slot(contents.in_slot, contents.slots);
  if (entry >= 0) return {KdaFault::kInSlot, entry};
  for (const ConstTensorView* list : {&contents.slot, &contents.track_slot}) {
    entry = find_large_slot(*list, contents.slots);
    if (entry >= 0) return {KdaFault::kOutSlot, entry};
  }
  const int64_t requests = contents.slot.shape[0];
  int64_t* end = scratch;
  int64_t fault = -1;
  const auto gather_active = [&](const ConstTensorView& list, const ConstTensorView& counts,
                                 int64_t first_entry) {
    if (!list.defined()) return;
    for (int64_t r = 0; r < requests; ++r) {
      const int32_t slot = values(list)[r], count = values(counts)[r];
      const bool is_legal = count >= 0 && count <= contents.rows_per_request;
      if (!is_legal && (fault < 0 || r < fault)) fault = r;
      if (slot >= 0 && is_legal && count > 0) *end++ = keyed(slot, first_entry + r);
    }
  };
  gather_active(contents.slot, contents.accepted, 0);
  gather_active(contents.track_slot, contents.track_accepted, requests);
  entry = first_duplicate(scratch, end);
  if (entry >= 0) return {KdaFault::kDuplicateOutSlot, entry % requests};
  if (fault >= 0) return {KdaFault::kAccepted, fault};
  return {};
}

void report_fault(const char* op, const KdaFinding& finding, const TensorView& report) {
  if (report.defined()) {
    auto* words = static_cast<int32_t*>(report.data);
    words[0] = static_cast<int32_t>(finding.fault);
    words[1] = checked_cast<int32_t>(finding.entry);
  }
  if (finding.fault == KdaFault::kNone) return;
  invalid(op, text_of(finding) + " (" + std::string(to_string(finding.fault)) + ")");
}

}  // namespace fovea::internal
