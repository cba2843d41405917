#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "fovea/error.h"
#include "fovea/replay.h"
#include "src/replay/run_replay.h"
#include "tests/replay/tiny_msa.h"
#include "tests/support/sanitizers.h"

namespace fovea {
namespace {

using testing::HasSubstr;

// Prompts of one to five trace blocks of 64 tokens, many of them shared.
Trace small_trace(int64_t output_length = 100) {
  TraceGeneratorOptions options;
  options.num_requests = 12;
  options.mean_input_length = 1500;
  options.mean_output_length = output_length;
  options.seed = 3;
  return generate_trace(options);
}

ReplayResult run(const std::function<void(ReplayOptions&)>& change = {},
                 const Trace& trace = small_trace(), int64_t block_size = 16) {
  ReplayOptions options;
  options.device = Device::cpu(1);
  options.token_scale = 8;
  options.tp = 2;
  options.max_batch = 4;
  options.check_rows = 60;
  if (change) change(options);
  return internal::run_replay(trace, options, test::tiny_msa(block_size));
}

std::string failures_of(const ReplayResult& result) {
  std::string text;
  for (const CheckFailure& failure : result.check.failures) text += failure.message() + "\n";
  return text;
}

void expect_same(const char* name, const ReplayResult& result, const ReplayResult& base) {
  EXPECT_EQ(result.digest_rows, base.digest_rows) << name;
  EXPECT_EQ(result.digest_selection, base.digest_selection) << name;
  EXPECT_EQ(result.digest_output, base.digest_output) << name;
  EXPECT_TRUE(result.ok()) << name << "\n" << failures_of(result);
  EXPECT_EQ(result.completed, 12) << name;
}

TEST(MsaReplay, CompletesASmallTraceWithoutMismatch) {
  const ReplayResult result = run();
  EXPECT_TRUE(result.ok()) << failures_of(result);
  EXPECT_EQ(result.completed, 12);
  EXPECT_EQ(result.page, 16);
  EXPECT_EQ(result.topk, 3);
  EXPECT_GT(result.hit_tokens, 0);
  EXPECT_EQ(result.check.rows, 60);
  EXPECT_GT(result.check.rows_prefill, 0);
  EXPECT_GT(result.check.rows_decode, 0);
  EXPECT_GT(result.check.rows_selecting, 0);
  EXPECT_GT(result.check.worst, 0.0);
  EXPECT_LT(result.check.worst, 5e-3);
  EXPECT_EQ(result.layers.size(), 3u);
  EXPECT_FALSE(result.ops.empty());
}

// Everything that must not change a row.
TEST(MsaReplay, DigestsAreEqualForEveryWayOfRunning) {
  const ReplayResult base = run();
  const auto same = [&](const char* name, const std::function<void(ReplayOptions&)>& change) {
    ReplayResult other = run(change);
    expect_same(name, other, base);
    return other;
  };
  same("2 threads", [](auto& o) { o.device = Device::cpu(2); });
  EXPECT_EQ(same("no sharing", [](auto& o) { o.prefix_sharing = false; }).hit_tokens, 0);
  same("chunk 37", [](auto& o) { o.chunk = 37; });
  same("page 64", [](auto& o) { o.page = 64; });
  same("mixed", [](auto& o) { o.mixed = true, o.chunk = 50; });
  // A sanitizer has seen the paths of the rest by now.
  if (test::kSanitized) return;
  same("3 threads", [](auto& o) { o.device = Device::cpu(3); });
  same("chunk 1000", [](auto& o) { o.chunk = 1000; });
  same("batch 1", [](auto& o) { o.max_batch = 1; });
  same("batch 64", [](auto& o) { o.max_batch = 64; });
  same("page 32", [](auto& o) { o.page = 32; });
  EXPECT_FALSE(same("page 48", [](auto& o) { o.page = 48; }).sharing);
  same("arrivals", [](auto& o) { o.arrivals = Arrivals::kTrace, o.spread_arrivals = true; });
  same("graph", [](auto& o) { o.graph = true; });
  same("not deterministic", [](auto& o) { o.deterministic = false; });
}

// A cache that holds hardly more than the longest request.
TEST(MsaReplay, PreemptedRequestsGiveTheSameRows) {
  const Trace trace = small_trace(800);
  const ReplayResult base = run({}, trace);
  int64_t tokens = 0;
  for (const ReplayRequest& request : base.requests) {
    tokens = std::max(tokens, request.prompt_tokens + request.output_tokens + 32);
  }
  const ReplayResult scarce = run([&](auto& o) { o.cache_tokens = tokens; }, trace);
  EXPECT_GT(scarce.preempted, 0);
  expect_same("scarce", scarce, base);
}

TEST(MsaReplay, DraftsChangeNoRow) {
  const Trace trace = small_trace(300);
  const ReplayResult base = run({}, trace);
  const auto same = [&](const char* name, const std::function<void(ReplayOptions&)>& change) {
    const ReplayResult other = run(
        [&](ReplayOptions& o) {
          o.draft_tokens = 3;
          change(o);
        },
        trace);
    expect_same(name, other, base);
    EXPECT_EQ(other.decode_rows, base.decode_rows) << name;
  };
  same("v1", [](auto&) {});
  same("v2", [](auto& o) { o.draft_mode = DraftMode::kV2; });
  if (test::kSanitized) return;
  same("never accepted", [](auto& o) { o.accept = 0; });
  same("always accepted", [](auto& o) { o.accept = 1; });
  same("1 draft", [](auto& o) { o.draft_tokens = 1; });
  same("graph", [](auto& o) { o.graph = true; });
  same("no sharing", [](auto& o) { o.prefix_sharing = false, o.max_batch = 3; });
}

// Blocks are pages, where pages are smaller.
TEST(MsaReplay, ASmallerPageIsASmallerBlock) {
  const auto in_pages_of_16 = [](auto& o) { o.page = 16; };
  expect_same("page 16", run(in_pages_of_16, small_trace(), 32), run());
  EXPECT_NE(run({}, small_trace(), 32).digest_output, run().digest_output);
}

TEST(MsaReplay, RanksBeyondTheKvHeadsHoldOneEach) {
  const ReplayResult result = run([](auto& o) { o.tp = 8; });
  EXPECT_TRUE(result.ok()) << failures_of(result);
  EXPECT_EQ(result.num_heads, 1);
}

TEST(MsaReplay, AWrongPageIsAMismatchThatIsNamed) {
  for (const bool drafts : {false, true}) {
    const ReplayResult result = run([&](auto& o) {
      o.inject = "page";
      o.draft_tokens = drafts ? 2 : 0;
      o.graph = drafts;
    });
    EXPECT_FALSE(result.ok());
    const auto is_selection = [](const CheckFailure& failure) {
      return failure.layer_kind == "sparse" && failure.op == "msa_score_select" &&
             failure.kind == "selection";
    };
    EXPECT_TRUE(
        std::any_of(result.check.failures.begin(), result.check.failures.end(), is_selection))
        << failures_of(result);
  }
}

TEST(MsaReplay, AFailedLaunchEndsTheRunWithItsStep) {
  try {
    run([](auto& o) { o.inject = "launch:40"; });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_THAT(error.what(), HasSubstr("replay: step "));
  }
}

TEST(MsaReplay, AFailedLaunchMayBeFollowedByAnotherImplementation) {
  const ReplayResult result = run([](auto& o) { o.deterministic = false, o.inject = "launch:9"; });
  EXPECT_TRUE(result.ok()) << failures_of(result);
  EXPECT_EQ(result.completed, 12);
}

TEST(MsaReplay, RefusesWhatTheModelCannotHave) {
  const auto refused = [](const char* fragment, const std::function<void(ReplayOptions&)>& change) {
    try {
      run(change);
      ADD_FAILURE() << fragment;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(fragment));
    }
  };
  refused("page = 24, but tiny-msa has pages of a multiple of 16 up to 256",
          [](auto& o) { o.page = 24; });
  refused("topk = 1 blocks, expected at least the 2", [](auto& o) { o.topk = 1; });
  refused("inject = 'snapshot'", [](auto& o) { o.inject = "snapshot"; });
}

TEST(MsaReplay, ThePresetHasTheShapesOfTheModel) {
  const internal::ModelSpec model = internal::minimax_m3();
  EXPECT_EQ(model.num_heads, 64);
  EXPECT_EQ(model.topk, 16);
  EXPECT_EQ(model.layer_kinds.size(), 60u);
  EXPECT_EQ(model.layer_kind(2), "dense");
  EXPECT_EQ(model.layer_kind(3), "sparse");
  EXPECT_EQ(model.layer_kind(59), "sparse");
  EXPECT_EQ(model.page.preferred, 128);
  for (const int64_t page : {1, 8, 64, 128, 256}) EXPECT_TRUE(model.page.allows(page)) << page;
  for (const int64_t page : {3, 96, 192}) EXPECT_FALSE(model.page.allows(page)) << page;
}

}  // namespace
}  // namespace fovea
