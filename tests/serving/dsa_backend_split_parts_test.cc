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

}  // namespace
}  // namespace fovea
