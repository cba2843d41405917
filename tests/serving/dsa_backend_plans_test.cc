#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::RowResults;
using test::StepOptions;
using test::Tensor;
using test::to_doubles;
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kDecode = ForwardMode::kDecode;
constexpr ForwardMode kVerify = ForwardMode::kTargetVerify;
constexpr ForwardMode kDraft = ForwardMode::kDraftExtend;
constexpr ForwardMode kDraftV2 = ForwardMode::kDraftExtendV2;
constexpr ForwardMode kBucketModes[] = {kDecode, ForwardMode::kIdle, kVerify, kDraft, kDraftV2};

DsaConfig small(RowFormat format = RowFormat::kV32, int64_t page_size = 4) {
  DsaConfig config = DsaRig::small_config(page_size, format);
  config.rows_per_request = 3;
  return config;
}

StepBucket bucket_of(ForwardMode mode, int64_t requests) {
  const bool one_row = mode == kDecode || mode == ForwardMode::kIdle;
  return {mode, requests, one_row ? 1 : 3};
}

// Requests 0, 1, 2 of 37, 21 and 9 tokens, decoded one by one.
RowResults one_by_one(const DsaConfig& config) {
  DsaRig rig(config, 1);
  const int lengths[] = {37, 21, 9};
  for (int id = 0; id < 3; ++id) {
    for (int token = 0; token < lengths[id]; ++token) rig.step(kDecode, {{id, 1}});
  }
  return rig.results();
}

void expect_equal_rows(const RowResults& actual, const RowResults& expected) {
  ASSERT_FALSE(actual.empty());
  for (const auto& [key, row] : actual) {
    ASSERT_TRUE(row == expected.at(key)) << "request " << key.first << " position " << key.second;
  }
}

