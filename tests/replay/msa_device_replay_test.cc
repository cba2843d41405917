// Replays of block-sparse attention on every device: right against fp64, the same bits with and
// without graphs, faults found.

#include <gtest/gtest.h>

#include "tests/replay/device_replays.h"
#include "tests/replay/tiny_msa.h"
#include "tests/support/sanitizers.h"

namespace fovea {
namespace {

class MsaDeviceReplay : public test::DeviceReplaySuite {
 protected:
  internal::ModelSpec model() const override { return test::tiny_msa(16, 64); }
};
INSTANTIATE_TEST_SUITE_P(Devices, MsaDeviceReplay, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(MsaDeviceReplay, GraphsChangeNoRow) {
  EXPECT_GT(expect_graphs_change_nothing("plain", [](auto&) {}).hit_tokens, 0);
  if (test::kSanitized) return;
  // On a GPU the steps of a plan may cut rows as its bucket says, those without one otherwise.
  const ReplayResult cut = run([](auto& o) { o.deterministic = false, o.graph = true; });
  expect_right("not deterministic", cut);
  expect_graphs_change_nothing("mixed", [](auto& o) { o.mixed = true, o.chunk = 100; });
  expect_graphs_change_nothing("arrivals", [](auto& o) { o.arrivals = Arrivals::kTrace; });
}

TEST_P(MsaDeviceReplay, DraftsAndSharingChangeNoRow) {
  const ReplayResult base = run();
  const auto same = [&](const char* name, const Change& change) {
    expect_same(name, expect_graphs_change_nothing(name, change), base);
  };
  same("v1", [](auto& o) { o.draft_tokens = 3; });
  if (test::kSanitized) return;
  same("v2", [](auto& o) { o.draft_tokens = 2, o.draft_mode = DraftMode::kV2; });
  same("no sharing", [](auto& o) { o.prefix_sharing = false; });
  same("chunk", [](auto& o) { o.chunk = 64, o.max_batch = 3, o.page = 64; });
}

TEST_P(MsaDeviceReplay, PreemptedRequestsAreRight) {
  if (device_.kind == DeviceKind::kCpu) {
    GTEST_SKIP() << "the CPU has MsaReplay.PreemptedRequestsGiveTheSameRows";
  }
  expect_preempted_requests_are_right();
}

TEST_P(MsaDeviceReplay, AWrongPageIsFound) { expect_fault_is_found("page", "sparse"); }

TEST_P(MsaDeviceReplay, AFailedLaunchEndsTheRunWithItsStep) { expect_failed_launch_ends_the_run(); }

}  // namespace
}  // namespace fovea
