// Replays of KDA and full-attention layers on every device: right against fp64, the same bits with
// and without graphs, faults found.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "fovea/error.h"
#include "src/replay/run_replay.h"
#include "tests/replay/tiny_kimi.h"
#include "tests/support/devices.h"
#include "tests/support/sanitizers.h"

namespace fovea {
namespace {

using testing::HasSubstr;

std::string failures_of(const ReplayResult& result) {
  std::string text;
  for (const CheckFailure& failure : result.check.failures) text += failure.message() + "\n";
  return text;
}

class KimiDeviceReplay : public test::DeviceSuite {
 protected:
  using Change = std::function<void(ReplayOptions&)>;

  // Prompts of one to five pages of 64 tokens, many of them shared.
  static Trace trace(int64_t output_length) {
    TraceGeneratorOptions options;
    options.num_requests = 10;
    options.mean_input_length = 1500;
    options.mean_output_length = output_length;
    options.seed = 3;
    return generate_trace(options);
  }

  // Heads of 64 x 64, which kernels of a GPU take in tiles.
  ReplayResult run(const Change& change = {}, int64_t output_length = 250) const {
    ReplayOptions options;
    options.device = device_;
    options.token_scale = 8;
    options.tp = 2;
    options.max_batch = 4;
    options.check_rows = 60;
    if (change) change(options);
    return internal::run_replay(trace(output_length), options, test::tiny_kimi(64, 64));
  }

  void expect_right(const char* name, const ReplayResult& result) const {
    EXPECT_TRUE(result.ok()) << name << "\n" << failures_of(result);
    EXPECT_EQ(result.completed, 10) << name;
    EXPECT_EQ(result.check.rows, 60) << name;
  }

  // Runs `change` with and without graphs.
  ReplayResult expect_graphs_change_nothing(const char* name, const Change& change) const {
    ReplayResult eager = run(change);
    const ReplayResult graphs = run([&](ReplayOptions& o) {
      change(o);
      o.graph = true;
    });
    expect_right(name, eager);
    expect_right(name, graphs);
    EXPECT_TRUE(graphs.graphs.has_value()) << name;
    if (graphs.graphs) {
      EXPECT_GT(graphs.graphs->replays, graphs.graphs->captures) << name;
      EXPECT_EQ(graphs.graphs->nodes > 0, device_.kind == DeviceKind::kCuda) << name;
    }
    EXPECT_EQ(graphs.digest_rows, eager.digest_rows) << name;
    EXPECT_EQ(graphs.digest_output, eager.digest_output) << name;
    EXPECT_EQ(graphs.steps.size(), eager.steps.size()) << name;
    return eager;
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
    const ReplayResult other = expect_graphs_change_nothing(name, change);
    EXPECT_EQ(other.digest_rows, base.digest_rows) << name;
    EXPECT_EQ(other.digest_output, base.digest_output) << name;
  };
  same("v1", [](auto& o) { o.draft_tokens = 3; });
  if (test::kSanitized) return;
  same("v2", [](auto& o) { o.draft_tokens = 2, o.draft_mode = DraftMode::kV2; });
  same("no sharing", [](auto& o) { o.prefix_sharing = false; });
  same("chunk", [](auto& o) { o.chunk = 64, o.max_batch = 3; });
}

TEST_P(KimiDeviceReplay, PreemptedRequestsAreRight) {
  if (test::kSanitized) return;
  constexpr int64_t kLongOutputs = 2000;  // a small cache runs full while they grow
  int64_t tokens = 0;
  for (const ReplayRequest& request : run({}, kLongOutputs).requests) {
    tokens = std::max(tokens, request.prompt_tokens + request.output_tokens + 64);
  }
  const ReplayResult scarce = run([&](auto& o) { o.cache_tokens = tokens; }, kLongOutputs);
  EXPECT_GT(scarce.preempted, 0);
  expect_right("scarce", scarce);
}

TEST_P(KimiDeviceReplay, AWrongSnapshotOrPageIsFound) {
  for (const char* const fault : {"snapshot", "page"}) {
    for (const bool graph : {false, true}) {
      const ReplayResult wrong = run([&](auto& o) { o.inject = fault, o.graph = graph; });
      EXPECT_FALSE(wrong.ok()) << fault << graph;
      ASSERT_FALSE(wrong.check.failures.empty()) << fault << graph;
      EXPECT_EQ(wrong.check.failures.front().layer_kind,
                std::string(fault) == "page" ? "mla" : "kda");
    }
  }
}

TEST_P(KimiDeviceReplay, AFailedLaunchEndsTheRunWithItsStep) {
  for (const bool graph : {false, true}) {
    try {
      run([&](auto& o) { o.inject = "launch:40", o.graph = graph; });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_THAT(error.what(), HasSubstr("replay: step "));
    }
  }
  EXPECT_TRUE(run().ok());
}

}  // namespace
}  // namespace fovea