template <class Act>
void expect_error(ErrorCode code, const std::string& text, Act act) {
  try {
    act();
    ADD_FAILURE() << "no error about " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

// Every field by name, page-table columns past a request's pages left out: they are not written.
std::vector<std::pair<std::string, std::vector<double>>> fields_of(const MetadataFields& fields,
                                                                   int64_t page_size) {
  std::vector<std::pair<std::string, std::vector<double>>> all;
  const auto add = [&](const char* name, const TensorView& field) {
    all.emplace_back(name, field.defined() ? to_doubles(field) : std::vector<double>{});
  };
  add("kv_len", fields.kv_len);
  add("kv_indptr", fields.kv_indptr);
  add("max_kv_len", fields.max_kv_len);
  add("q_indptr", fields.q_indptr);
  add("max_q_len", fields.max_q_len);
  add("row_to_request", fields.row_to_request);
  add("row_len", fields.row_len);
  add("topk_length", fields.topk_length);
  add("topk_indptr", fields.topk_indptr);
  add("ext_len", fields.ext_len);
  add("schedule", fields.schedule);
  add("split_schedule", fields.split_schedule);
  add("split_indptr", fields.split_indptr);
  std::vector<double> pages;
  const std::vector<double> table = to_doubles(fields.page_table),
                            kv_len = to_doubles(fields.kv_len);
  const auto columns = static_cast<size_t>(fields.page_table.shape[1]);
  for (size_t r = 0; r < kv_len.size(); ++r) {
    const auto used = (static_cast<size_t>(kv_len[r]) + static_cast<size_t>(page_size) - 1) /
                      static_cast<size_t>(page_size);
    pages.insert(pages.end(), table.begin() + static_cast<int64_t>(r * columns),
                 table.begin() + static_cast<int64_t>(r * columns + used));
  }
  all.emplace_back("page_table", pages);
  return all;
}

class DsaStepPlans : public test::RigTest {};
INSTANTIATE_TEST_SUITE_P(Formats, DsaStepPlans,
                         testing::Combine(testing::ValuesIn(test::kDevices),
                                          testing::Values(RowFormat::kBf16, RowFormat::kV32,
                                                          RowFormat::kF576)),
                         test::rig_test_name);

TEST_P(DsaStepPlans, ReplayedInAlternationTheyEqualDecodedRows) {
  const RowResults expected = one_by_one(small(format()));
  for (const int threads : {1, 2}) {
    DsaRig rig(small(format()), threads);
    DsaBackend& backend = rig.backend();
    DsaStepPlan decode = backend.make_step_plan({kDecode, 3, 1});
    DsaStepPlan verify = backend.make_step_plan({kVerify, 3, 3});
    DsaStepPlan draft = backend.make_step_plan({kDraft, 3, 3});
    DsaStepPlan draft_v2 = backend.make_step_plan({kDraftV2, 3, 3});
    const auto with = [&](DsaStepPlan& plan) {
      return StepOptions{.host_lengths = threads == 1, .plan = &plan};
    };
    rig.step(kExtend, {{0, 6}, {1, 3}, {2, 1}});
    rig.step(kVerify, {{0, 2}, {1, 3}, {2, 1}}, with(verify));
    rig.step(kDecode, {{0, 1}, {2, 1}, {1, 1}}, with(decode));
    rig.step(kVerify, {{1, 2}, {0, 1}}, with(verify));  // one padded request
    rig.step(kDraft, {{0, 3}, {1, 1}, {2, 2}}, with(draft));
    rig.step(kDecode, {{2, 1}}, with(decode));  // two padded requests
    rig.step(kDraftV2, {{0, 1}, {1, 3}}, with(draft_v2));
    rig.step(kDraft, {{1, 1}}, with(draft));
    rig.step(kVerify, {{0, 3}}, with(verify));
    rig.step(kDecode, {{0, 1}, {1, 1}, {2, 1}}, with(decode));
    rig.step(kDraftV2, {{2, 1}, {1, 1}, {0, 2}}, with(draft_v2));
    expect_equal_rows(rig.results(), expected);
  }
}

TEST_P(DsaStepPlans, OneOfEachInAPlanLeavesTheOthersAndTheEagerStepAlone) {
  DsaRig rig(small(format()), 1);
  DsaStepPlan decode = rig.backend().make_step_plan({kDecode, 2, 1});
  DsaStepPlan verify = rig.backend().make_step_plan({kVerify, 2, 3});
  rig.step(kExtend, {{0, 9}, {1, 5}});
  const auto eager = fields_of(rig.backend().metadata(), 4);
  rig.step(kDecode, {{0, 1}, {1, 1}}, {.plan = &decode});
  const auto before = fields_of(decode.metadata(), 4);
  rig.step(kVerify, {{0, 1}, {1, 1}}, {.plan = &verify});
  EXPECT_EQ(fields_of(decode.metadata(), 4), before);
  EXPECT_EQ(fields_of(rig.backend().metadata(), 4), eager);
  EXPECT_NE(decode.metadata().kv_len.data, verify.metadata().kv_len.data);
}

TEST(DsaStepPlan, HoldsAStepOfPaddedRequestsAtBirth) {
  for (const ForwardMode mode : kBucketModes) {
    DsaRig rig(small(), 1);
    const DsaStepPlan plan = rig.backend().make_step_plan(bucket_of(mode, 2));
    EXPECT_EQ(plan.bucket().mode, mode);
    const std::vector<double> length(2, mode == kVerify ? 4 : 1);
    EXPECT_EQ(to_doubles(plan.metadata().kv_len), length) << to_string(mode);
    for (const double page : to_doubles(plan.metadata().page_table)) EXPECT_EQ(page, 0);
    // A forward of it runs and stores nothing.
    StepOptions options;
    options.adjust = [&](ForwardBatch&, DsaForwardTensors& tensors) {
      const ConstTensorView pool = tensors.kv_pool;
      Tensor before(DType::kU8, {pool.shape[0], pool.shape[1]});
      std::memcpy(before.data<uint8_t>(), pool.data, before.bytes().size());
      rig.backend().forward(plan, {0, DsaRig::kSoftmaxScale}, tensors);
      EXPECT_EQ(std::memcmp(before.data<uint8_t>(), pool.data, before.bytes().size()), 0);
    };
    const int rows = mode == kDecode || mode == ForwardMode::kIdle ? 1 : 3;
    rig.step(kExtend, {{1, rows}, {2, rows}}, options);
  }
}

// Every field of a plan after a large and a small batch against a plan that saw the small one only.
TEST(DsaStepPlan, ALargeBatchLeavesNoTrace) {
  for (const ForwardMode mode : kBucketModes) {
    for (const int64_t page_size : {1, 4, 64}) {
      DsaRig rig(small(RowFormat::kBf16, page_size), 2);
      DsaStepPlan used = rig.backend().make_step_plan(bucket_of(mode, 4));
      DsaStepPlan fresh = rig.backend().make_step_plan(bucket_of(mode, 4));
      rig.step(kExtend, {{0, 90}, {1, 30}, {2, 7}});
      rig.step(kExtend, {{3, 50}});
      const int most = mode == kDecode || mode == ForwardMode::kIdle ? 1 : 3;
      rig.step(mode, {{0, most}, {1, most}, {2, most}, {3, most}}, {.plan = &used});
      StepOptions options{.plan = &used};
      if (mode == kDraft) {  // all rows of the bucket, live or not
        options.rows_bound = 12;
        options.host_lengths = false;
      }
      options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) {
        rig.backend().begin_step(batch, &fresh);
      };
      rig.step(mode, {{2, 1}}, options);
      EXPECT_EQ(fields_of(used.metadata(), page_size), fields_of(fresh.metadata(), page_size))
          << to_string(mode) << " page size " << page_size;
    }
  }
}

TEST(DsaStepPlan, AnExactDraftExtendAlsoClearsTheTailOfItsBucket) {
  DsaRig rig(small(), 1);
  DsaStepPlan plan = rig.backend().make_step_plan({kDraft, 2, 3});
  rig.step(kExtend, {{0, 20}, {1, 20}});
  rig.step(kDraft, {{0, 3}, {1, 3}}, {.plan = &plan});
  const MetadataFields large = plan.metadata();
  rig.step(kDraft, {{0, 1}, {1, 1}}, {.plan = &plan});
  // The views of the larger step look at all rows of the bucket.
  EXPECT_EQ(to_doubles(large.row_len), (std::vector<double>{24, 24, 0, 0, 0, 0}));
  EXPECT_EQ(to_doubles(large.row_to_request), (std::vector<double>{0, 1, -1, -1, -1, -1}));
  EXPECT_EQ(to_doubles(large.topk_length), (std::vector<double>{8, 8, 0, 0, 0, 0}));
  EXPECT_EQ(to_doubles(large.topk_indptr), (std::vector<double>{0, 8, 16, 16, 16, 16, 16}));
}

TEST(DsaStepPlan, ReplaysDoNotAllocate) {
  DsaRig rig(small(), 2);
  rig.step(kExtend, {{0, 20}, {1, 12}});
  for (const ForwardMode mode : kBucketModes) {
    DsaStepPlan plan = rig.backend().make_step_plan(bucket_of(mode, 3));
    StepOptions options{.plan = &plan};
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
      rig.backend().begin_step(batch, &plan);
      rig.backend().forward(plan, {0, DsaRig::kSoftmaxScale}, tensors);
      const test::AllocationCounter counter;
      rig.backend().begin_step(batch, &plan);
      rig.backend().forward(plan, {0, DsaRig::kSoftmaxScale}, tensors);
      EXPECT_EQ(counter.count(), 0) << to_string(mode);
    };
    rig.step(mode, {{0, 1}, {1, 1}}, options);
  }
}

