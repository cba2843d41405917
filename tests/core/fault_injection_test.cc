#include "src/core/fault_injection.h"

#include <gtest/gtest.h>

#include "fovea/error.h"
#include "fovea/plan.h"
#include "src/core/kernel_fault.h"

namespace fovea::internal {
namespace {

TEST(LaunchFault, ExactlyTheNthLaunchFails) {
  {
    const LaunchFault fault(3);
    EXPECT_NO_THROW(begin_launch("first"));
    EXPECT_NO_THROW(begin_launch("second"));
    EXPECT_FALSE(fault.fired());
    try {
      begin_launch("third");
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_NE(std::string(error.what()).find("third"), std::string::npos);
    }
    EXPECT_TRUE(fault.fired());
    EXPECT_NO_THROW(begin_launch("fourth"));
  }
  for (int i = 0; i < 10; ++i) EXPECT_NO_THROW(begin_launch("later"));
}

TEST(KernelFault, ExactlyTheNthKernelFails) {
  {
    const KernelFault fault(2);
    EXPECT_FALSE(kernel_launch_fails());
    EXPECT_FALSE(fault.fired());
    EXPECT_TRUE(kernel_launch_fails());
    EXPECT_TRUE(fault.fired());
    EXPECT_FALSE(kernel_launch_fails());
  }
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(kernel_launch_fails());
}

TEST(ResultFault, WritesAfterExactlyTheNthRun) {
  int32_t result = 1;
  {
    const ResultFault fault(2, &result, 7);
    end_launch();
    EXPECT_EQ(result, 1);
    EXPECT_FALSE(fault.fired());
    end_launch();
    EXPECT_EQ(result, 7);
    EXPECT_TRUE(fault.fired());
    result = 1;
    end_launch();
    EXPECT_EQ(result, 1);
  }
  for (int i = 0; i < 10; ++i) end_launch();
  EXPECT_EQ(result, 1);
}

}  // namespace
}  // namespace fovea::internal
