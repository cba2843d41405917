#pragma once

#include <deque>
#include <string_view>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/stream.h"
#include "src/core/parallel.h"
#include "src/serving/dsa_profile.h"

/// Times the operator calls of a backend.
namespace fovea::internal {

/// A call reaches the profile once its work is done and all earlier ones have: at once on the CPU,
/// on a GPU at a later enter(), or at set_target(), which waits. Nothing that is captured is timed.
class ProfileRecorder {
 public:
  explicit ProfileRecorder(const Device& device) : device_(device) {}

  /// Waits for what is still being measured, hands it to the former target, and records for
  /// `calls` from now on; null stops it. Throws Error(kDevice).
  void set_target(std::vector<OperatorCall>* calls);

  /// The calls that follow are submitted to `stream`.
  void enter(Stream stream);
  Stream stream() const { return stream_; }
  bool is_capturing() const { return is_capturing_; }

  /// `run` returns the name of the implementation that ran.
  void timed(const char* name, FunctionRef<std::string_view()> run,
             FunctionRef<OperatorWork()> work);

 private:
  struct Measurement {
    Event begin, end;
    OperatorCall call;
  };
  Measurement take_measurement();
  void deliver_first();

  Device device_;
  Stream stream_;
  bool is_capturing_ = false;
  std::vector<OperatorCall>* target_ = nullptr;
  std::deque<Measurement> pending_;  // in the order of submission
  std::vector<Measurement> unused_;  // events are worth keeping
};

}  // namespace fovea::internal
