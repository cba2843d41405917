#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "fovea/json.h"
#include "fovea/replay.h"
#include "tests/replay/json_schema.h"

namespace fovea {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Json schema() { return test::read_json(FOVEA_SOURCE_DIR "/docs/replay.schema.json"); }

// A result with every optional part present and numbers at their edges.
ReplayResult full_result() {
  ReplayResult result;
  result.version = "0.1.0";
  result.device = "cpu";
  result.page = 8;
  result.notes = {"a \"note\"\n"};
  result.digest_selection = ~uint64_t{0};
  result.digest_output = 7;
  result.rejected = 1;
  ReplayRequest request;
  request.id = 3;
  request.outcome = RequestOutcome::kRejected;
  request.message = "too large";
  result.requests = {ReplayRequest{}, request};
  CheckFailure failure;
  failure.layer_kind = "dsa";
  failure.op = "sparse_mla";
  failure.kind = "output";
  result.check.failures = {failure};
  result.check.worst = std::numeric_limits<double>::quiet_NaN();
  result.layers.resize(1);
  ReplayOperator op;
  op.name = "sparse_mla";
  result.ops = {op, op};
  result.ops[1].roofline_share = 0.5;
  result.steps.resize(2);
  result.steps[1].kind = StepKind::kIdle;
  result.options.draft_tokens = 3;
  result.options.accept = 0.25;
  result.options.draft_mode = DraftMode::kV2;
  result.modes = {{ForwardMode::kDraftExtendV2, true, 2, 8, 0.5}};
  result.drafts = ReplayDrafts{1, 2, 6, 4, 3, 0.75, 3, {1, 0, 0, 1}};
  result.options.graph = true;
  result.graphs = ReplayGraphs{2, 9, 40};
  result.steps[0].step_ms = 2.5;
  return result;
}

TEST(ReplayJson, FollowsItsSchema) {
  for (const ReplayResult& result : {ReplayResult{}, full_result()}) {
    ReplayResult complete = result;
    complete.page = 1;
    EXPECT_THAT(test::schema_errors(schema(), Json::parse(to_json(complete), "result")), IsEmpty());
  }
}

TEST(ReplayJson, HoldsTheNamedFields) {
  const Json json = Json::parse(to_json(full_result()), "result");
  EXPECT_EQ(json.find("digest")->find("selection")->as_string(), "0xffffffffffffffff");
  EXPECT_EQ(json.find("digest")->find("output")->as_string(), "0x0000000000000007");
  EXPECT_EQ(json.find("steps")->find("count")->as_integer(), 2);
  EXPECT_EQ(json.find("check")->find("worst")->kind(), Json::Kind::kNull);
  EXPECT_EQ(json.find("ops")->items()[0].find("roofline_share")->kind(), Json::Kind::kNull);
  EXPECT_EQ(json.find("ops")->items()[1].find("roofline_share")->as_number(), 0.5);
  EXPECT_EQ(json.find("options")->find("accept")->as_number(), 0.25);
  EXPECT_EQ(json.find("options")->find("draft_mode")->as_string(), "v2");
  EXPECT_EQ(json.find("drafts")->find("rate")->as_number(), 0.75);
  EXPECT_EQ(json.find("drafts")->find("accepted_lengths")->items().size(), 4u);
  EXPECT_EQ(json.find("modes")->items()[0].find("mode")->as_string(), "draft_extend_v2");
  EXPECT_EQ(json.find("modes")->items()[0].find("model")->as_string(), "draft");
  const Json::Array& kinds = json.find("steps")->find("kinds")->items();
  ASSERT_EQ(kinds.size(), 2u);
  EXPECT_EQ(kinds[1].find("kind")->as_string(), "idle");
  EXPECT_EQ(kinds[0].find("p99_ms")->as_number(), 2.5);
  EXPECT_EQ(json.find("graphs")->find("replays")->as_integer(), 9);
  const Json plain = Json::parse(to_json(ReplayResult{}), "result");
  EXPECT_EQ(plain.find("drafts")->kind(), Json::Kind::kNull);
  EXPECT_EQ(plain.find("graphs")->kind(), Json::Kind::kNull);
  EXPECT_EQ(plain.find("options")->find("draft_mode")->kind(), Json::Kind::kNull);
  const Json::Array& rejections = json.find("requests")->find("rejections")->items();
  ASSERT_EQ(rejections.size(), 1u);
  EXPECT_EQ(rejections[0].find("request")->as_integer(), 3);
}

TEST(JsonSchema, ReportsWhatBreaksIt) {
  const Json json = Json::parse(to_json(full_result()), "result");
  const auto errors_with = [&](const char* key, Json value) {
    Json changed = json;
    changed.set(key, std::move(value));
    return test::schema_errors(schema(), changed);
  };
  EXPECT_THAT(errors_with("threads", "2"), ElementsAre(HasSubstr("$.threads")));
  EXPECT_THAT(errors_with("threads", 0), ElementsAre(HasSubstr("out of range")));
  EXPECT_THAT(errors_with("threads", 1.5), ElementsAre(HasSubstr("integer")));
  EXPECT_THAT(errors_with("page", 257), ElementsAre(HasSubstr("out of range")));
  EXPECT_THAT(errors_with("surplus", 1), ElementsAre(HasSubstr("unknown member surplus")));
  Json digest = *json.find("digest");
  EXPECT_THAT(errors_with("digest", digest.set("output", "7")),
              ElementsAre(HasSubstr("does not match")));
  Json options = *json.find("options");
  EXPECT_THAT(errors_with("options", options.set("arrivals", "late")),
              ElementsAre(HasSubstr("not among")));
  EXPECT_THAT(errors_with("layers", Json::array({Json::object()})),
              testing::Contains(HasSubstr("$.layers[0]: lacks kind")));
  EXPECT_THAT(test::schema_errors(Json::parse(R"({"oneOf": []})", "s"), json),
              ElementsAre(HasSubstr("oneOf")));
}

}  // namespace
}  // namespace fovea
