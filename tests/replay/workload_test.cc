#include "src/replay/workload.h"

#include <gtest/gtest.h>

#include <set>

#include "fovea/error.h"
#include "src/replay/model_presets.h"

namespace fovea::internal {
namespace {

Trace two_chats() {
  Trace trace;
  // 1100 tokens: two full blocks and a part; the second request shares the first two blocks, the
  // third one nothing but the number of its second block, under another first one.
  trace.requests = {{0, 1100, 100, {1, 2, 3}}, {0, 1500, 0, {1, 2, 4}}, {3, 1024, 7, {5, 2}}};
  return trace;
}

Workload make(const Trace& trace, int64_t scale) { return Workload(trace, {0, 0, scale}); }

TEST(Workload, ScalesLengthsUp) {
  const Trace trace = two_chats();
  const Workload workload = make(trace, 64);
  ASSERT_EQ(workload.num_requests(), 3);
  EXPECT_EQ(workload.request(0).prompt_tokens, 18);  // ceil(1100 / 64)
  EXPECT_EQ(workload.request(0).output_tokens, 2);
  EXPECT_EQ(workload.request(1).output_tokens, 1);  // at least one
  EXPECT_EQ(workload.request(1).reusable_tokens, 16);
  EXPECT_EQ(workload.request(2).reusable_tokens, 0);
  EXPECT_EQ(make(trace, 1).request(1).reusable_tokens, 1024);
}

TEST(Workload, EqualPrefixesAreEqualTokensAndPages) {
  const Trace trace = two_chats();
  for (const int64_t scale : {1, 64, 512}) {
    const Workload workload = make(trace, scale);
    std::set<uint64_t> distinct;
    for (int64_t p = 0; p < workload.request(0).num_rows(); ++p) {
      EXPECT_TRUE(distinct.insert(workload.token_id(0, p)).second);
      const bool shared = p < 1024 / scale;
      EXPECT_EQ(workload.token_id(0, p) == workload.token_id(1, p), shared) << p;
    }
    for (int64_t page_size = 1; page_size <= 16; ++page_size) {
      const std::vector<uint64_t> first = workload.page_hashes(0, page_size);
      const std::vector<uint64_t> second = workload.page_hashes(1, page_size);
      const std::vector<uint64_t> third = workload.page_hashes(2, page_size);
      ASSERT_EQ(first.size(), static_cast<size_t>(workload.request(0).prompt_tokens / page_size));
      for (size_t page = 0; page < first.size(); ++page) {
        const bool shared = static_cast<int64_t>(page + 1) * page_size <= 1024 / scale;
        EXPECT_EQ(first[page] == second[page], shared);
        // Block 2 occurs in the third request too, but behind another block.
        if (page < third.size()) {
          EXPECT_NE(first[page], third[page]);
        }
      }
    }
  }
}

TEST(Workload, BlocksOf16TokensAgreeWithTheirTokensAtEveryScale) {
  Trace trace;
  trace.block_tokens = 16;
  trace.requests = {{0, 80, 1, {1, 2, 3, 4, 5}}, {0, 100, 1, {1, 2, 3, 6, 7, 8, 9}}};
  for (const int64_t scale : {1, 4, 16, 32, 64}) {
    const Workload workload = make(trace, scale);
    const int64_t shared = 48 / scale;  // whole replayed tokens of three blocks
    EXPECT_EQ(workload.request(1).reusable_tokens, shared);
    for (int64_t p = 0; p < workload.request(0).prompt_tokens; ++p) {
      EXPECT_EQ(workload.token_id(0, p) == workload.token_id(1, p), p < shared) << scale;
      EXPECT_EQ(workload.page_hashes(0, 1)[static_cast<size_t>(p)] ==
                    workload.page_hashes(1, 1)[static_cast<size_t>(p)],
                p < shared);
    }
  }
}

TEST(Workload, AnEqualPromptIsReusableToItsEnd) {
  Trace trace;
  trace.requests = {{0, 600, 1, {1, 2}}, {0, 600, 1, {1, 2}}};
  EXPECT_EQ(make(trace, 64).request(1).reusable_tokens, 10);  // ceil(600 / 64)
  // When the first one does not run, the second one is the first to compute them.
  EXPECT_EQ(make(trace, 64).shared_prefixes({false, true})[1], 0);
}

TEST(Workload, GeneratedTokensAreTheRequestsOwnAndFollowTheSeed) {
  const Trace trace = two_chats();
  const Workload workload = make(trace, 1);
  EXPECT_NE(workload.token_id(0, 1100), workload.token_id(0, 1101));
  EXPECT_NE(workload.token_id(0, 1500), workload.token_id(1, 1500));
  const Workload other(trace, {0, 0, 1, false, 9});
  EXPECT_NE(workload.token_id(0, 1100), other.token_id(0, 1100));
  EXPECT_EQ(workload.token_id(0, 1099), other.token_id(0, 1099));
}

TEST(Workload, TracesWithoutIdsShareNothing) {
  Trace trace;
  trace.has_hashes = false;
  trace.requests = {{0, 100, 1, {}}, {0, 100, 1, {}}};
  const Workload workload = make(trace, 1);
  EXPECT_EQ(workload.request(1).reusable_tokens, 0);
  EXPECT_TRUE(workload.page_hashes(0, 4).empty());
  EXPECT_NE(workload.token_id(0, 0), workload.token_id(1, 0));
}

TEST(Workload, SkipsLimitsAndSpreads) {
  Trace trace;
  trace.has_hashes = false;
  for (int64_t i = 0; i < 10; ++i) {
    trace.requests.push_back({static_cast<double>(i / 5 * 3000), 10, 1, {}});
  }
  const Workload some(trace, {2, 3, 1});
  ASSERT_EQ(some.num_requests(), 3);
  EXPECT_EQ(some.request(0).trace_row, 2);
  const Workload spread(trace, {0, 0, 1, true, 4});
  std::set<double> times;
  for (int64_t r = 0; r < 10; ++r) {
    const double time = spread.request(r).arrival_ms;
    EXPECT_GE(time, static_cast<double>(r / 5 * 3000));
    EXPECT_LT(time, static_cast<double>(r / 5 * 3000 + 3000));
    if (r > 0) {
      EXPECT_GE(time, spread.request(r - 1).arrival_ms);
    }
    times.insert(time);
  }
  EXPECT_EQ(times.size(), 10u);
  EXPECT_THROW(Workload(trace, {10, 0, 1}), Error);
  EXPECT_THROW(Workload(trace, {-1, 0, 1}), Error);
  EXPECT_THROW(Workload(trace, {0, -1, 1}), Error);
  for (const int64_t scale : {0, -1, 3, 1024}) EXPECT_THROW(Workload(trace, {0, 0, scale}), Error);
}

TEST(Workload, RefusesHandMadeTracesThatBreakTheForm) {
  Trace trace = two_chats();
  trace.requests[1].hash_ids.pop_back();
  EXPECT_THROW(make(trace, 1), Error);
  trace = two_chats();
  trace.requests[1].input_length = 0;
  EXPECT_THROW(make(trace, 1), Error);
  EXPECT_THROW(make(Trace{}, 1), Error);
}

TEST(ModelPresets, KnowTheirLayers) {
  const ModelSpec model = find_model("deepseek-v3.2");
  EXPECT_EQ(parse_layers(model, "pattern"), std::vector<int64_t>{0});
  EXPECT_EQ(parse_layers(model, "all").size(), 61u);
  EXPECT_EQ(parse_layers(model, "3"), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(parse_layers(model, "60,0"), (std::vector<int64_t>{60, 0}));
  EXPECT_EQ(parse_layers(model, "5,"), std::vector<int64_t>{5});
  for (const char* text : {"", "0", "62", "-1", "some", "1,61", "1,1", "1,,2", "1x"}) {
    EXPECT_THROW(parse_layers(model, text), Error) << text;
  }
  try {
    find_model("gpt-2");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("deepseek-v3.2"), std::string::npos);
  }
}

}  // namespace
}  // namespace fovea::internal
