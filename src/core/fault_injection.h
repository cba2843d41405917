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

/// While it lives, `value` is written to `*address` after the `nth` operator run of a backend from
/// now on (1: the next one), as if that run had written it: for what has to notice wrong results.
/// Otherwise as LaunchFault; one of each may live.
class ResultFault {
 public:
  ResultFault(int64_t nth, int32_t* address, int32_t value);
  ~ResultFault();
  ResultFault(const ResultFault&) = delete;
  ResultFault& operator=(const ResultFault&) = delete;

  bool fired() const;
};

/// Announces the end of a backend's operator run.
void end_launch();

}  // namespace fovea::internal
