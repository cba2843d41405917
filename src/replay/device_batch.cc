#include "src/replay/device_batch.h"

#include <algorithm>
#include <cstring>

namespace fovea::internal {
namespace {

// The view of the copy; an absent array stays absent.
ConstTensorView copied(const ConstTensorView& from, StagedTensor* to, Stream stream) {
  if (!from.defined()) return from;
  const int64_t count = from.shape[0];
  if (count > 0) {
    std::memcpy(to->host(count).data, from.data, static_cast<size_t>(count) * sizeof(int32_t));
  }
  to->upload(0, count, stream);
  return to->on_device(count);
}

}  // namespace

DeviceBatch::DeviceBatch(const Device& device, int64_t max_requests, int64_t max_rows)
    : seq_len_(device, DType::kI32, {max_requests}),
      pool_row_(device, DType::kI32, {max_requests}),
      ext_len_(device, DType::kI32, {max_requests}),
      positions_(device, DType::kI32, {max_rows}),
      out_cache_loc_(device, DType::kI32, {max_rows}) {}

ForwardBatch DeviceBatch::upload(const ForwardBatch& batch, Stream stream) {
  ForwardBatch result = batch;
  result.seq_len = copied(batch.seq_len, &seq_len_, stream);
  result.pool_row = copied(batch.pool_row, &pool_row_, stream);
  result.ext_len = copied(batch.ext_len, &ext_len_, stream);
  result.positions = copied(batch.positions, &positions_, stream);
  result.out_cache_loc = copied(batch.out_cache_loc, &out_cache_loc_, stream);
  return result;
}

void DeviceTable::update(const Scheduler& scheduler, const StepBatch& batch, Stream stream) {
  const ConstTensorView table = scheduler.table().view();
  if (device_.kind == DeviceKind::kCpu) {
    view_ = table;
    return;
  }
  const int64_t width = table.shape[1];
  const auto row_bytes = static_cast<size_t>(width) * sizeof(int32_t);
  if (!view_.defined()) {
    const size_t bytes = row_bytes * static_cast<size_t>(table.shape[0]);
    memory_.reserve(device_, bytes, stream);
    fill_bytes(memory_.data(), device_, 0, bytes, stream);
    held_.resize(static_cast<size_t>(table.shape[0]));
    view_ = table;
    view_.data = memory_.data();
  }
  for (const StepEntry& entry : batch.entries) {
    Held& held = held_[static_cast<size_t>(entry.pool_row)];
    if (entry.starts || held.request != entry.request) held = {entry.request, 0};
    // Pages are appended while a request runs; the rows of a step lie within them.
    const int64_t columns = std::min(width, std::max(entry.end, held.columns));
    const auto offset = static_cast<size_t>(entry.pool_row) * row_bytes +
                        static_cast<size_t>(held.columns) * sizeof(int32_t);
    const auto bytes = static_cast<size_t>(columns - held.columns) * sizeof(int32_t);
    if (bytes > 0) {
      copy_bytes(static_cast<std::byte*>(memory_.data()) + offset, device_,
                 static_cast<const std::byte*>(table.data) + offset, Device{}, bytes, stream);
    }
    held.columns = columns;
  }
}

}  // namespace fovea::internal
