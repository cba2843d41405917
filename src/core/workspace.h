#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/device.h"

/// Cutting a workspace into arrays. The same sequence of take() calls on a Workspace{nullptr, 0}
/// measures the size.
namespace fovea::internal {

class WorkspaceCutter {
 public:
  explicit WorkspaceCutter(Workspace workspace) : base_(static_cast<char*>(workspace.data)) {}

  /// `count` elements of T, 64-byte aligned. Null while measuring.
  template <class T>
  T* take(int64_t count) {
    const size_t offset = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return base_ != nullptr ? reinterpret_cast<T*>(base_ + offset) : nullptr;
  }

  size_t used_bytes() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace fovea::internal
