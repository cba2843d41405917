#pragma once

#include <cstdint>

#include "src/core/access.h"
#include "src/serving/v4_rows.h"

/// What the functions of v4_rows.h compute for one row, state or token, on any device.
namespace fovea::internal {

struct RowFactsView {
  Accessor<const int32_t, 1> row_len;
  Accessor<const int32_t, 1> row_to_request;
  Accessor<const int32_t, 2> window_indices;
  Accessor<const int32_t, 1> window_len;
  int64_t topk = 0;
  Accessor<int32_t, 1> positions;
  Accessor<int32_t, 1> window_slots;
  Accessor<int32_t, 1> csa_len;
  Accessor<int32_t, 1> selected_len;
  Accessor<int32_t, 1> hca_len;

  RowFactsView() = default;
  explicit RowFactsView(const V4RowFacts& facts);

  FOVEA_HOST_DEVICE void fill(int64_t t) const {
    int32_t len = 0;
    if (t < row_len.shape[0] && row_to_request(t) >= 0 && row_len(t) > 0) len = row_len(t);
    const int32_t columns = window_len(t);
    positions(t) = len - 1;
    window_slots(t) = len > 0 && columns > 0 ? window_indices(t, columns - 1) : -1;
    csa_len(t) = len / 4;
    selected_len(t) = static_cast<int32_t>(len / 4 < topk ? len / 4 : topk);
    hca_len(t) = len / 128;
  }
};

struct StateCopyView {
  const float* source = nullptr;
  float* target = nullptr;
  int64_t source_stride = 0, target_stride = 0;
  int64_t source_states = 0, target_states = 0;
  int64_t elements = 0;  // of a state
  Accessor<const int32_t, 1> from, to;

  StateCopyView() = default;
  explicit StateCopyView(const StateCopy& copy);

  FOVEA_HOST_DEVICE bool moves(int64_t r) const {
    const int64_t in = from(r), out = to(r);
    return in >= 0 && in < source_states && out >= 0 && out < target_states &&
           (source != target || in != out);
  }
};

/// One token of a snapshot: where it is and where it goes.
struct SnapshotToken {
  const float* values = nullptr;  // C values, then C logits
  const float* ape = nullptr;     // null: added already
  float* to = nullptr;

  FOVEA_HOST_DEVICE bool exists() const { return values != nullptr; }
  FOVEA_HOST_DEVICE float logit(int64_t i, int64_t channels) const {
    const float logit = values[channels + i];
    return ape != nullptr ? logit + ape[i] : logit;
  }
};

/// A ring entry holds C values, then C logits, packed.
struct SnapshotView {
  Accessor<const float, 2> kv_gate;
  Accessor<const float, 2> ape;
  Accessor<const int32_t, 1> kv_len, q_indptr, slot, seq, pos, to;
  Accessor<float, 4> state;

  SnapshotView() = default;
  explicit SnapshotView(const StateSnapshots& snapshots);

  /// The token `back` before the last one of snapshot m, 0 <= back < S.
  FOVEA_HOST_DEVICE SnapshotToken token(int64_t m, int64_t back) const {
    const int64_t r = seq(m), target = to(m);
    if (r < 0 || r >= kv_len.shape[0] || target < 0 || target >= state.shape[0]) return {};
    const int64_t first = q_indptr(r), rows = q_indptr(r + 1) - first;
    const int64_t count = pos(m);  // rows of the call before the snapshot
    if (count < 0 || count > rows || first < 0 || first + rows > kv_gate.shape[0]) return {};
    const int64_t t = kv_len(r) - rows + count - 1 - back;
    if (t < 0) return {};
    const int64_t ring = state.shape[1];
    float* const kept = state.row(target, t % ring, 0);
    if (back < count) {
      return {kv_gate.row(first + count - 1 - back), ape.row(t % ape.shape[0]), kept};
    }
    const int64_t own = slot(r);
    if (own < 0 || own >= state.shape[0]) return {};
    return {state.row(own, t % ring, 0), nullptr, kept};
  }
};

struct KeptRowsView {
  Accessor<const int32_t, 1> row_to_request;
  Accessor<const int32_t, 1> accepted;
  int64_t rows = 1;
  Accessor<int32_t, 1> kept;

  KeptRowsView() = default;
  explicit KeptRowsView(const AcceptedRows& given);

  FOVEA_HOST_DEVICE int32_t request(int64_t t) const {
    const int32_t r = row_to_request(t);
    if (r < 0 || r >= accepted.shape[0]) return -1;
    return t - r * rows < accepted(r) ? r : -1;
  }
};

}  // namespace fovea::internal