TEST(DsaStepPlan, RefusesBucketsAndBatchesThatDoNotFit) {
  DsaRig rig(small(), 1);
  DsaBackend& backend = rig.backend();
  const auto refuses_bucket = [&](const StepBucket& bucket, const std::string& text) {
    expect_error(ErrorCode::kInvalidArgument, text, [&] { backend.make_step_plan(bucket); });
  };
  refuses_bucket({kExtend, 2, 1}, "bucket.mode = extend");
  refuses_bucket({ForwardMode::kMixed, 2, 1}, "bucket.mode = mixed");
  refuses_bucket({static_cast<ForwardMode>(9), 2, 1}, "bucket.mode = 9");
  refuses_bucket({kDecode, 9, 1}, "bucket.num_requests = 9");
  refuses_bucket({kDecode, -1, 1}, "bucket.num_requests = -1");
  refuses_bucket({kDecode, 2, 3}, "bucket.rows_per_request = 3");
  refuses_bucket({kVerify, 2, 1}, "bucket.rows_per_request = 1");
  refuses_bucket({kDraft, 2, 4}, "bucket.rows_per_request = 4");
  rig.step(kExtend, {{0, 9}, {1, 9}});
  DsaStepPlan plan = backend.make_step_plan({kDecode, 2, 1});
  const auto before = fields_of(plan.metadata(), 4);
  const auto refuses_batch = [&](const std::string& text, auto change, ForwardMode mode = kDecode) {
    StepOptions options{.plan = &plan};
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) { change(batch); };
    expect_error(ErrorCode::kInvalidArgument, text, [&] {
      rig.step(mode, {{0, 1}, {1, 1}}, options);
    });
    EXPECT_EQ(fields_of(plan.metadata(), 4), before);
  };
  refuses_batch(
      "mode = target_verify", [](auto&) {}, kVerify);
  refuses_batch("seq_len.shape[0] = 1", [](auto& batch) {
    batch.seq_len.shape[0] = batch.pool_row.shape[0] = batch.positions.shape[0] = 1;
    batch.out_cache_loc.shape[0] = batch.num_rows = 1;
    batch.host_seq_len = batch.host_seq_len.first(1);
  });
  refuses_batch("padded_rows = 3", [](auto& batch) { batch.padded_rows = 3; });
  DsaStepPlan moved = std::move(plan);
  expect_error(ErrorCode::kInvalidArgument, "moved from", [&] {
    backend.forward(plan, {0, 1.0f}, {});  // NOLINT: what a moved plan does
  });
  DsaBackend other(small(), Device::cpu(1));
  expect_error(ErrorCode::kInvalidArgument, "another backend", [&] {
    other.forward(moved, {0, 1.0f}, {});
  });
  expect_error(ErrorCode::kInvalidArgument, "plan is null",
               [&] { backend.begin_step({}, nullptr); });
}

