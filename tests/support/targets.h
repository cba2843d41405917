#pragma once

#include <gtest/gtest.h>

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

  Options options() const { return Options{implementation}; }
};

inline std::string target_name(const testing::TestParamInfo<Target>& info) {
  return info.param.implementation + "_on_" + std::string(to_string(info.param.isa));
}
inline void PrintTo(const Target& target, std::ostream* out) { *out << target.implementation; }

/// Every implementation of `op`; "cpu" once per instruction set, those that this CPU lacks as
/// skips.
inline std::vector<Target> targets_of(const std::string& op) {
  std::vector<Target> targets;
  for (const OperatorInfo& info : operators()) {
    if (info.name != op) continue;
    for (const ImplementationInfo& entry : info.implementations) {
      if (entry.name != "cpu") {
        targets.push_back({entry.name, best_cpu_isa(), entry.available ? "" : entry.reason});
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
