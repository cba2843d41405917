#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "src/core/fault_injection.h"
#include "src/core/log.h"
#include "src/core/parallel.h"
#include "src/serving/dsa_profile.h"
#include "src/serving/operator_options.h"

/// How a backend runs its operators: one workspace, one profile, one rule for failures.
namespace fovea::internal {

class OperatorCaller {
 public:
  /// `follow`: after a failure (Error kDevice, kInternal) the next implementation of the list runs.
  OperatorCaller(const Device& device, const OperatorOptions& options, bool follow)
      : device_(device), options_(options), follow_(follow) {}

  /// Room for every plan that will be called.
  void reserve(size_t workspace_bytes) { workspace_.reserve(workspace_bytes); }
  void set_profile(std::vector<OperatorCall>* profile) { profile_ = profile; }
  /// Where the operators of the calls that follow are submitted.
  void enter(Stream stream) { stream_ = stream; }

  template <class Plan>
  void call(const char* name, const Plan& plan, const typename Plan::Tensors& tensors,
            FunctionRef<OperatorWork()> work) {
    const auto run = [&]() -> std::string_view {
      try {
        plan.run(tensors, workspace_.workspace(), stream_);
        end_launch();
      } catch (const Error& error) {
        return run_next(name, plan, tensors, error);
      }
      return plan.implementation().name;
    };
    timed(name, run, work);
  }

  /// `run` returns the name of the implementation that ran.
  void timed(const char* name, FunctionRef<std::string_view()> run,
             FunctionRef<OperatorWork()> work) {
    if (profile_ == nullptr) {
      run();
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    const std::string_view implementation = run();
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    const OperatorWork done = work();
    profile_->push_back(
        {name, std::string(implementation), elapsed.count(), done.flops, done.bytes});
  }

 private:
  // After a failed run, the next implementation of the list from the same tensors: whatever a
  // failed run wrote, a complete one writes again. Called while the error is handled.
  template <class Plan>
  std::string_view run_next(const char* name, const Plan& failed,
                            const typename Plan::Tensors& tensors, const Error& error) {
    const bool failure = error.code() == ErrorCode::kDevice || error.code() == ErrorCode::kInternal;
    const std::string* const next = options_.next(name, failed.implementation().name);
    if (!failure || next == nullptr || !follow_) throw;
    log(LogLevel::kError, std::string(name) + ": " + failed.implementation().name + " failed (" +
                              error.what() + "); runs " + *next);
    const Plan plan = Plan::plan(failed.problem(), device_, Options{*next});
    workspace_.reserve(plan.workspace_bytes());
    try {
      plan.run(tensors, workspace_.workspace(), stream_);
    } catch (const Error& again) {
      return run_next(name, plan, tensors, again);
    }
    return *next;
  }

  Device device_;
  const OperatorOptions& options_;
  bool follow_;
  Stream stream_;
  HostBuffer workspace_;
  std::vector<OperatorCall>* profile_ = nullptr;
};

}  // namespace fovea::internal
