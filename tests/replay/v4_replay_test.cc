#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "fovea/error.h"
#include "fovea/replay.h"
#include "src/replay/run_replay.h"
#include "tests/replay/tiny_v4.h"
#include "tests/support/devices.h"
#include "tests/support/sanitizers.h"

// Replays of DeepSeek-V4 on every device: right against fp64, the same bits for every way of
// running, faults found.
namespace fovea {
namespace {

using testing::HasSubstr;

std::string failures_of(const ReplayResult& result) {
  std::string text;
  for (const CheckFailure& failure : result.check.failures) text += failure.message() + "\n";
  return text;
}

class V4Replay : public test::DeviceSuite {
 protected:
  using Change = std::function<void(ReplayOptions&)>;

  // Prompts of one to five pages of 128 tokens, many of them shared.
  static Trace trace(int64_t output_length) {
    TraceGeneratorOptions options;
    options.num_requests = 6;
    options.mean_input_length = 1300;
    options.mean_output_length = output_length;
    options.seed = 3;
    return generate_trace(options);
  }

  ReplayResult run(const Change& change = {}, int64_t output_length = 60) const {
    ReplayOptions options;
    options.device = device_;
    options.token_scale = 4;
    options.page = 128;
    options.tp = 2;
    options.max_batch = 4;
    options.check_rows = 40;
    if (change) change(options);
    return internal::run_replay(trace(output_length), options, test::tiny_v4());
  }

  void expect_same(const char* name, const ReplayResult& base, const ReplayResult& other) const {
    EXPECT_EQ(other.digest_rows, base.digest_rows) << name;
    EXPECT_EQ(other.digest_output, base.digest_output) << name;
    EXPECT_EQ(other.digest_selection, base.digest_selection) << name;
    EXPECT_TRUE(other.ok()) << name << "\n" << failures_of(other);
    EXPECT_EQ(other.completed, 6) << name;
    EXPECT_EQ(other.check.rows, 40) << name;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, V4Replay, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(V4Replay, CompletesASmallTraceWithoutMismatch) {
  const ReplayResult result = run();
  expect_same("base", result, result);
  EXPECT_EQ(result.page, 128);
  EXPECT_GT(result.hit_tokens, 0);
  EXPECT_GT(result.check.rows_prefill, 0);
  EXPECT_GT(result.check.rows_decode, 0);
  EXPECT_GT(result.check.rows_selecting, 0);
  EXPECT_GT(result.check.worst, 0.0);
  EXPECT_LT(result.check.worst, 5e-3);
  ASSERT_EQ(result.layers.size(), 3u);
  EXPECT_NE(result.digest_selection, 0u);
  EXPECT_FALSE(result.ops.empty());
}

// Everything that must not change a row.
TEST_P(V4Replay, DigestsAreEqualForEveryWayOfRunning) {
  const ReplayResult base = run();
  const auto same = [&](const char* name, const Change& change) {
    ReplayResult other = run(change);
    expect_same(name, base, other);
    return other;
  };
  EXPECT_EQ(same("no sharing", [](auto& o) { o.prefix_sharing = false; }).hit_tokens, 0);
  same("chunk 77", [](auto& o) { o.chunk = 77; });
  // A sanitizer has seen the paths of the rest by now.
  if (test::kSanitized) return;
  if (device_.kind == DeviceKind::kCpu)
    same("3 threads", [](auto& o) { o.device.num_threads = 3; });
  same("batch 1", [](auto& o) { o.max_batch = 1; });
  EXPECT_FALSE(same("page 256", [](auto& o) { o.page = 256; }).sharing);
  same("mixed", [](auto& o) { o.mixed = true, o.chunk = 50; });
  same("arrivals", [](auto& o) { o.arrivals = Arrivals::kTrace, o.spread_arrivals = true; });
  const ReplayResult graphs = same("graph", [](auto& o) { o.graph = true; });
  ASSERT_TRUE(graphs.graphs.has_value());
  EXPECT_GT(graphs.graphs->replays, graphs.graphs->captures);
}

TEST_P(V4Replay, DraftsChangeNoRow) {
  constexpr int64_t kOutputs = 150;
  const ReplayResult base = run({}, kOutputs);
  const auto same = [&](const char* name, const Change& change) {
    const ReplayResult other = run(
        [&](ReplayOptions& o) {
          o.draft_tokens = 3;
          change(o);
        },
        kOutputs);
    expect_same(name, base, other);
    EXPECT_EQ(other.decode_rows, base.decode_rows) << name;
  };
  same("v1", [](auto&) {});
  if (test::kSanitized) return;
  same("v2", [](auto& o) { o.draft_mode = DraftMode::kV2; });
  same("never accepted", [](auto& o) { o.accept = 0; });
  same("always accepted", [](auto& o) { o.accept = 1; });
  same("graph", [](auto& o) { o.graph = true; });
  same("no sharing", [](auto& o) { o.prefix_sharing = false, o.max_batch = 3; });
}

TEST_P(V4Replay, PreemptedRequestsHaveTheSameBits) {
  if (test::kSanitized) return;
  constexpr int64_t kOutputs = 1200;  // a small cache runs full while they grow
  const ReplayResult base = run({}, kOutputs);
  int64_t tokens = 0;
  for (const ReplayRequest& request : base.requests) {
    tokens = std::max(tokens, request.prompt_tokens + request.output_tokens + 128);
  }
  const ReplayResult scarce = run([&](auto& o) { o.cache_tokens = tokens; }, kOutputs);
  EXPECT_GT(scarce.preempted, 0);
  expect_same("scarce", base, scarce);
}

TEST_P(V4Replay, AStaleWindowOrAWrongPageIsFound) {
  for (const bool graph : {false, true}) {
    const ReplayResult stale = run([&](auto& o) { o.inject = "window", o.graph = graph; });
    ASSERT_FALSE(stale.ok()) << graph;
    ASSERT_FALSE(stale.check.failures.empty());
    EXPECT_EQ(stale.check.failures.front().op, "sparse_mla");
    EXPECT_EQ(stale.check.failures.front().kind, "output");
    EXPECT_EQ(stale.check.failures.front().position % 128, 0);
    const ReplayResult wrong = run([&](auto& o) { o.inject = "page", o.graph = graph; });
    ASSERT_FALSE(wrong.ok()) << graph;
    EXPECT_EQ(wrong.check.failures.front().layer_kind, "hca");
    if (test::kSanitized) return;
  }
}

TEST_P(V4Replay, AFailedLaunchEndsTheRunWithItsStep) {
  try {
    run([&](auto& o) { o.inject = "launch:40"; });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_THAT(error.what(), HasSubstr("replay: step "));
  }
}

TEST(V4ReplayOptions, PagesHoldWholeGroups) {
  ReplayOptions options;
  options.device = Device::cpu(1);
  options.page = 64;
  EXPECT_THROW(internal::run_replay(generate_trace({}), options, test::tiny_v4()), Error);
}

}  // namespace
}  // namespace fovea
