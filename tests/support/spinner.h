#pragma once

#include <memory>
#include <string>

#include "fovea/device.h"

/// For tests of what must not wait for the device.
namespace fovea::test {

/// A kernel of one block in front of everything that `stream` gets from now on, which runs until
/// release(), or 20 seconds. On the CPU nothing. Launches must not block (launches_block()). What
/// is launched meanwhile has been launched before: the first launch of a kernel loads it, which may
/// wait for those that run.
class Spinner {
 public:
  Spinner(const Device& device, Stream stream);
  ~Spinner();  // releases
  Spinner(const Spinner&) = delete;
  Spinner& operator=(const Spinner&) = delete;

  void release();
  /// Whether the kernel has ended, by release() or by itself.
  bool has_ended() const;

 private:
  struct Flags;
  std::unique_ptr<Flags> flags_;  // in mapped memory
  bool is_running_;
};

/// Whether launches of this process return only when their kernel is done, as those of test
/// programs do (use_device_heap()).
bool launches_block();

/// Runs the current test once more in a process whose launches return at once. True when it passed.
bool passes_without_blocking();

}  // namespace fovea::test
