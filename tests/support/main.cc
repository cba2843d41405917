#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/support/device_heap.h"

int main(int argc, char** argv) {
  fovea::test::use_device_heap();
  testing::InitGoogleTest(&argc, argv);
  int result = RUN_ALL_TESTS();
  const char* const shards = std::getenv("GTEST_TOTAL_SHARDS");
  if (shards != nullptr && std::strcmp(shards, "1") != 0) return result;  // has not all cases
  // A suite in which every case was skipped tests nothing: that is a failure, not a success.
  const testing::UnitTest& unit = *testing::UnitTest::GetInstance();
  for (int i = 0; i < unit.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *unit.GetTestSuite(i);
    if (suite.test_to_run_count() > 0 && suite.skipped_test_count() == suite.test_to_run_count()) {
      std::fprintf(stderr, "[  FAILED  ] %s: every case was skipped\n", suite.name());
      result = 1;
    }
  }
  return result;
}
