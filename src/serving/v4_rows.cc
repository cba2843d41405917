#include "src/serving/v4_rows.h"

#include <algorithm>

#include "fovea/plan.h"
#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/serving/v4_rows_impl.h"

namespace fovea::internal {

RowFactsView::RowFactsView(const V4RowFacts& facts)
    : row_len(access<const int32_t, 1>(facts.row_len)),
      row_to_request(access<const int32_t, 1>(facts.row_to_request)),
      window_indices(access<const int32_t, 2>(facts.window_indices)),
      window_len(access<const int32_t, 1>(facts.window_len)),
      topk(facts.topk),
      positions(access<int32_t, 1>(facts.positions)),
      window_slots(access<int32_t, 1>(facts.window_slots)),
      csa_len(access<int32_t, 1>(facts.csa_len)),
      selected_len(access<int32_t, 1>(facts.selected_len)),
      hca_len(access<int32_t, 1>(facts.hca_len)) {}

StateCopyView::StateCopyView(const StateCopy& copy)
    : source(static_cast<const float*>(copy.source.data)),
      target(static_cast<float*>(copy.target.data)),
      source_stride(copy.source.stride[0]),
      target_stride(copy.target.stride[0]),
      source_states(copy.source.shape[0]),
      target_states(copy.target.shape[0]),
      elements(1),
      from(access<const int32_t, 1>(copy.from)),
      to(access<const int32_t, 1>(copy.to)) {
  for (int axis = 1; axis < copy.source.rank; ++axis) elements *= copy.source.shape[axis];
}

SnapshotView::SnapshotView(const StateSnapshots& snapshots)
    : kv_gate(access<const float, 2>(snapshots.kv_gate)),
      ape(access<const float, 2>(snapshots.ape)),
      kv_len(access<const int32_t, 1>(snapshots.kv_len)),
      q_indptr(access<const int32_t, 1>(snapshots.q_indptr)),
      slot(access<const int32_t, 1>(snapshots.slot)),
      seq(access<const int32_t, 1>(snapshots.seq)),
      pos(access<const int32_t, 1>(snapshots.pos)),
      to(access<const int32_t, 1>(snapshots.to)),
      state(access<float, 4>(snapshots.state)) {}

KeptRowsView::KeptRowsView(const AcceptedRows& given)
    : row_to_request(access<const int32_t, 1>(given.row_to_request)),
      accepted(access<const int32_t, 1>(given.accepted)),
      rows(given.rows),
      kept(access<int32_t, 1>(given.kept)) {}

void fill_row_facts(const V4RowFacts& facts, const Device& device, Stream stream) {
  begin_launch("v4_row_facts");
  if (device.kind == DeviceKind::kCuda) return fill_row_facts_cuda_portable(facts, device, stream);
  const RowFactsView view(facts);
  for (int64_t t = 0; t < view.positions.shape[0]; ++t) view.fill(t);
}

void copy_states(const StateCopy& copy, const Device& device, Stream stream) {
  begin_launch("v4_copy_states");
  if (device.kind == DeviceKind::kCuda) return copy_states_cuda_portable(copy, device, stream);
  const StateCopyView view(copy);
  const ThreadScope threads(device.num_threads);
  ParallelFor(view.to.shape[0], 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      if (!view.moves(r)) continue;
      std::copy_n(view.source + view.from(r) * view.source_stride, view.elements,
                  view.target + view.to(r) * view.target_stride);
    }
  });
}

void snapshot_states(const StateSnapshots& snapshots, const Device& device, Stream stream) {
  begin_launch("v4_snapshot_states");
  if (device.kind == DeviceKind::kCuda) {
    return snapshot_states_cuda_portable(snapshots, device, stream);
  }
  const SnapshotView view(snapshots);
  const int64_t channels = view.ape.shape[1];
  const ThreadScope threads(device.num_threads);
  ParallelFor(view.seq.shape[0], 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t m = begin; m < end; ++m) {
      for (int64_t back = 0; back < view.state.shape[1]; ++back) {
        const SnapshotToken token = view.token(m, back);
        if (!token.exists()) continue;
        std::copy_n(token.values, channels, token.to);
        for (int64_t i = 0; i < channels; ++i) {
          token.to[channels + i] = token.logit(i, channels);
        }
      }
    }
  });
}

void keep_accepted(const AcceptedRows& rows, const Device& device, Stream stream) {
  begin_launch("v4_keep_accepted");
  if (device.kind == DeviceKind::kCuda) return keep_accepted_cuda_portable(rows, device, stream);
  const KeptRowsView view(rows);
  for (int64_t t = 0; t < view.kept.shape[0]; ++t) view.kept(t) = view.request(t);
}

void own_slots(const ConstTensorView& slot, const TensorView& own, const Device& device,
               Stream stream) {
  begin_launch("v4_own_slots");
  if (device.kind == DeviceKind::kCuda) return own_slots_cuda_portable(slot, own, device, stream);
  const auto from = access<const int32_t, 1>(slot);
  const auto to = access<int32_t, 1>(own);
  for (int64_t r = 0; r < to.shape[0]; ++r) to(r) = from(r) < 0 ? -1 : static_cast<int32_t>(r);
}

}  // namespace fovea::internal