// A padded request has one token in a mode whose requests have three rows; a live one may not.
TEST(DsaStepPlan, OnlyPaddedRequestsMayHaveFewerTokensThanRows) {
  DsaRig rig(small(), 1);
  rig.step(kExtend, {{0, 9}});
  DsaStepPlan plan = rig.backend().make_step_plan({kDraftV2, 2, 3});
  rig.step(kDraftV2, {{0, 2}}, {.plan = &plan});
  EXPECT_EQ(to_doubles(plan.metadata().row_len), (std::vector<double>{10, 11, 12, -1, 0, 1}));
  EXPECT_EQ(to_doubles(plan.metadata().topk_length), (std::vector<double>{8, 8, 8, 0, 0, 1}));
  static constexpr int32_t kShort[] = {12, 2};
  StepOptions options{.plan = &plan};
  options.adjust = [](ForwardBatch& batch, DsaForwardTensors&) { batch.host_seq_len = kShort; };
  expect_error(ErrorCode::kInvalidArgument, "request 1: host_seq_len = 2", [&] {
    rig.step(kDraftV2, {{0, 1}}, options);
  });
}

TEST_P(DsaStepPlans, AChainOfDraftsEqualsDecodedRows) {
  const RowResults expected = one_by_one(small(format()));
  for (const bool host_lengths : {true, false}) {
    DsaRig rig(small(format()), 2);
    std::vector<DsaStepPlan> plans;
    for (int j = 0; j < 8; ++j) plans.push_back(rig.backend().make_step_plan({kDecode, 3, 1}));
    const auto first = [&](size_t count) {
      std::vector<DsaStepPlan*> chain;
      for (size_t j = 0; j < count; ++j) chain.push_back(&plans[j]);
      return chain;
    };
    rig.step(kExtend, {{0, 10}, {1, 3}});
    std::vector<OperatorCall> calls;
    rig.backend().set_profile(&calls);
    rig.draft_chain({0, 1}, first(8), host_lengths);  // 18, 11; one padded request
    int refreshes = 0;
    for (const OperatorCall& call : calls) refreshes += call.name == "metadata_refresh" ? 1 : 0;
    EXPECT_EQ(refreshes, 1);
    rig.backend().set_profile(nullptr);
    rig.draft_chain({1, 0}, first(2), host_lengths);
    rig.draft_chain({1}, first(1), host_lengths);
    rig.step(kDecode, {{0, 1}, {1, 1}});
    ASSERT_EQ(rig.results().size(), 13u + 16u + 4u + 1u + 2u);
    expect_equal_rows(rig.results(), expected);
  }
}

