#include "fovea/kda.h"

namespace fovea {

std::string_view to_string(GateKind kind) noexcept {
  switch (kind) {
    case GateKind::kSoftplus:
      return "softplus";
    case GateKind::kLowerBound:
      return "lower_bound";
    case GateKind::kGiven:
      return "given";
  }
  return "?";
}

std::string_view to_string(BetaKind kind) noexcept {
  return kind == BetaKind::kProb ? "prob" : "logit";
}

std::string_view to_string(StateLayout layout) noexcept {
  return layout == StateLayout::kVk ? "vk" : "kv";
}

std::string_view to_string(CommitMode mode) noexcept {
  return mode == CommitMode::kDirect ? "direct" : "staged";
}

std::string_view to_string(KdaFault fault) noexcept {
  switch (fault) {
    case KdaFault::kNone:
      return "none";
    case KdaFault::kOffsets:
      return "offsets";
    case KdaFault::kInSlot:
      return "in_slot";
    case KdaFault::kOutSlot:
      return "out_slot";
    case KdaFault::kDuplicateOutSlot:
      return "duplicate_out_slot";
    case KdaFault::kSnapshotSequence:
      return "snapshot_sequence";
    case KdaFault::kSnapshotPosition:
      return "snapshot_position";
    case KdaFault::kSnapshotSlot:
      return "snapshot_slot";
    case KdaFault::kAccepted:
      return "accepted";
  }
  return "?";
}

}  // namespace fovea
