#pragma once

#include <cstddef>

#include "fovea/device_memory.h"

namespace fovea::python {

/// The workspace of one call, taken from those that earlier calls in the same stream left behind,
/// or new. While the lease lives no other call has it; afterwards it goes to the next call of the
/// stream, which the stream runs behind this one. A call that a graph records gets memory that
/// belongs to the graph.
class WorkspaceLease {
 public:
  /// Throws Error(kOutOfMemory).
  WorkspaceLease(const Device& device, size_t bytes, Stream stream);
  ~WorkspaceLease();
  WorkspaceLease(const WorkspaceLease&) = delete;
  WorkspaceLease& operator=(const WorkspaceLease&) = delete;

  Workspace workspace() const noexcept { return workspace_; }

 private:
  DeviceBuffer buffer_;
  Workspace workspace_;
  uint64_t stream_id_ = 0;
  bool is_kept_ = false;
};

/// Gives back the workspaces that no call has. Thread-safe.
void clear_workspaces();

}  // namespace fovea::python