TEST(DsaDraftSteps, TogetherEqualEachAloneForAnyDelta) {
  DsaRig rig(small(), 1);
  std::vector<DsaStepPlan> together, alone;
  for (int j = 0; j < 8; ++j) {
    together.push_back(rig.backend().make_step_plan({kDecode, 2, 1}));
    alone.push_back(rig.backend().make_step_plan({kDecode, 2, 1}));
  }
  rig.step(kExtend, {{0, 40}, {1, 7}});
  StepOptions options;
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) {
    ForwardBatch chain = batch;
    chain.positions = chain.out_cache_loc = {};
    for (const bool original : {false, true}) {
      std::vector<DraftStep> steps;
      for (size_t j = 0; j < 8; ++j) {
        steps.push_back({&together[j], batch.positions, batch.out_cache_loc});
        if (original) steps[j].kv_len_delta = 0;
        DraftStep single{&alone[j], batch.positions, batch.out_cache_loc};
        single.kv_len_delta = original ? 0 : static_cast<int32_t>(j) + 1;
        rig.backend().begin_draft_steps(chain, {&single, 1});
      }
      rig.backend().begin_draft_steps(chain, steps);
      for (size_t j = 0; j < 8; ++j) {
        EXPECT_EQ(fields_of(together[j].metadata(), 4), fields_of(alone[j].metadata(), 4));
        const double delta = original ? 0 : static_cast<double>(j) + 1;
        EXPECT_EQ(to_doubles(together[j].metadata().kv_len),
                  (std::vector<double>{41 + delta, 8 + delta}));
      }
    }
    const test::AllocationCounter counter;
    std::array<DraftStep, 2> steps = {DraftStep{&together[0], batch.positions, batch.out_cache_loc},
                                      {&together[1], batch.positions, batch.out_cache_loc}};
    rig.backend().begin_draft_steps(chain, steps);
    EXPECT_EQ(counter.count(), 0);
  };
  rig.step(kDecode, {{0, 1}, {1, 1}}, options);
}

TEST(DsaDraftSteps, WithoutStepsNothingRuns) {
  DsaRig rig(small(), 1);
  rig.step(kExtend, {{0, 9}});
  std::vector<OperatorCall> calls;
  rig.backend().set_profile(&calls);
  StepOptions options;
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) {
    ForwardBatch chain = batch;
    chain.positions = chain.out_cache_loc = {};
    rig.backend().begin_draft_steps(chain, {});
    EXPECT_TRUE(calls.empty());
  };
  rig.step(kDecode, {{0, 1}}, options);
}

TEST(DsaDraftSteps, RefusesWhatAChainCannotBe) {
  DsaRig rig(small(), 1);
  DsaStepPlan a = rig.backend().make_step_plan({kDecode, 2, 1});
  DsaStepPlan b = rig.backend().make_step_plan({kDecode, 2, 1});
  DsaStepPlan verify = rig.backend().make_step_plan({kVerify, 2, 3});
  const auto before = fields_of(a.metadata(), 4);
  rig.step(kExtend, {{0, 9}, {1, 9}});
  const auto refuses =
      [&](const std::string& text,
          const std::function<void(ForwardBatch&, std::vector<DraftStep>&)>& change) {
        StepOptions options;
        options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) {
          ForwardBatch chain = batch;
          chain.positions = chain.out_cache_loc = {};
          std::vector<DraftStep> steps = {{&a, batch.positions, batch.out_cache_loc},
                                          {&b, batch.positions, batch.out_cache_loc}};
          change(chain, steps);
          expect_error(ErrorCode::kInvalidArgument, text,
                       [&] { rig.backend().begin_draft_steps(chain, steps); });
          EXPECT_EQ(fields_of(a.metadata(), 4), before);
        };
        rig.step(kDecode, {{0, 1}, {1, 1}}, options);
      };
  refuses("draft steps 0 and 1 name one plan", [&](auto&, auto& steps) { steps[1].plan = &a; });
  refuses("plan of draft step 1 is null", [&](auto&, auto& steps) { steps[1].plan = nullptr; });
  refuses("mode = decode, expected that of the plan's bucket, target_verify",
          [&](auto&, auto& steps) { steps[1].plan = &verify; });
  refuses("number of draft steps = 9", [&](auto&, auto& steps) { steps.resize(9); });
  refuses("mode = idle", [&](auto& batch, auto&) { batch.mode = ForwardMode::kIdle; });
  refuses("positions is given", [&](auto& batch, auto&) { batch.positions = batch.seq_len; });
  refuses("positions", [&](auto&, auto& steps) { steps[1].positions = {}; });
  refuses("out_cache_loc", [&](auto&, auto& steps) { steps[1].out_cache_loc.shape[0] = 1; });
  static constexpr int32_t kLong[] = {9, 127}, kEmpty[] = {9, 0};
  refuses("request 1: host_seq_len = 127 plus kv_len_delta = 2, expected at most table_width",
          [&](auto& batch, auto&) { batch.host_seq_len = kLong; });
  refuses("request 1: host_seq_len = 0, expected at least its 1 new rows",
          [&](auto& batch, auto& steps) {
            batch.host_seq_len = kEmpty;
            steps[1].kv_len_delta = 0;
          });
}

}  // namespace
}  // namespace fovea
