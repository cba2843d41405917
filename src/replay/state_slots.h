#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/replay/staged_tensor.h"
#include "src/replay/step_engine.h"

namespace fovea::internal {

/// Where the states of requests and of prefixes lie in a pool of states, and the arrays that tell a
/// backend.
///
/// A request has two slots, one of which is current. A step that cannot work in place goes from it
/// to the other, so that it can be run again when it fails, and `swap` ends it. Behind the slots of
/// the requests there is one per page of the token cache: the snapshot behind the page's last
/// token.
class StateSlots {
 public:
  static constexpr int64_t kPerRequest = 2;
  static int64_t of_requests(const RunSetup& setup) { return kPerRequest * (setup.max_batch + 1); }
  static int64_t of_requests_and_pages(const RunSetup& setup, const EngineConfig& config) {
    return of_requests(setup) + config.num_pages + 1;
  }
  /// Most snapshots of a step.
  static int64_t max_snapshots(const RunSetup& setup, const EngineConfig& config) {
    return config.max_rows / setup.page_size + config.max_requests;
  }

  /// `setup` outlives it.
  StateSlots(const RunSetup& setup, const EngineConfig& config);

  int32_t current(int32_t pool_row) const { return slot(pool_row, false); }
  int32_t other(int32_t pool_row) const { return slot(pool_row, true); }
  int32_t of_page(int32_t page) const { return static_cast<int32_t>(of_requests(setup_)) + page; }
  /// Where the state before the entry's first row is: the current slot; the snapshot of its prefix
  /// when it starts behind one; -1 when it starts without one.
  int32_t before(const StepGroup& group, const StepEntry& entry) const;
  void swap(int32_t pool_row) { second_[static_cast<size_t>(pool_row)] ^= 1; }

  /// The draft model has no states.
  static bool are_used_by(const StepGroup& group) {
    return group.kind != GroupKind::kChain && group.kind != GroupKind::kDraftExtend;
  }

  /// Calls `place(entry, &in, &out)` for every request of the group's step and uploads both arrays;
  /// padded requests have none.
  template <class Place>
  void upload_slots(const StepGroup& group, Stream stream, const Place& place) {
    const auto requests = group.forward.front().seq_len.shape[0];
    const auto in = in_slot_.host(requests), out = out_slot_.host(requests);
    auto* const in_slot = static_cast<int32_t*>(in.data);
    auto* const out_slot = static_cast<int32_t*>(out.data);
    std::fill_n(in_slot, requests, -1);
    std::fill_n(out_slot, requests, -1);
    int64_t r = 0;
    for (const StepEntry& entry : group.step->entries) {
      place(entry, &in_slot[r], &out_slot[r]);
      ++r;
    }
    in_slot_.upload(0, requests, stream);
    out_slot_.upload(0, requests, stream);
  }

  void forget_snapshots() { num_snapshots_ = 0; }
  /// Lists and uploads a snapshot for every page that is complete after the step.
  void upload_snapshots(const StepGroup& group, Stream stream);

  /// Batch `index` of a group, as KdaBatch and V4Batch have it. `moves`: it writes other slots than
  /// it reads.
  template <class Batch>
  Batch batch_of(const StepGroup& group, size_t index, bool moves) const {
    Batch batch;
    batch.forward = group.forward[index];
    if (group.kind == GroupKind::kChain) batch.kv_len_delta = static_cast<int32_t>(index) + 1;
    if (!are_used_by(group)) return batch;
    const int64_t requests = batch.forward.seq_len.shape[0];
    batch.in_slot = in_slot_.on_device(requests);
    if (moves) batch.out_slot = out_slot_.on_device(requests);
    if (num_snapshots_ == 0) return batch;
    batch.snapshot_seq = snapshot_seq_.on_device(num_snapshots_);
    batch.snapshot_pos = snapshot_pos_.on_device(num_snapshots_);
    batch.snapshot_slot = snapshot_slot_.on_device(num_snapshots_);
    return batch;
  }

 private:
  int32_t slot(int32_t pool_row, bool other) const {
    const bool second = (second_[static_cast<size_t>(pool_row)] != 0) != other;
    return static_cast<int32_t>(kPerRequest) * pool_row + (second ? 1 : 0);
  }

  const RunSetup& setup_;
  std::vector<uint8_t> second_;      // per pool row: whether its second slot is current
  StagedTensor in_slot_, out_slot_;  // per request
  StagedTensor snapshot_seq_, snapshot_pos_, snapshot_slot_;
  int64_t num_snapshots_ = 0;
};

}  // namespace fovea::internal
