#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fovea/device.h"
#include "fovea/implementation.h"

namespace fovea::test {

/// One way to run an operator: an implementation on an instruction set.
struct Target {
  std::string implementation;
  CpuIsa isa = CpuIsa::kBaseline;
  std::string skip;  ///< Why it cannot run here; empty when it can.
  DeviceKind kind = DeviceKind::kCpu;

  Options options() const { return Options{implementation}; }
  /// On a GPU the operator reads and writes the test's own memory (support/device_heap.h), and
  /// run() returns when it is done.
  Device device(int num_threads = 1) const {
    return kind == DeviceKind::kCuda ? Device::cuda(0) : Device::cpu(num_threads);
  }
};

inline std::string target_name(const testing::TestParamInfo<Target>& info) {
  if (info.param.kind == DeviceKind::kCuda) return info.param.implementation;
  return info.param.implementation + "_on_" + std::string(to_string(info.param.isa));
}
inline void PrintTo(const Target& target, std::ostream* out) { *out << target.implementation; }

/// Every implementation of `op` but those `apart`, which take few problems and have suites of their
/// own; "cpu" once per instruction set, those that this CPU lacks as skips.
inline std::vector<Target> targets_of(const std::string& op,
                                      const std::vector<std::string>& apart = {}) {
  std::vector<Target> targets;
  for (const OperatorInfo& info : operators()) {
    if (info.name != op) continue;
    for (const ImplementationInfo& entry : info.implementations) {
      if (std::find(apart.begin(), apart.end(), entry.name) != apart.end()) continue;
      if (entry.name != "cpu") {
        targets.push_back(
            {entry.name, best_cpu_isa(), entry.available ? "" : entry.reason, entry.device});
        continue;
      }
      for (const CpuIsa isa : {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx3}) {
        const bool present = isa <= best_cpu_isa();
        targets.push_back(
            {entry.name, isa, present ? "" : std::string(to_string(isa)) + " is not on this CPU"});
      }
    }
  }
  return targets;
}

/// Why a test over SparseMapping skips a GPU.
inline constexpr char kNoSparseMapping[] = "a sparse mapping of the host cannot be pinned";

/// Where a forced implementation runs.
inline Device device_of(const Options& options, int num_threads = 1) {
  return options.implementation.starts_with("cuda") ? Device::cuda(0) : Device::cpu(num_threads);
}

/// Runs a plan with a workspace of its size.
template <class Plan>
void run(const Plan& plan, const typename Plan::Tensors& tensors) {
  HostBuffer workspace(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
}

/// Base of suites parameterised over targets: selects the instruction set for the test, or skips it
/// with its reason.
///
///   class MergeLseTest : public test::TargetTest {};
///   INSTANTIATE_TEST_SUITE_P(Targets, MergeLseTest,
///   testing::ValuesIn(test::targets_of("merge_lse")), test::target_name);
class TargetTest : public testing::TestWithParam<Target> {
 protected:
  void SetUp() override {
    if (!GetParam().skip.empty()) GTEST_SKIP() << GetParam().skip;
    limit_cpu_isa(GetParam().isa);
  }
  void TearDown() override { limit_cpu_isa(best_cpu_isa()); }
};

}  // namespace fovea::test
