#pragma once

#include <cstdint>

/// A kernel that fails to start, on purpose.
namespace fovea::internal {

/// While it lives, the `nth` kernel launch of the process from now on (1: the next one) is refused
/// as the driver would refuse it: the operator that launches it may have written a part of its
/// results. At most one lives at a time; it must not be made or destroyed while an operator runs.
class KernelFault {
 public:
  explicit KernelFault(int64_t nth);
  ~KernelFault();
  KernelFault(const KernelFault&) = delete;
  KernelFault& operator=(const KernelFault&) = delete;

  /// Whether the fault has happened.
  bool fired() const;
};

/// Announces a kernel launch; true: it has to fail.
bool kernel_launch_fails();

}  // namespace fovea::internal
