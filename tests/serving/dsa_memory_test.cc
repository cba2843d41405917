#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "fovea/device_memory.h"
#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/limited_memory.h"

namespace fovea {
namespace {

using test::DsaRig;
using testing::HasSubstr;

class DsaMemory : public test::DeviceSuite {
 protected:
  void TearDown() override { set_memory_resource(device_, nullptr); }

  std::shared_ptr<test::LimitedMemory> limit(size_t bytes) {
    const auto memory = std::make_shared<test::LimitedMemory>(device_, bytes);
    set_memory_resource(device_, memory);
    return memory;
  }

  void expect_out_of_memory(const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("dsa_backend: "));
    EXPECT_THAT(error.what(), HasSubstr("bytes asked"));
    if (device_.kind == DeviceKind::kCuda) {
      EXPECT_THAT(error.what(), HasSubstr("free"));
    }
  }

  static DsaConfig config() {
    DsaConfig config = DsaRig::small_config(4, RowFormat::kV32);
    config.rows_per_request = 3;
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, DsaMemory, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(DsaMemory, ABackendThatDoesNotFitSaysSoAndLeaksNothing) {
  size_t needed = 0;
  {
    const auto memory = limit(size_t{1} << 30);
    const DsaBackend backend(config(), device_);
    needed = (size_t{1} << 30) - memory->left;
  }
  EXPECT_GT(needed, 0u);
  // Every array of the constructor is the one that does not fit.
  int refused = 0;
  for (size_t bytes = 0; bytes < needed; bytes += needed / 16 + 1) {
    const auto memory = limit(bytes);
    try {
      const DsaBackend backend(config(), device_);
      ADD_FAILURE() << bytes << " of " << needed;
    } catch (const Error& error) {
      expect_out_of_memory(error);
      ++refused;
    }
    EXPECT_EQ(memory->left, bytes);
  }
  EXPECT_GE(refused, 15);
  const auto memory = limit(needed);
  { const DsaBackend backend(config(), device_); }
  EXPECT_EQ(memory->left, needed);
}

TEST_P(DsaMemory, AStepPlanThatDoesNotFitLeavesTheBackendAsItWas) {
  const auto memory = limit(size_t{1} << 30);
  DsaBackend backend(config(), device_);
  const StepBucket bucket{ForwardMode::kTargetVerify, 4, 3};
  const size_t before = memory->left;
  size_t needed = 0;
  {
    const DsaStepPlan plan = backend.make_step_plan(bucket);
    needed = before - memory->left;
  }
  EXPECT_EQ(memory->left, before);
  for (size_t bytes = 0; bytes < needed; bytes += needed / 16 + 1) {
    memory->left = bytes;
    try {
      const DsaStepPlan plan = backend.make_step_plan(bucket);
      ADD_FAILURE() << bytes << " of " << needed;
    } catch (const Error& error) {
      expect_out_of_memory(error);
    }
    EXPECT_EQ(memory->left, bytes);
  }
  memory->left = before;
  const DsaStepPlan plan = backend.make_step_plan(bucket);
  EXPECT_EQ(plan.bucket().num_requests, 4);
}

}  // namespace
}  // namespace fovea
