// Replays of KDA and full-attention layers on every device: right against fp64, the same bits with
// and without graphs, faults found.

#include <gtest/gtest.h>

#include "tests/replay/device_replays.h"
#include "tests/replay/tiny_kimi.h"
#include "tests/support/sanitizers.h"

namespace fovea {
namespace {

class KimiDeviceReplay : public test::DeviceReplaySuite {
 protected:
  // Heads of 64 x 64, which kernels of a GPU take in tiles. Under a sanitizer there is none.
  internal::ModelSpec model() const override {
    constexpr int64_t kHeadDim = test::by_build(64, 16);
    return test::tiny_kimi(kHeadDim, kHeadDim);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, KimiDeviceReplay, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(KimiDeviceReplay, GraphsChangeNoRow) {
  EXPECT_GT(expect_graphs_change_nothing("plain", [](auto&) {}).hit_tokens, 0);
  expect_graphs_change_nothing("decodes in place", [](auto& o) { o.deterministic = false; });
  if (test::kSanitized) return;
  expect_graphs_change_nothing("mixed", [](auto& o) { o.mixed = true, o.chunk = 100; });
  expect_graphs_change_nothing("arrivals", [](auto& o) { o.arrivals = Arrivals::kTrace; });
}

TEST_P(KimiDeviceReplay, DraftsAndSharingChangeNoRow) {
  const ReplayResult base = run();
  const auto same = [&](const char* name, const Change& change) {
    expect_same(name, expect_graphs_change_nothing(name, change), base);
  };
  same("v1", [](auto& o) { o.draft_tokens = 3; });
  if (test::kSanitized) return;
  same("v2", [](auto& o) { o.draft_tokens = 2, o.draft_mode = DraftMode::kV2; });
  same("no sharing", [](auto& o) { o.prefix_sharing = false; });
  same("chunk", [](auto& o) { o.chunk = 64, o.max_batch = 3; });
}

TEST_P(KimiDeviceReplay, PreemptedRequestsAreRight) {
  if (test::kSanitized) return;
  expect_preempted_requests_are_right();
}

TEST_P(KimiDeviceReplay, AWrongSnapshotOrPageIsFound) {
  expect_fault_is_found("snapshot", "kda");
  expect_fault_is_found("page", "mla");
}

TEST_P(KimiDeviceReplay, AFailedLaunchEndsTheRunWithItsStep) {
  expect_failed_launch_ends_the_run();
}

}  // namespace
}  // namespace fovea
