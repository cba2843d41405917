#include "src/core/fault_injection.h"

#include <gtest/gtest.h>

#include "fovea/error.h"
#include "fovea/plan.h"

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

}  // namespace
}  // namespace fovea::internal
