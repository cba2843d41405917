#pragma once

#include <cstddef>
#include <memory>

#include "fovea/device.h"
#include "fovea/implementation.h"

namespace fovea {

namespace internal {

/// How an implementation runs a problem: filled by the operator's implementation list.
template <class Problem, class Tensors>
using RunFunction = void (*)(const Problem& problem, const Device& device, const Tensors& tensors,
                             Workspace workspace);

/// The same for an implementation of a GPU, which submits its work to `stream` and returns.
template <class Problem, class Tensors>
using LaunchFunction = void (*)(const Problem& problem, const Device& device,
                                const Tensors& tensors, Workspace workspace, Stream stream);

/// Compares tensors with the plan's problem; throws Error(kInvalidArgument).
template <class Problem, class Tensors>
using CheckFunction = void (*)(const Problem& problem, const Tensors& tensors);

/// Throws Error(kInvalidArgument) when `workspace` is too small or misaligned.
FOVEA_API void check_workspace(const char* op, size_t needed, const Workspace& workspace);

/// Announces a run to fault injection (docs/testing.md), which may throw Error(kDevice).
FOVEA_API void begin_launch(const char* op);

}  // namespace internal

/// What every operator's plan offers. A plan is immutable and cheap to copy; it is made from bounds
/// only, never from lengths.
///
/// run() compares the tensors with the plan, does not allocate, does not synchronise and does not
/// read device data on the host. Same plan, same inputs: the same bits, for any number of threads.
/// Thread-safe: one plan may run in several threads or streams at once, each with its own
/// workspace.
template <class ProblemType, class TensorsType>
class OperatorPlan {
 public:
  using Problem = ProblemType;
  using Tensors = TensorsType;

  /// Bytes of scratch memory that run() needs; depends on the problem's bounds and the device only.
  size_t workspace_bytes() const noexcept { return state_->workspace_bytes; }

  void run(const Tensors& tensors, Workspace workspace, Stream stream = {}) const {
    internal::check_workspace(state_->op, state_->workspace_bytes, workspace);
    state_->check(state_->problem, tensors);
    internal::begin_launch(state_->op);
    if (state_->launch != nullptr) {
      state_->launch(state_->problem, state_->device, tensors, workspace, stream);
    } else {
      state_->run(state_->problem, state_->device, tensors, workspace);
    }
  }

  /// What was chosen and why.
  const ImplementationChoice& implementation() const noexcept { return state_->choice; }
  const Problem& problem() const noexcept { return state_->problem; }
  const Device& device() const noexcept { return state_->device; }

  struct State {
    const char* op;
    Problem problem;
    Device device;
    ImplementationChoice choice;
    size_t workspace_bytes;
    internal::CheckFunction<Problem, Tensors> check;
    internal::RunFunction<Problem, Tensors> run;        // on the CPU
    internal::LaunchFunction<Problem, Tensors> launch;  // on a GPU, otherwise null
  };

 protected:
  explicit OperatorPlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const State> state_;
};

}  // namespace fovea
