#pragma once

#include <algorithm>
#include <cstdint>

#include "fovea/export.h"
#include "fovea/kda.h"
#include "fovea/numeric.h"
#include "fovea/tensor.h"

/// Where the sequences of a KDA call lie, and where their states are stored. Device contents are
/// untrusted: everything here masks or clamps them. Usable on the host and the device.
namespace fovea::internal {

/// States [entries, HV, V, K], or [entries, HV, K, V], of fp32 or bf16.
struct StateAccess {
  void* data = nullptr;
  bool is_bf16 = false;
  int64_t entries = 0;
  int64_t entry_stride = 0, head_stride = 0, v_stride = 0, k_stride = 0;  // elements

  StateAccess() = default;
  StateAccess(const ConstTensorView& view, StateLayout layout) {
    if (!view.defined()) return;
    data = const_cast<void*>(view.data);
    is_bf16 = view.dtype == DType::kBf16;
    entries = view.shape[0];
    entry_stride = view.stride[0];
    head_stride = view.stride[1];
    v_stride = layout == StateLayout::kVk ? view.stride[2] : 1;
    k_stride = layout == StateLayout::kVk ? 1 : view.stride[2];
  }

  FOVEA_HOST_DEVICE int64_t offset(int64_t entry, int64_t head, int64_t v, int64_t k) const {
    return entry * entry_stride + head * head_stride + v * v_stride + k * k_stride;
  }
  FOVEA_HOST_DEVICE float load(int64_t entry, int64_t head, int64_t v, int64_t k) const {
    const int64_t at = offset(entry, head, v, k);
    return is_bf16 ? bf16_to_float(static_cast<const bf16_t*>(data)[at])
                   : static_cast<const float*>(data)[at];
  }
  FOVEA_HOST_DEVICE void store(int64_t entry, int64_t head, int64_t v, int64_t k,
                               float value) const {
    const int64_t at = offset(entry, head, v, k);
    if (is_bf16) {
      static_cast<bf16_t*>(data)[at] = bf16_from_float(value);
    } else {
      static_cast<float*>(data)[at] = value;
    }
  }
};

/// Which entry a sequence starts from and which one takes its final state.
struct StateRoutes {
  bool stored = false;  ///< There is a state tensor.
  bool listed = false;  ///< There is a slot list; otherwise entry n belongs to sequence n.
  int64_t entries = 0;
  const int32_t* in_slot = nullptr;
  const int32_t* out_slot = nullptr;
  const uint8_t* has_initial_state = nullptr;

  StateRoutes() = default;
  StateRoutes(const ConstTensorView& state, const ConstTensorView& in, const ConstTensorView& out,
              const ConstTensorView& initial)
      : stored(state.defined()),
        listed(in.defined() || out.defined()),
        entries(state.defined() ? state.shape[0] : 0),
        in_slot(static_cast<const int32_t*>(in.data)),
        out_slot(static_cast<const int32_t*>(out.data)),
        has_initial_state(static_cast<const uint8_t*>(initial.data)) {}

  /// The entry that sequence n starts from; -1: zero.
  FOVEA_HOST_DEVICE int64_t start(int64_t n) const {
    if (has_initial_state != nullptr && has_initial_state[n] == 0) return -1;
    return entry_of(in_slot, n);
  }
  /// The entry that takes its final state; -1: none.
  FOVEA_HOST_DEVICE int64_t finish(int64_t n) const { return entry_of(out_slot, n); }
  /// Whether a sequence without rows leaves its entry alone: it has one entry for both.
  FOVEA_HOST_DEVICE bool in_place(int64_t n) const {
    return !listed || entry_of(in_slot, n) == entry_of(out_slot, n);
  }
  /// Whether entry n of a call with one slot a row or request is padding: it names a slot that does
  /// not exist.
  FOVEA_HOST_DEVICE bool is_padding(int64_t n) const { return stored && entry_of(out_slot, n) < 0; }

 private:
  FOVEA_HOST_DEVICE int64_t entry_of(const int32_t* slots, int64_t n) const {
    if (!stored) return -1;
    if (!listed) return n;
    if (slots == nullptr || slots[n] < 0 || slots[n] >= entries) return -1;
    return slots[n];
  }
};

/// Untrusted offsets of packed rows, i32 or i64, cut to [0, extent].
struct PackedOffsets {
  const void* data = nullptr;
  bool is_i64 = false;
  int64_t sequences = 0;
  int64_t extent = 0;

  PackedOffsets() = default;
  PackedOffsets(const ConstTensorView& indptr, int64_t num_rows)
      : data(indptr.data),
        is_i64(indptr.dtype == DType::kI64),
        sequences(indptr.shape[0] - 1),
        extent(num_rows) {}

  FOVEA_HOST_DEVICE int64_t raw(int64_t i) const {
    return is_i64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  FOVEA_HOST_DEVICE int64_t clamped(int64_t i) const {
    const int64_t value = raw(i);
    return value < 0 ? 0 : value > extent ? extent : value;
  }
};

/// The rows [begin, end) of one sequence.
struct SequenceRows {
  int64_t begin = 0;
  int64_t end = 0;
  FOVEA_HOST_DEVICE int64_t length() const { return end - begin; }
};

/// Reads the rows of sequences 0, 1, 2, ... in order: an offset that falls is raised to its
/// predecessor, so that sequences are disjoint.
class SequenceReader {
 public:
  FOVEA_HOST_DEVICE explicit SequenceReader(const PackedOffsets& offsets)
      : offsets_(offsets), begin_(offsets.clamped(0)) {}

  FOVEA_HOST_DEVICE SequenceRows next() {
    const int64_t end = offsets_.clamped(++sequence_);
    const SequenceRows rows{begin_, end < begin_ ? begin_ : end};
    begin_ = rows.end;
    return rows;
  }

 private:
  PackedOffsets offsets_;
  int64_t begin_;
  int64_t sequence_ = 0;
};

/// Length of the chunks that snapshots and chunk_states count in.
FOVEA_HOST_DEVICE inline int64_t snapshot_interval(int64_t chunk) {
  return chunk == 0 ? 64 : chunk;
}

/// Whether position p of a sequence of `length` tokens may be kept as a snapshot.
FOVEA_HOST_DEVICE inline bool snapshot_is_legal(int64_t p, int64_t length, int64_t interval) {
  return p == length || (p >= 0 && p < length && p % interval == 0);
}

}  // namespace fovea::internal
