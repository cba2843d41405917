#include "src/replay/state_slots.h"

namespace fovea::internal {

StateSlots::StateSlots(const RunSetup& setup, const EngineConfig& config)
    : setup_(setup), second_(static_cast<size_t>(setup.max_batch + 1), 0) {
  for (StagedTensor* tensor : {&in_slot_, &out_slot_}) {
    *tensor = {setup.device, DType::kI32, {config.max_requests}};
  }
  for (StagedTensor* tensor : {&snapshot_seq_, &snapshot_pos_, &snapshot_slot_}) {
    *tensor = {setup.device, DType::kI32, {max_snapshots(setup, config)}};
  }
}

int32_t StateSlots::before(const StepGroup& group, const StepEntry& entry) const {
  if (!entry.starts) return current(entry.pool_row);
  if (entry.begin == 0) return -1;
  const auto page = static_cast<size_t>(entry.begin / setup_.page_size - 1);
  return of_page(group.scheduler->state(entry.request).pages[page]);
}

void StateSlots::upload_snapshots(const StepGroup& group, Stream stream) {
  num_snapshots_ = 0;
  auto* const seq = static_cast<int32_t*>(snapshot_seq_.host(1).data);
  auto* const pos = static_cast<int32_t*>(snapshot_pos_.host(1).data);
  auto* const to = static_cast<int32_t*>(snapshot_slot_.host(1).data);
  int32_t r = 0;
  for (const StepEntry& entry : group.step->entries) {
    const std::vector<int32_t>& pages = group.scheduler->state(entry.request).pages;
    for (int64_t page = entry.begin / setup_.page_size; page < entry.published_end; ++page) {
      seq[num_snapshots_] = r;
      pos[num_snapshots_] = static_cast<int32_t>((page + 1) * setup_.page_size - entry.begin);
      to[num_snapshots_] = of_page(pages[static_cast<size_t>(page)]);
      ++num_snapshots_;
    }
    ++r;
  }
  for (StagedTensor* tensor : {&snapshot_seq_, &snapshot_pos_, &snapshot_slot_}) {
    tensor->upload(0, num_snapshots_, stream);
  }
}

}  // namespace fovea::internal
