#include "fovea/replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "fovea/error.h"
#include "fovea/json.h"
#include "src/replay/run_replay.h"
#include "tests/replay/json_schema.h"
#include "tests/replay/tiny_model.h"

namespace fovea {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

// Twelve requests of 2 to 20 replayed tokens' worth of blocks, with shared prefixes.
Trace small_trace(TraceStyle style = TraceStyle::kConversation) {
  TraceGeneratorOptions options;
  options.style = style;
  options.num_requests = 12;
  options.mean_input_length = 1200;
  options.mean_output_length = 200;
  options.seed = 3;
  return generate_trace(options);
}

ReplayOptions small_options() {
  ReplayOptions options;
  options.device = Device::cpu(1);
  options.token_scale = 64;
  options.topk = 6;
  options.tp = 2;
  options.max_batch = 4;
  options.check_rows = 24;
  return options;
}

ReplayResult run(const ReplayOptions& options, const Trace& trace = small_trace()) {
  return internal::run_replay(trace, options, test::tiny_model());
}

ReplayResult run_with(const std::function<void(ReplayOptions&)>& change) {
  ReplayOptions options = small_options();
  change(options);
  return run(options);
}

std::string failures_of(const ReplayResult& result) {
  std::string text;
  for (const CheckFailure& failure : result.check.failures) text += failure.message() + "\n";
  return text;
}

TEST(Replay, CompletesASmallTraceWithoutMismatch) {
  for (const TraceStyle style : {TraceStyle::kConversation, TraceStyle::kAgent}) {
    const ReplayResult result = run(small_options(), small_trace(style));
    EXPECT_TRUE(result.ok()) << failures_of(result);
    EXPECT_EQ(result.completed, 12);
    EXPECT_EQ(result.rejected, 0);
    EXPECT_EQ(result.page, 8);  // the model's 64 is made smaller until it divides 512 / 64
    EXPECT_GT(result.hit_tokens, 0);
    EXPECT_LE(result.hit_tokens, result.reusable_tokens);
    EXPECT_EQ(result.check.rows, 24);
    EXPECT_GE(result.check.rows_selecting, 12);
    EXPECT_GT(result.check.rows_prefill, 0);
    EXPECT_GT(result.check.rows_decode, 0);
    EXPECT_GT(result.check.requests, 6);
    EXPECT_LT(result.check.worst, 5e-3);
    EXPECT_GT(result.check.worst, 0.0);
    EXPECT_GT(result.digest_rows, 0);
    EXPECT_GT(result.pages_peak, 0);
    EXPECT_EQ(static_cast<int64_t>(result.requests.size()), 12);
    int64_t rows = 0;
    for (const ReplayStep& step : result.steps) rows += step.prefill_tokens + step.decode_tokens;
    EXPECT_EQ(rows, result.prompt_tokens + result.output_tokens - 12 - result.hit_tokens);
    EXPECT_EQ(result.layers.size(), 1u);
    EXPECT_FALSE(result.ops.empty());
  }
}

TEST(Replay, WritesJsonThatFollowsTheSchemaAndProgressThatEnds) {
  ReplayProgress last;
  const ReplayResult result = internal::run_replay(
      small_trace(), small_options(), test::tiny_model(), [&](const ReplayProgress& progress) {
        EXPECT_EQ(progress.steps_done, last.steps_done + 1);
        last = progress;
      });
  EXPECT_EQ(last.steps_done, last.steps_total);
  EXPECT_EQ(last.rows_done, last.rows_total);
  EXPECT_EQ(last.requests_completed, 12);
  const Json json = Json::parse(to_json(result), "result");
  const Json schema = test::read_json(FOVEA_SOURCE_DIR "/docs/replay.schema.json");
  EXPECT_THAT(test::schema_errors(schema, json), IsEmpty());
}

// Everything that must not change a row.
TEST(Replay, DigestsAreEqualForEveryWayOfRunning) {
  const ReplayResult base = run(small_options());
  const auto same = [&](const char* name, const std::function<void(ReplayOptions&)>& change) {
    const ReplayResult other = run_with(change);
    EXPECT_EQ(other.digest_rows, base.digest_rows) << name;
    EXPECT_EQ(other.digest_selection, base.digest_selection) << name;
    EXPECT_EQ(other.digest_output, base.digest_output) << name;
    EXPECT_TRUE(other.ok()) << name << "\n" << failures_of(other);
    EXPECT_EQ(other.completed, 12) << name;
    return other;
  };
  same("2 threads", [](auto& o) { o.device = Device::cpu(2); });
  same("3 threads", [](auto& o) { o.device = Device::cpu(3); });
  const ReplayResult alone = same("no sharing", [](auto& o) { o.prefix_sharing = false; });
  EXPECT_EQ(alone.hit_tokens, 0);
  same("chunk 5", [](auto& o) { o.chunk = 5; });
  same("chunk 8192", [](auto& o) { o.chunk = 8192; });
  same("batch 1", [](auto& o) { o.max_batch = 1; });
  same("batch 64", [](auto& o) { o.max_batch = 64; });
  same("page 1", [](auto& o) { o.page = 1; });
  same("page 2", [](auto& o) { o.page = 2; });
  const ReplayResult odd = same("page 3", [](auto& o) { o.page = 3; });
  EXPECT_FALSE(odd.sharing);
  ASSERT_EQ(odd.notes.size(), 1u);
  EXPECT_THAT(odd.notes[0], HasSubstr("page 3 does not divide the 8 tokens"));
  same("page 64", [](auto& o) { o.page = 64; });
  same("mixed", [](auto& o) { o.mixed = true, o.chunk = 9; });
  same("arrivals", [](auto& o) { o.arrivals = Arrivals::kTrace, o.spread_arrivals = true; });
}

// Requests with long outputs, so that rounds matter.
Trace long_outputs() {
  TraceGeneratorOptions traffic;
  traffic.num_requests = 6;
  traffic.mean_input_length = 1200;
  traffic.mean_output_length = 2500;
  return generate_trace(traffic);
}

const ReplayMode* mode_of(const ReplayResult& result, ForwardMode mode, bool draft) {
  for (const ReplayMode& found : result.modes) {
    if (found.mode == mode && found.draft == draft) return &found;
  }
  return nullptr;
}

TEST(Replay, DraftsChangeNoRow) {
  const Trace trace = long_outputs();
  const ReplayResult base = run(small_options(), trace);
  EXPECT_FALSE(base.drafts);
  const auto same = [&](const char* name, const std::function<void(ReplayOptions&)>& change) {
    ReplayOptions options = small_options();
    options.draft_tokens = 3;
    change(options);
    const ReplayResult other = run(options, trace);
    EXPECT_EQ(other.digest_rows, base.digest_rows) << name;
    EXPECT_EQ(other.digest_selection, base.digest_selection) << name;
    EXPECT_EQ(other.digest_output, base.digest_output) << name;
    EXPECT_TRUE(other.ok()) << name << "\n" << failures_of(other);
    EXPECT_EQ(other.completed, 6) << name;
    EXPECT_EQ(other.decode_rows, base.decode_rows) << name;
    return other;
  };
  const ReplayResult v1 = same("v1", [](auto&) {});
  const ReplayResult v2 = same("v2", [](auto& o) { o.draft_mode = DraftMode::kV2; });
  ASSERT_TRUE(v1.drafts && v2.drafts);
  EXPECT_EQ(v1.drafts->accepted_lengths, v2.drafts->accepted_lengths);
  EXPECT_LT(v1.steps.size(), base.steps.size());
  same("never accepted", [](auto& o) { o.accept = 0; });
  same("always accepted", [](auto& o) { o.accept = 1, o.draft_mode = DraftMode::kV2; });
  same("1 draft", [](auto& o) { o.draft_tokens = 1; });
  same("7 drafts", [](auto& o) { o.draft_tokens = 7, o.draft_mode = DraftMode::kV2; });
  same("mixed", [](auto& o) { o.mixed = true, o.chunk = 9; });
  same("mixed v2", [](auto& o) { o.mixed = true, o.chunk = 9, o.draft_mode = DraftMode::kV2; });
  same("page 1", [](auto& o) { o.page = 1; });
  same("2 threads", [](auto& o) { o.device = Device::cpu(2); });
  same("no sharing", [](auto& o) { o.prefix_sharing = false, o.max_batch = 3; });
  same("arrivals", [](auto& o) { o.arrivals = Arrivals::kTrace; });
  same("more rows checked", [](auto& o) { o.check_rows = 60; });
}

TEST(Replay, ARoundRunsItsModesOnBothModels) {
  ReplayOptions options = small_options();
  options.draft_tokens = 3;
  options.layers = "2";
  options.check_rows = 90;
  for (const DraftMode draft_mode : {DraftMode::kV1, DraftMode::kV2}) {
    options.draft_mode = draft_mode;
    const ReplayResult result = run(options, long_outputs());
    EXPECT_TRUE(result.ok()) << failures_of(result);
    ASSERT_TRUE(result.drafts);
    const ReplayDrafts& drafts = *result.drafts;
    const ReplayMode* verify = mode_of(result, ForwardMode::kTargetVerify, false);
    const ReplayMode* chain = mode_of(result, ForwardMode::kDecode, true);
    const bool v1 = draft_mode == DraftMode::kV1;
    const ReplayMode* extend =
        mode_of(result, v1 ? ForwardMode::kDraftExtend : ForwardMode::kDraftExtendV2, true);
    const ReplayMode* prefill = mode_of(result, ForwardMode::kExtend, false);
    const ReplayMode* draft_prefill = mode_of(result, ForwardMode::kExtend, true);
    ASSERT_TRUE(verify && chain && extend && prefill && draft_prefill);
    EXPECT_EQ(result.modes.size(), 5u);
    EXPECT_EQ(verify->steps, drafts.rounds);
    EXPECT_EQ(verify->rows, 4 * drafts.verifications);
    EXPECT_EQ(chain->steps, 2 * drafts.rounds);
    EXPECT_EQ(chain->rows, 2 * drafts.verifications);
    EXPECT_EQ(extend->rows, v1 ? result.decode_rows : verify->rows);
    EXPECT_EQ(prefill->rows, result.prefill_rows);
    EXPECT_EQ(draft_prefill->rows, result.prefill_rows);
    EXPECT_EQ(drafts.rolled_back_rows, verify->rows - result.decode_rows);
    EXPECT_EQ(drafts.rate, static_cast<double>(drafts.accepted) / double(drafts.decided));
    // One seeded trace: about 200 decisions.
    EXPECT_NEAR(drafts.rate, 0.7, 0.12);
    // Rows of the draft model's layer are checked like those of the others.
    ASSERT_EQ(result.layers.size(), 3u);
    EXPECT_EQ(result.layers[2].id, 3);
    EXPECT_EQ(result.layers[2].kind, "draft");
    EXPECT_EQ(result.layers[2].checked_rows, 30);
    EXPECT_GT(result.check.rows_decode, 30);
  }
}

TEST(Replay, OneDraftTokenNeedsNoChain) {
  ReplayOptions options = small_options();
  options.draft_tokens = 1;
  const ReplayResult result = run(options);
  EXPECT_EQ(mode_of(result, ForwardMode::kDecode, true), nullptr);
  EXPECT_NE(mode_of(result, ForwardMode::kTargetVerify, false), nullptr);
}

TEST(Replay, AServerThatWaitsRunsIdleSteps) {
  Trace trace = parse_trace("0,900,300\n3600000,900,200\n", "a.csv");
  for (const int64_t draft_tokens : {0, 2}) {
    ReplayOptions options = small_options();
    options.arrivals = Arrivals::kTrace;
    options.draft_tokens = draft_tokens;
    const ReplayResult result = run(options, trace);
    EXPECT_TRUE(result.ok()) << failures_of(result);
    const auto idle = std::count_if(result.steps.begin(), result.steps.end(),
                                    [](const auto& step) { return step.kind == StepKind::kIdle; });
    EXPECT_EQ(idle, 1);
    const ReplayMode* target = mode_of(result, ForwardMode::kIdle, false);
    ASSERT_NE(target, nullptr);
    EXPECT_EQ(target->steps, 1);
    EXPECT_EQ(target->rows, 0);
    EXPECT_EQ(mode_of(result, ForwardMode::kIdle, true) != nullptr, draft_tokens > 0);
    EXPECT_GT(result.decode_tokens_per_s, 0);
  }
}

TEST(Replay, PreemptedRequestsWithDraftsAreRecomputedToTheSameRows) {
  const Trace trace = long_outputs();
  const ReplayResult roomy = run(small_options(), trace);
  ReplayOptions options = small_options();
  for (const ReplayRequest& request : roomy.requests) {
    options.cache_tokens =
        std::max(options.cache_tokens, request.prompt_tokens + request.output_tokens + 8);
  }
  options.draft_tokens = 4;
  for (const DraftMode mode : {DraftMode::kV1, DraftMode::kV2}) {
    for (const bool mixed : {false, true}) {
      options.draft_mode = mode;
      options.mixed = mixed;
      const ReplayResult tight = run(options, trace);
      EXPECT_GT(tight.preempted, 0);
      EXPECT_GT(tight.recomputed_rows, 0);
      EXPECT_EQ(tight.completed, 6);
      EXPECT_TRUE(tight.ok()) << failures_of(tight);
      EXPECT_EQ(tight.digest_rows, roomy.digest_rows);
      EXPECT_EQ(tight.digest_selection, roomy.digest_selection);
      EXPECT_EQ(tight.digest_output, roomy.digest_output);
    }
  }
}

TEST(Replay, PreemptedRequestsAreRecomputedToTheSameRows) {
  TraceGeneratorOptions traffic;
  traffic.num_requests = 5;
  traffic.mean_input_length = 1200;
  traffic.mean_output_length = 2500;
  const Trace trace = generate_trace(traffic);
  const ReplayResult roomy = run(small_options(), trace);
  ReplayOptions options = small_options();
  for (const ReplayRequest& request : roomy.requests) {
    options.cache_tokens =
        std::max(options.cache_tokens, request.prompt_tokens + request.output_tokens + 8);
  }
  const ReplayResult tight = run(options, trace);
  EXPECT_EQ(roomy.preempted, 0);
  EXPECT_GT(tight.preempted, 0);
  EXPECT_GT(tight.recomputed_rows, 0);
  EXPECT_EQ(tight.completed, 5);
  EXPECT_TRUE(tight.ok()) << failures_of(tight);
  EXPECT_EQ(tight.digest_rows, roomy.digest_rows);
  EXPECT_EQ(tight.digest_selection, roomy.digest_selection);
  EXPECT_EQ(tight.digest_output, roomy.digest_output);
}

TEST(Replay, SeedAndLayersChangeTheDigest) {
  const ReplayResult base = run(small_options());
  EXPECT_NE(run_with([](auto& o) { o.seed = 1; }).digest_output, base.digest_output);
  const ReplayResult layers = run_with([](auto& o) { o.layers = "2,0"; });
  EXPECT_NE(layers.digest_output, base.digest_output);
  EXPECT_EQ(layers.digest_rows, 2 * base.digest_rows);
  ASSERT_EQ(layers.layers.size(), 2u);
  EXPECT_EQ(layers.layers[0].id, 2);
  EXPECT_GT(layers.layers[0].checked_rows, 0);
  EXPECT_GT(layers.layers[1].checked_rows, 0);
  EXPECT_TRUE(layers.ok()) << failures_of(layers);
}

TEST(Replay, AWrongPageIsAMismatchThatIsNamed) {
  const ReplayResult base = run(small_options());
  struct Way {
    bool mixed;
    int64_t draft_tokens;
  };
  for (const Way way : {Way{false, 0}, Way{true, 0}, Way{false, 3}}) {
    const ReplayResult result = run_with([&](auto& o) {
      o.inject = "page";
      o.check_rows = 0;
      o.mixed = way.mixed;
      o.draft_tokens = way.draft_tokens;
    });
    EXPECT_FALSE(result.ok());
    EXPECT_EQ(result.check.rows, 1);
    ASSERT_FALSE(result.check.failures.empty());
    EXPECT_THAT(result.check.failures[0].message(),
                testing::MatchesRegex("request [0-9]+, position [0-9]+, layer 0 \\(dsa\\), "
                                      "(index_select|sparse_mla): .*"));
    EXPECT_EQ(result.completed, 12);
    // The digest shows it too; the wrong entry lived for one step only.
    EXPECT_NE(result.digest_output, base.digest_output);
    EXPECT_EQ(result.digest_rows, base.digest_rows);
  }
}

TEST(Replay, AWrongPageNeedsTwoPages) {
  Trace trace;
  trace.requests = {{0, 600, 64, {1, 2}}};
  ReplayOptions options = small_options();
  options.inject = "page";
  EXPECT_THROW(run(options, trace), Error);
}

TEST(Replay, AFailedLaunchIsReportedWithItsStep) {
  try {
    run_with([](auto& o) { o.inject = "launch:9"; });
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_THAT(error.what(), HasSubstr("replay: step "));
    EXPECT_THAT(error.what(), HasSubstr("launch failed (injected fault)"));
  }
  // The fault is gone with the run.
  EXPECT_TRUE(run(small_options()).ok());
}

TEST(Replay, AFailedLaunchMayBeFollowedByAnotherImplementation) {
  const ReplayResult result = run_with([](auto& o) {
    o.inject = "launch:9";
    o.deterministic = false;
  });
  EXPECT_TRUE(result.ok()) << failures_of(result);
  EXPECT_EQ(result.completed, 12);
  ASSERT_EQ(result.notes.size(), 1u);
  EXPECT_THAT(result.notes[0], HasSubstr("another implementation took its place"));
  const ReplayResult late = run_with([](auto& o) { o.inject = "launch:100000"; });
  ASSERT_EQ(late.notes.size(), 1u);
  EXPECT_THAT(late.notes[0], HasSubstr("made fewer launches"));
}

TEST(Replay, ARequestLargerThanTheCacheIsRejectedAndTheOthersComplete) {
  Trace trace = small_trace();
  trace.requests[4].input_length = 100 * 512;
  for (int64_t id = 1000; trace.requests[4].hash_ids.size() < 100; ++id) {
    trace.requests[4].hash_ids.push_back(id);
  }
  ReplayOptions options = small_options();
  options.cache_tokens = 400;
  const ReplayResult result = run(options, trace);
  EXPECT_TRUE(result.ok()) << failures_of(result);
  EXPECT_EQ(result.completed, 11);
  EXPECT_EQ(result.rejected, 1);
  EXPECT_EQ(result.requests[4].outcome, RequestOutcome::kRejected);
  EXPECT_THAT(result.requests[4].message, HasSubstr("the whole cache has 50 pages"));
}

TEST(Replay, OtherTraceFormsRun) {
  TraceGeneratorOptions options;
  options.num_requests = 6;
  options.mean_input_length = 500;
  options.block_tokens = 16;
  options.mean_output_length = 20;
  ReplayOptions replay_options = small_options();
  replay_options.token_scale = 8;
  const ReplayResult blocks16 = run(replay_options, generate_trace(options));
  EXPECT_TRUE(blocks16.ok()) << failures_of(blocks16);
  EXPECT_GT(blocks16.reusable_tokens, 0);
  EXPECT_LE(blocks16.hit_tokens, blocks16.reusable_tokens);
  const Trace arrivals = parse_trace("0,900,30\n5,900,200\n", "a.csv");
  const ReplayResult csv = run(small_options(), arrivals);
  EXPECT_TRUE(csv.ok());
  EXPECT_FALSE(csv.sharing);
  EXPECT_EQ(csv.reusable_tokens, 0);
  ASSERT_EQ(csv.notes.size(), 1u);
}

TEST(Replay, RefusesOptionsBeforeAnythingRuns) {
  const auto message_of = [](const std::function<void(ReplayOptions&)>& change) -> std::string {
    ReplayOptions options = small_options();
    change(options);
    try {
      run(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    ADD_FAILURE() << "accepted";
    return "";
  };
  EXPECT_THAT(message_of([](auto& o) { o.tp = 3; }), HasSubstr("tp = 3 does not divide the 4"));
  EXPECT_THAT(message_of([](auto& o) { o.tp = 0; }), HasSubstr("tp"));
  EXPECT_THAT(message_of([](auto& o) { o.token_scale = 3; }), HasSubstr("token_scale = 3"));
  EXPECT_THAT(message_of([](auto& o) { o.chunk = 0; }), HasSubstr("chunk"));
  EXPECT_THAT(message_of([](auto& o) { o.max_batch = -1; }), HasSubstr("max_batch"));
  EXPECT_THAT(message_of([](auto& o) { o.page = 257; }), HasSubstr("page"));
  EXPECT_THAT(message_of([](auto& o) { o.topk = -1; }), HasSubstr("topk"));
  EXPECT_THAT(message_of([](auto& o) { o.layers = "4"; }), HasSubstr("layers"));
  EXPECT_THAT(message_of([](auto& o) { o.skip = 12; }), HasSubstr("skip"));
  EXPECT_THAT(message_of([](auto& o) { o.max_requests = -1; }), HasSubstr("max_requests"));
  EXPECT_THAT(message_of([](auto& o) { o.check_rows = -1; }), HasSubstr("check_rows"));
  EXPECT_THAT(message_of([](auto& o) { o.cache_tokens = 7; }), HasSubstr("one page of 8"));
  EXPECT_THAT(message_of([](auto& o) { o.cache_tokens = -7; }), HasSubstr("cache_tokens"));
  EXPECT_THAT(message_of([](auto& o) { o.inject = "launch:0"; }), HasSubstr("launch:N"));
  EXPECT_THAT(message_of([](auto& o) { o.inject = "fire"; }), HasSubstr("page or launch:N"));
  EXPECT_THAT(message_of([](auto& o) { o.implementation = "nonsense"; }), HasSubstr("nonsense"));
  EXPECT_THAT(message_of([](auto& o) { o.seed = ~uint64_t{0}; }), HasSubstr("seed"));
  EXPECT_THAT(message_of([](auto& o) { o.virtual_cost.decode_step_ms = -1; }),
              HasSubstr("virtual_cost"));
  EXPECT_THAT(message_of([](auto& o) { o.virtual_cost.draft_forward_ms = -1; }),
              HasSubstr("virtual_cost"));
  EXPECT_THAT(message_of([](auto& o) { o.draft_tokens = 8; }), HasSubstr("draft_tokens"));
  EXPECT_THAT(message_of([](auto& o) { o.draft_tokens = -1; }), HasSubstr("draft_tokens"));
  EXPECT_THAT(message_of([](auto& o) { o.accept = 1.01; }), HasSubstr("accept = 1.01"));
  EXPECT_THAT(message_of([](auto& o) { o.accept = std::nan(""); }), HasSubstr("accept"));
  ReplayOptions unknown;
  unknown.model = "gpt-2";
  EXPECT_THROW(replay(small_trace(), unknown), Error);
}

TEST(Percentile, IsTheNearestRank) {
  using internal::percentile;
  EXPECT_EQ(percentile({}, 0.5), 0.0);
  EXPECT_EQ(percentile({3.0}, 0.99), 3.0);
  const std::vector<double> ten = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  EXPECT_EQ(percentile(ten, 0.50), 5.0);
  EXPECT_EQ(percentile(ten, 0.90), 9.0);
  EXPECT_EQ(percentile(ten, 0.99), 10.0);
  EXPECT_EQ(percentile(ten, 0.0), 1.0);
}

}  // namespace
}  // namespace fovea
