#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/numeric.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::RowResult;
using test::to_doubles;
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kDecode = ForwardMode::kDecode;
constexpr ForwardMode kVerify = ForwardMode::kTargetVerify;

// Rows of up to four blocks of 64 slots.
DsaConfig long_rows(int64_t split_parts) {
  DsaConfig config = DsaRig::small_config(64, RowFormat::kV32);
  config.topk = 256;
  config.max_rows = 400;
  config.table_width = 448;
  config.rows_per_request = 3;
  config.deterministic = false;
  config.split_parts = split_parts;
  return config;
}

void expect_close(const DsaRig& split, const DsaRig& whole) {
  ASSERT_EQ(split.results().size(), whole.results().size());
  for (const auto& [key, row] : split.results()) {
    const RowResult& expected = whole.results().at(key);
    EXPECT_EQ(row.positions, expected.positions);
    const auto numbers = [](const RowResult& result) {
      std::vector<double> values;
      for (const uint16_t bits : result.out) values.push_back(bf16_to_float(bf16_t{bits}));
      return values;
    };
    EXPECT_LT(test::relative_rms(numbers(row), numbers(expected)), 5e-3);
    EXPECT_TRUE(test::ExpectClose(std::vector<double>(row.lse.begin(), row.lse.end()),
                                  std::vector<double>(expected.lse.begin(), expected.lse.end()),
                                  test::kLse));
  }
}

TEST(DsaSplitParts, ThePlanOfAStepChangesRoundingOnly) {
  for (const int64_t parts : {1, 3, 16}) {
    DsaRig split(long_rows(parts), 2), whole(long_rows(0), 2);
    for (DsaRig* const rig : {&split, &whole}) {
      DsaStepPlan decode = rig->backend().make_step_plan({kDecode, 3, 1});
      DsaStepPlan verify = rig->backend().make_step_plan({kVerify, 2, 3});
      std::vector<DsaStepPlan> chain;
      for (int j = 0; j < 3; ++j) chain.push_back(rig->backend().make_step_plan({kDecode, 2, 1}));
      rig->step(kExtend, {{0, 330}, {1, 40}}, {.padded_rows = 380});
      rig->step(kDecode, {{0, 1}, {1, 1}}, {.padded_rows = 5});
      rig->step(kDecode, {{1, 1}, {0, 1}}, {.plan = &decode});
      rig->step(kVerify, {{0, 2}, {1, 1}}, {.plan = &verify});
      rig->draft_chain({0, 1}, {&chain[0], &chain[1], &chain[2]});
      const MetadataFields& fields = verify.metadata();
      EXPECT_EQ(fields.split_schedule.defined(), rig == &split);
      if (rig != &split) continue;
      EXPECT_EQ(fields.split_schedule.shape[0], parts);
      const std::vector<double> pieces = to_doubles(fields.split_indptr);
      ASSERT_EQ(pieces.size(), 7u);
      EXPECT_GE(pieces.back(), 6);  // every row has a piece
    }
    expect_close(split, whole);
  }
}

TEST(DsaSplitParts, AnImplementationThatFollowsNoPlanGetsNone) {
  DsaConfig config = long_rows(3);
  config.implementation = "ref";
  DsaRig planned(config, 1);
  config.split_parts = 0;
  DsaRig whole(config, 1);
  for (DsaRig* const rig : {&planned, &whole}) {
    DsaStepPlan verify = rig->backend().make_step_plan({kVerify, 1, 3});
    rig->step(kExtend, {{0, 70}});
    EXPECT_FALSE(rig->backend().metadata().split_schedule.defined());
    EXPECT_FALSE(rig->backend().metadata().split_indptr.defined());
    rig->step(kVerify, {{0, 2}}, {.plan = &verify});
    EXPECT_FALSE(verify.metadata().split_schedule.defined());
  }
  EXPECT_EQ(planned.results(), whole.results());
  EXPECT_EQ(planned.backend().config().split_parts, 3);  // as it was given
}

// The plan is that of the rows which forward has, not of those which the bucket could hold.
TEST(DsaSplitParts, ABucketWithFewerRowsThanItHoldsFollowsItsPlan) {
  DsaRig eager(long_rows(3), 1), replayed(long_rows(3), 1);
  DsaStepPlan plan = replayed.backend().make_step_plan({ForwardMode::kDraftExtend, 2, 3});
  for (const int count : {3, 1, 2}) {
    for (const int64_t padded_rows : {0, 6}) {
      for (DsaRig* const rig : {&eager, &replayed}) {
        if (rig->results().empty()) rig->step(kExtend, {{0, 330}, {1, 40}});
        rig->step(ForwardMode::kDraftExtend, {{0, count}, {1, 1}},
                  {.padded_rows = padded_rows, .plan = rig == &replayed ? &plan : nullptr});
      }
      const MetadataFields &in_plan = plan.metadata(), &fresh = eager.backend().metadata();
      EXPECT_EQ(to_doubles(in_plan.split_schedule), to_doubles(fresh.split_schedule));
      EXPECT_EQ(to_doubles(in_plan.split_indptr), to_doubles(fresh.split_indptr));
      EXPECT_EQ(in_plan.split_indptr.shape[0], in_plan.topk_length.shape[0] + 1);
    }
  }
  EXPECT_EQ(replayed.results(), eager.results());
}

}  // namespace
}  // namespace fovea
