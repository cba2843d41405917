#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "fovea/error.h"
#include "src/replay/run_replay.h"
#include "tests/support/devices.h"
#include "tests/support/sanitizers.h"

/// Replays of small models on every device, with and without graphs.
namespace fovea::test {

inline std::string failures_of(const ReplayResult& result) {
  std::string text;
  for (const CheckFailure& failure : result.check.failures) text += failure.message() + "\n";
  return text;
}

class DeviceReplaySuite : public DeviceSuite {
 protected:
  using Change = std::function<void(ReplayOptions&)>;

  // A sanitizer watches fewer and shorter requests.
  static constexpr int64_t kRequests = test::by_build(10, 6);
  static constexpr int64_t kCheckedRows = test::by_build(60, 30);
  static constexpr int64_t kOutputLength = test::by_build(250, 150);

  virtual internal::ModelSpec model() const = 0;

  // Prompts of one to five trace blocks of 64 tokens, many of them shared.
  static Trace trace(int64_t output_length) {
    TraceGeneratorOptions options;
    options.num_requests = kRequests;
    options.mean_input_length = 1500;
    options.mean_output_length = output_length;
    options.seed = 3;
    return generate_trace(options);
  }

  ReplayResult run(const Change& change = {}, int64_t output_length = kOutputLength) const {
    ReplayOptions options;
    options.device = device_;
    options.token_scale = 8;
    options.tp = 2;
    options.max_batch = 4;
    options.check_rows = kCheckedRows;
    if (change) change(options);
    return internal::run_replay(trace(output_length), options, model());
  }

  void expect_right(const char* name, const ReplayResult& result) const {
    EXPECT_TRUE(result.ok()) << name << "\n" << failures_of(result);
    EXPECT_EQ(result.completed, kRequests) << name;
    EXPECT_EQ(result.check.rows, kCheckedRows) << name;
  }

  void expect_same(const char* name, const ReplayResult& result, const ReplayResult& base) const {
    EXPECT_EQ(result.digest_rows, base.digest_rows) << name;
    EXPECT_EQ(result.digest_selection, base.digest_selection) << name;
    EXPECT_EQ(result.digest_output, base.digest_output) << name;
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
    expect_same(name, graphs, eager);
    EXPECT_EQ(graphs.steps.size(), eager.steps.size()) << name;
    return eager;
  }

  // A cache that holds hardly more than the longest request, which outputs fill while they grow.
  void expect_preempted_requests_are_right() const {
    constexpr int64_t kLongOutputs = 2000;
    int64_t tokens = 0;
    for (const ReplayRequest& request : run({}, kLongOutputs).requests) {
      tokens = std::max(tokens, request.prompt_tokens + request.output_tokens + 64);
    }
    const ReplayResult scarce = run([&](auto& o) { o.cache_tokens = tokens; }, kLongOutputs);
    EXPECT_GT(scarce.preempted, 0);
    expect_right("scarce", scarce);
  }

  void expect_fault_is_found(const char* fault, const char* layer_kind) const {
    for (const bool graph : {false, true}) {
      if (kSanitized && !graph) continue;
      const ReplayResult wrong = run([&](auto& o) { o.inject = fault, o.graph = graph; });
      EXPECT_FALSE(wrong.ok()) << fault << graph;
      ASSERT_FALSE(wrong.check.failures.empty()) << fault << graph;
      EXPECT_EQ(wrong.check.failures.front().layer_kind, layer_kind);
    }
  }

  void expect_failed_launch_ends_the_run() const {
    for (const bool graph : {false, true}) {
      try {
        run([&](auto& o) { o.inject = "launch:40", o.graph = graph; });
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kDevice);
        EXPECT_THAT(error.what(), testing::HasSubstr("replay: step "));
      }
    }
    EXPECT_TRUE(run().ok());
  }
};

}  // namespace fovea::test
