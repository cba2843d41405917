#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/device_memory.h"
#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/stream.h"
#include "src/core/fault_injection.h"
#include "src/core/log.h"
#include "src/serving/dsa_profile.h"
#include "src/serving/operator_options.h"
#include "src/serving/profile_recorder.h"
#include "src/serving/step_memory.h"

/// How a backend runs its operators: one workspace, one profile, one stream at a time, one rule for
/// failures.
namespace fovea::internal {

class OperatorCaller {
 public:
  /// `follow`: after a failure (Error kDevice, kInternal) the next implementation of the list runs.
  OperatorCaller(const Device& device, const OperatorOptions& options, bool follow)
      : device_(device), options_(options), follow_(follow), profile_(device) {}

  /// Room for every plan that will be called, as memory that work of `stream` may use. The stream
  /// of the first call outlives this object.
  void reserve(size_t workspace_bytes, Stream stream) {
    if (workspaces_.empty()) home_ = stream;
    if (!workspaces_.empty() && workspaces_.back().bytes() >= workspace_bytes) return;
    DeviceBuffer larger;
    reserve_memory("the workspace", {device_, stream, options_.backend()}, workspace_bytes,
                   &larger);
    // A captured step goes on using the smaller one.
    workspaces_.push_back(std::move(larger));
  }

  /// The calls that follow are submitted to `stream`.
  void enter(Stream stream) { profile_.enter(stream); }
  Stream stream() const { return profile_.stream(); }
  /// Whether they are recorded instead of executed.
  bool is_capturing() const { return profile_.is_capturing(); }

  void set_profile(std::vector<OperatorCall>* calls) { profile_.set_target(calls); }

  /// Failed runs that another implementation took over.
  int64_t fallbacks() const { return fallbacks_; }

  template <class Plan>
  void call(const char* name, const Plan& plan, const typename Plan::Tensors& tensors,
            FunctionRef<OperatorWork()> work) {
    const auto run = [&]() -> std::string_view {
      try {
        plan.run(tensors, workspaces_.back().workspace(), stream());
        end_launch();
      } catch (const Error& error) {
        return run_next(name, plan, tensors, error);
      }
      return plan.implementation().name;
    };
    profile_.timed(name, run, work);
  }

  /// An operator of this room, which has one implementation per kind of device.
  void call_own(const char* name, FunctionRef<void()> run, FunctionRef<OperatorWork()> work) {
    const auto run_named = [&]() -> std::string_view {
      run();
      return device_.kind == DeviceKind::kCpu ? "cpu" : "cuda_portable";
    };
    profile_.timed(name, run_named, work);
  }

 private:
  // Room in the middle of a step. Later steps may run on other streams than this one, and may
  // outlive it: hence memory that is ready for any stream, at the price of a wait.
  void reserve_at_home(size_t workspace_bytes) {
    if (workspaces_.back().bytes() >= workspace_bytes) return;
    reserve(workspace_bytes, home_);
    synchronize(device_, home_);
  }

  // After a failed run, the next implementation of the list from the same tensors: whatever a
  // failed run wrote, a complete one writes again. Called while the error is handled.
  template <class Plan>
  std::string_view run_next(const char* name, const Plan& failed,
                            const typename Plan::Tensors& tensors, const Error& error) {
    const bool failure = error.code() == ErrorCode::kDevice || error.code() == ErrorCode::kInternal;
    const std::string* const next = options_.next(name, failed.implementation().name, device_.kind);
    if (!failure || next == nullptr || !follow_) throw;
    const Plan plan = Plan::plan(failed.problem(), device_, Options{*next});
    // Memory that a capture allocates belongs to its graph alone.
    if (is_capturing() && plan.workspace_bytes() > workspaces_.back().bytes()) throw;
    log(LogLevel::kError, std::string(name) + ": " + failed.implementation().name + " failed (" +
                              error.what() + "); runs " + *next);
    reserve_at_home(plan.workspace_bytes());
    ++fallbacks_;
    try {
      plan.run(tensors, workspaces_.back().workspace(), stream());
    } catch (const Error& again) {
      return run_next(name, plan, tensors, again);
    }
    return *next;
  }

  Device device_;
  const OperatorOptions& options_;
  bool follow_;
  int64_t fallbacks_ = 0;
  Stream home_;
  std::vector<DeviceBuffer> workspaces_;  // the last one is in use
  ProfileRecorder profile_;
};

}  // namespace fovea::internal
