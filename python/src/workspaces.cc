#include "python/src/workspaces.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "fovea/error.h"
#include "fovea/stream.h"

namespace fovea::python {
namespace {

// What is kept: at most so many workspaces, the latest ones, none of them larger than this. Larger
// ones belong to calls that take long, next to which asking for memory is nothing.
constexpr size_t kMaxKept = 16;
constexpr size_t kMaxKeptBytes = size_t{32} << 20;
// Sizes are rounded up, so that problems of about one size share a workspace.
constexpr size_t kGranularity = size_t{64} << 10;

struct Kept {
  uint64_t stream_id = 0;
  DeviceBuffer buffer;
};

struct Pool {
  std::mutex mutex;
  std::vector<Kept> kept;  // the latest last
};

// Never destroyed: the memory may outlive what it came from.
Pool& pool() {
  static auto* const instance = new Pool;
  return *instance;
}

bool is_of(const Kept& entry, const Device& device, uint64_t stream_id) {
  return entry.stream_id == stream_id && entry.buffer.device().kind == device.kind &&
         entry.buffer.device().ordinal == device.ordinal;
}

// The latest workspace of the stream, whatever its size; an empty one when there is none.
DeviceBuffer take(const Device& device, uint64_t stream_id) {
  const std::lock_guard<std::mutex> lock(pool().mutex);
  auto& kept = pool().kept;
  for (size_t i = kept.size(); i-- > 0;) {
    if (!is_of(kept[i], device, stream_id)) continue;
    DeviceBuffer buffer = std::move(kept[i].buffer);
    kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(i));
    return buffer;
  }
  return {};
}

}  // namespace

WorkspaceLease::WorkspaceLease(const Device& device, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  is_kept_ = bytes <= kMaxKeptBytes && !is_capturing(device, stream);
  if (!is_kept_) {
    buffer_.reserve(device, bytes, stream);
  } else {
    stream_id_ = stream_id(device, stream);
    buffer_ = take(device, stream_id_);
    buffer_.reserve(device, (bytes + kGranularity - 1) / kGranularity * kGranularity, stream);
  }
  workspace_ = buffer_.workspace();
}

WorkspaceLease::~WorkspaceLease() {
  if (!is_kept_ || buffer_.data() == nullptr) return;
  Kept oldest;  // goes back after the lock
  const std::lock_guard<std::mutex> lock(pool().mutex);
  auto& kept = pool().kept;
  if (kept.size() >= kMaxKept) {
    oldest = std::move(kept.front());
    kept.erase(kept.begin());
  }
  kept.push_back({stream_id_, std::move(buffer_)});
}

void clear_workspaces() {
  std::vector<Kept> kept;
  const std::lock_guard<std::mutex> lock(pool().mutex);
  kept.swap(pool().kept);
}

}  // namespace fovea::python
