#pragma once

#include <cstdint>

/// Faults on purpose, for tests of what happens around a failing operator.
namespace fovea::internal {

/// While it lives, the `nth` operator run of the process from now on (1: the next one) throws
/// Error(kDevice) before it touches a tensor. At most one lives at a time; it must not be made or
/// destroyed while an operator runs.
class LaunchFault {
 public:
  explicit LaunchFault(int64_t nth);
  ~LaunchFault();
  LaunchFault(const LaunchFault&) = delete;
  LaunchFault& operator=(const LaunchFault&) = delete;

  /// Whether the fault has happened.
  bool fired() const;
};

}  // namespace fovea::internal
