#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "fovea/error.h"
#include "fovea/replay.h"
#include "src/replay/run_replay.h"
#include "tests/replay/tiny_kimi.h"
#include "tests/support/sanitizers.h"

namespace fovea {
namespace {

using testing::HasSubstr;

// Prompts of one to five pages of 64 tokens, many of them shared.
Trace small_trace(int64_t output_length = 100) {
  TraceGeneratorOptions options;
  options.num_requests = 12;
  options.mean_input_length = 1500;
  options.mean_output_length = output_length;
  options.seed = 3;
  return generate_trace(options);
}

ReplayOptions small_options() {
  ReplayOptions options;
  options.device = Device::cpu(1);
  options.token_scale = 8;
  options.tp = 2;
  options.max_batch = 4;
  options.check_rows = 40;
  return options;
}

ReplayResult run(const std::function<void(ReplayOptions&)>& change = {},
                 const Trace& trace = small_trace()) {
  ReplayOptions options = small_options();
  if (change) change(options);
  return internal::run_replay(trace, options, test::tiny_kimi());
}

std::string failures_of(const ReplayResult& result) {
  std::string text;
  for (const CheckFailure& failure : result.check.failures) text += failure.message() + "\n";
  return text;
}

TEST(KimiReplay, CompletesASmallTraceWithoutMismatch) {
  const ReplayResult result = run();
  EXPECT_TRUE(result.ok()) << failures_of(result);
  EXPECT_EQ(result.completed, 12);
  EXPECT_EQ(result.page, 64);
  EXPECT_GT(result.hit_tokens, 0);
  EXPECT_EQ(result.check.rows, 40);
  EXPECT_GT(result.check.rows_prefill, 0);
  EXPECT_GT(result.check.rows_decode, 0);
  EXPECT_GT(result.check.worst, 0.0);
  EXPECT_LT(result.check.worst, 5e-3);
  EXPECT_EQ(result.layers.size(), 3u);
  EXPECT_FALSE(result.ops.empty());
}

// Everything that must not change a row.
TEST(KimiReplay, DigestsAreEqualForEveryWayOfRunning) {
  const ReplayResult base = run();
  const auto same = [&](const char* name, const std::function<void(ReplayOptions&)>& change) {
    const ReplayResult other = run(change);
    EXPECT_EQ(other.digest_rows, base.digest_rows) << name;
    EXPECT_EQ(other.digest_output, base.digest_output) << name;
    EXPECT_TRUE(other.ok()) << name << "\n" << failures_of(other);
    EXPECT_EQ(other.completed, 12) << name;
    return other;
  };
  same("3 threads", [](auto& o) { o.device = Device::cpu(3); });
  EXPECT_EQ(same("no sharing", [](auto& o) { o.prefix_sharing = false; }).hit_tokens, 0);
  same("chunk 64", [](auto& o) { o.chunk = 64; });
  // A sanitizer has seen the paths of the rest by now.
  if (test::kSanitized) return;
  same("2 threads", [](auto& o) { o.device = Device::cpu(2); });
  same("chunk 100", [](auto& o) { o.chunk = 100; });
  same("batch 1", [](auto& o) { o.max_batch = 1; });
  same("batch 64", [](auto& o) { o.max_batch = 64; });
  EXPECT_FALSE(same("page 128", [](auto& o) { o.page = 128; }).sharing);
  same("arrivals", [](auto& o) { o.arrivals = Arrivals::kTrace, o.spread_arrivals = true; });
  same("graph", [](auto& o) { o.graph = true; });
}

TEST(KimiReplay, DraftsChangeNoRow) {
  const Trace trace = small_trace(test::by_build(300, 150));
  const ReplayResult base = run({}, trace);
  const auto same = [&](const char* name, const std::function<void(ReplayOptions&)>& change) {
    const ReplayResult other = run(
        [&](ReplayOptions& o) {
          o.draft_tokens = 3;
          change(o);
        },
        trace);
    EXPECT_EQ(other.digest_rows, base.digest_rows) << name;
    EXPECT_EQ(other.digest_output, base.digest_output) << name;
    EXPECT_TRUE(other.ok()) << name << "\n" << failures_of(other);
    EXPECT_EQ(other.decode_rows, base.decode_rows) << name;
  };
  same("v1", [](auto&) {});
  if (test::kSanitized) return;
  same("v2", [](auto& o) { o.draft_mode = DraftMode::kV2; });
  same("never accepted", [](auto& o) { o.accept = 0; });
  same("always accepted", [](auto& o) { o.accept = 1; });
  same("1 draft", [](auto& o) { o.draft_tokens = 1; });
  same("graph", [](auto& o) { o.graph = true; });
  same("no sharing", [](auto& o) { o.prefix_sharing = false, o.max_batch = 3; });
}

// Recomputed rows go through the prefill, whose rounding is not that of the decode: right, but not
// bit-equal.
TEST(KimiReplay, MixedStepsAndPreemptionGiveRightRows) {
  const ReplayResult mixed = run([](auto& o) { o.mixed = true, o.chunk = 100; });
  EXPECT_TRUE(mixed.ok()) << failures_of(mixed);
  const ReplayResult scarce =
      run([](auto& o) { o.cache_tokens = 1024; }, small_trace(test::by_build(800, 400)));
  EXPECT_TRUE(scarce.ok()) << failures_of(scarce);
}

TEST(KimiReplay, AWrongSnapshotIsAMismatchThatIsNamed) {
  const ReplayResult result = run([](auto& o) { o.inject = "snapshot"; });
  ASSERT_FALSE(result.ok());
  ASSERT_FALSE(result.check.failures.empty());
  const CheckFailure& failure = result.check.failures.front();
  EXPECT_EQ(failure.layer_kind, "kda");
  EXPECT_EQ(failure.op, "kda_prefill");
  EXPECT_EQ(failure.kind, "output");
  EXPECT_EQ(failure.position % 64, 0);
}

TEST(KimiReplay, AWrongPageIsAMismatchThatIsNamed) {
  const ReplayResult result = run([](auto& o) { o.inject = "page"; });
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.check.failures.front().layer_kind, "mla");
  EXPECT_EQ(result.check.failures.front().op, "dense_mla");
}

TEST(KimiReplay, AFailedLaunchMayBeFollowedByAnotherImplementation) {
  const ReplayResult result = run([](auto& o) { o.deterministic = false, o.inject = "launch:9"; });
  EXPECT_TRUE(result.ok()) << failures_of(result);
  EXPECT_EQ(result.completed, 12);
}

TEST(KimiReplay, RefusesPagesThatHoldNoSnapshot) {
  EXPECT_THROW(run([](auto& o) { o.page = 32; }), Error);
  EXPECT_THROW(run([](auto& o) { o.chunk = 63; }), Error);
}

}  // namespace
}  // namespace fovea
