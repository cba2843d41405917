#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/implementation.h"
#include "fovea/plan.h"

/// Implementation lists: what an operator's .cc declares and how plan() picks from it.
namespace fovea::internal {

/// Empty: supported. Otherwise the requirement that failed, as a sentence fragment ("needs
/// page_size >= 1, got 0").
using Refusal = std::string;

template <class Problem, class Tensors>
struct Implementation {
  const char* name;
  DeviceKind device;
  /// Empty when this build and machine can run it at all, otherwise why not. Null: always.
  Refusal (*available)();
  /// Whether it handles this problem. Null: every problem that passed the operator's own checks.
  Refusal (*supports)(const Problem& problem);
  /// Null: none.
  size_t (*workspace_bytes)(const Problem& problem, const Device& device);
  RunFunction<Problem, Tensors> run;                  ///< CPU
  LaunchFunction<Problem, Tensors> launch = nullptr;  ///< GPU, instead of `run`
  /// Empty when the entry is a good choice for a problem that it supports, otherwise why one behind
  /// it may serve better; what is measured stands here. Null: always a good choice. A forced name
  /// does not ask.
  Refusal (*preferred)(const Problem& problem) = nullptr;
};

/// What the choice needs to know of one entry, for one problem.
struct Candidate {
  const char* name;
  DeviceKind device;
  Refusal refusal;
  Refusal reluctance;  ///< Of an entry that supports the problem without being preferred.
};

/// Index of the first candidate for `device` that is forced, or accepts and is preferred, or else
/// of the first that accepts. Logs the choice and each distinct refusal once. Throws
/// Error(kUnsupported) listing every candidate when none accepts or the forced one refuses, and
/// Error(kInvalidArgument) when the forced name does not exist.
size_t choose_candidate(const char* op, const std::vector<Candidate>& candidates,
                        const Device& device, const Options& options, ImplementationChoice* choice);

/// Adds an operator to operators(); one object per operator, at namespace scope in its .cc.
class OperatorRegistration {
 public:
  OperatorRegistration(const char* room, const char* name,
                       std::vector<ImplementationInfo> (*list)());
};

/// `available` of CUDA implementations.
Refusal cuda_available();
/// And of those with code for compute capability 9.0 (sm_90a) only.
Refusal cuda_sm90_available();

template <class Problem, class Tensors, size_t N>
std::vector<ImplementationInfo> list_implementations(
    const Implementation<Problem, Tensors> (&list)[N]) {
  std::vector<ImplementationInfo> infos;
  for (const auto& entry : list) {
    std::string reason = entry.available != nullptr ? entry.available() : std::string();
    infos.push_back({entry.name, entry.device, reason.empty(), reason});
  }
  return infos;
}

/// The common part of every plan(): `problem` has passed the operator's own checks.
template <class Problem, class Tensors, size_t N>
std::shared_ptr<const typename OperatorPlan<Problem, Tensors>::State> make_plan(
    const char* op, const Implementation<Problem, Tensors> (&list)[N], const Problem& problem,
    const Device& device, const Options& options, CheckFunction<Problem, Tensors> check) {
  std::vector<Candidate> candidates;
  for (const auto& entry : list) {
    Refusal refusal = entry.available != nullptr ? entry.available() : Refusal();
    if (refusal.empty() && entry.supports != nullptr) refusal = entry.supports(problem);
    Refusal reluctance;
    if (refusal.empty() && entry.preferred != nullptr) reluctance = entry.preferred(problem);
    candidates.push_back({entry.name, entry.device, std::move(refusal), std::move(reluctance)});
  }
  ImplementationChoice choice;
  const auto& chosen = list[choose_candidate(op, candidates, device, options, &choice)];
  const size_t bytes =
      chosen.workspace_bytes != nullptr ? chosen.workspace_bytes(problem, device) : 0;
  using State = typename OperatorPlan<Problem, Tensors>::State;
  return std::make_shared<const State>(
      State{op, problem, device, std::move(choice), bytes, check, chosen.run, chosen.launch});
}

}  // namespace fovea::internal
