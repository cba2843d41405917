// sparse_mla under the split plan of a step.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/metadata.h"
#include "fovea/sparse_mla.h"
#include "tests/mla/sparse_mla_case.h"
#include "tests/support/sanitizers.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::CaseSpec;
using test::Outputs;
using test::SameBits;
using test::SparseMlaCase;
using test::StridedTensor;

class SparseMlaSplitTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }
  Outputs run(SparseMlaCase& test_case, int threads = 1) {
    return test_case.run(options(), threads);
  }
  bool follows_plans() const { return GetParam().implementation.starts_with("cpu"); }
};
INSTANTIATE_TEST_SUITE_P(Targets, SparseMlaSplitTest,
                         testing::ValuesIn(test::targets_of("sparse_mla", {"cuda_sm90_rows",
                                                                           "cuda_sm90_window"})),
                         test::target_name);

// Row t of `with` has the bits of row t of `without`.
bool same_row(const Outputs& with, const Outputs& without, int64_t t, int64_t heads) {
  const auto begin = static_cast<std::ptrdiff_t>(t * heads);
  return std::equal(with.out_bits.begin() + begin * 512,
                    with.out_bits.begin() + (begin + heads) * 512,
                    without.out_bits.begin() + begin * 512) &&
         std::equal(with.lse_bits.begin() + begin, with.lse_bits.begin() + begin + heads,
                    without.lse_bits.begin() + begin);
}

// Fills every list of the first cache with keys that some list named: the others are NaN, and now
// any length may be set.
void name_known_keys(const CaseSpec& spec, const std::vector<SparseMlaCase*>& cases) {
  std::vector<int32_t> known;
  for (int64_t t = 0; t < spec.rows; ++t) {
    const int64_t length =
        std::clamp<int64_t>(cases[0]->topk_length_of(0, t), 0, spec.primary.topk);
    for (int64_t slot = 0; slot < length; ++slot) {
      const int32_t index = cases[0]->index(0, t, slot);
      if (index >= 0 && index < spec.primary.num_keys) known.push_back(index);
    }
  }
  ASSERT_GT(known.size(), 50u);
  for (int64_t t = 0; t < spec.rows; ++t) {
    for (int64_t slot = 0; slot < spec.primary.topk; ++slot) {
      for (SparseMlaCase* one : cases)
        one->index(0, t, slot) = known[static_cast<size_t>(t * 31 + slot) % known.size()];
    }
  }
}

TEST_P(SparseMlaSplitTest, FollowsTheFormulaForAnyLengthsAndParts) {
  uint64_t seed = 300;
  for (const int64_t parts : {1, 2, 3, 8, 64, 1000}) {
    for (const int64_t heads : {1, 9, 40}) {
      ++seed;
      // Watched by a sanitizer: every number of parts once, every number of heads, both caches.
      if (test::kSanitized && seed % 4 != 0 && seed % 7 != 0) continue;
      // Lengths of 0, below 0 and above the width are among them.
      CaseSpec spec;
      spec.rows = 6;
      spec.heads = heads;
      spec.primary = {RowFormat::kV32, 16, 320, test::by_build(700, 330), true};
      spec.split_parts = parts;
      spec.seed = seed;
      if (seed % 2 == 0) {
        spec.extra = {RowFormat::kBf16, 0, 100, 130, true};
        spec.sink = true;
      }
      SparseMlaCase test_case(spec);
      const Outputs one = run(test_case);
      EXPECT_TRUE(test_case.matches(one)) << parts << " parts, " << heads << " heads";
      for (const int threads : {2, 3})
        EXPECT_TRUE(SameBits(one, run(test_case, threads))) << parts << " parts";
      EXPECT_TRUE(SameBits(one, run(test_case)));
    }
  }
}

TEST_P(SparseMlaSplitTest, OneRowOfTheModelsWidthInAnyNumberOfParts) {
  CaseSpec spec;
  spec.heads = 3;
  spec.primary = {RowFormat::kF576, 64, 512, 2048, false};
  SparseMlaCase plain(spec);
  const Outputs without = run(plain);
  bool any_different = false;
  for (const int64_t parts : {1, 2, 5, 16, 64}) {
    spec.split_parts = parts;
    SparseMlaCase test_case(spec);
    const Outputs one = run(test_case);
    EXPECT_TRUE(test_case.matches(one)) << parts;
    EXPECT_TRUE(SameBits(one, run(test_case, 2))) << parts;
    const bool different = !SameBits(one, without);
    EXPECT_FALSE(parts == 1 && different);
    any_different = any_different || different;
  }
  EXPECT_EQ(any_different, follows_plans());  // the plan is followed: other cuts, other rounding
}

TEST_P(SparseMlaSplitTest, RowsThatThePlanLeavesWholeHaveTheBitsOfARunWithoutOne) {
  CaseSpec spec;
  spec.rows = 9;
  spec.heads = 5;
  spec.primary = {RowFormat::kBf16, 0, 300, 900, true};
  spec.split_parts = 6;
  SparseMlaCase planned(spec);
  spec.split_parts = 0;
  SparseMlaCase plain(spec);
  // One long row among short and empty ones.
  const int32_t lengths[] = {3, 0, 64, 65, 900, 1, 0, 200, 7};
  name_known_keys(spec, {&planned, &plain});
  for (int64_t t = 0; t < 9; ++t)
    planned.topk_length_of(0, t) = plain.topk_length_of(0, t) = lengths[t];
  const Outputs with = run(planned, 2);
  EXPECT_TRUE(planned.matches(with));
  const Outputs without = run(plain);
  StridedTensor indptr;
  planned.schedule(0, 9, &indptr);
  int64_t split_rows = 0;
  for (int64_t t = 0; t < 9; ++t) {
    if (indptr.at<int32_t>({t + 1}) - indptr.at<int32_t>({t}) > 1) {
      ++split_rows;
      continue;
    }
    EXPECT_TRUE(same_row(with, without, t, 5)) << "row " << t;
  }
  EXPECT_GT(split_rows, 0);
  EXPECT_TRUE(planned.agree(with, without));
}

TEST_P(SparseMlaSplitTest, NoRowsAndOnlyEmptyRows) {
  CaseSpec spec;
  spec.rows = 0;
  spec.heads = 4;
  spec.primary = {RowFormat::kBf16, 0, 10, 70, true};
  spec.split_parts = 8;
  SparseMlaCase none(spec);
  EXPECT_TRUE(run(none, 2).out.empty());
  spec.rows = 5;
  SparseMlaCase empty(spec);
  for (int64_t t = 0; t < 5; ++t) empty.topk_length_of(0, t) = 0;
  const Outputs outputs = run(empty, 2);
  for (const uint16_t bits : outputs.out_bits) ASSERT_EQ(bits, 0);
  for (const double lse : outputs.lse) ASSERT_EQ(lse, -INFINITY);
  spec.primary.topk = 0;
  spec.primary.lengths = false;
  SparseMlaCase narrow(spec);
  for (const double lse : run(narrow).lse) ASSERT_EQ(lse, -INFINITY);
}

TEST_P(SparseMlaSplitTest, AStaleOrBrokenScheduleNeverGivesAWrongRow) {
  CaseSpec spec;
  spec.rows = 7;
  spec.heads = 3;
  spec.primary = {RowFormat::kBf16, 0, 200, 500, true};
  spec.extra = {RowFormat::kV32, 8, 80, 70, false};
  spec.split_parts = 12;
  SparseMlaCase test_case(spec);
  name_known_keys(spec, {&test_case});
  test::Rng rng(77);
  StridedTensor indptr;
  for (int64_t t = 0; t < 7; ++t) test_case.topk_length_of(0, t) = static_cast<int32_t>(60 * t + 9);
  const StridedTensor stale = test_case.schedule(0, 7, &indptr);
  for (int64_t t = 0; t < 7; ++t)
    test_case.topk_length_of(0, t) = static_cast<int32_t>(rng.integer(-1, 500));
  const StridedTensor good = test_case.schedule(0, 7, &indptr);
  const StridedTensor fewer_rows = test_case.schedule(0, 4, &indptr);
  const auto check = [&](const std::string& what) {
    const Outputs one = run(test_case);
    ASSERT_TRUE(test_case.matches(one)) << what;
    ASSERT_TRUE(SameBits(one, run(test_case, 3))) << what;
  };
  test_case.schedule_override = stale;
  check("stale");
  test_case.schedule_override = fewer_rows;
  check("of fewer rows");
  const auto fill = [&](auto value) {
    StridedTensor lines(DType::kI32, {12, 8}, {0, 3}, 0);
    for (int64_t p = 0; p < 12; ++p) {
      for (int64_t field = 0; field < 8; ++field) lines.at<int32_t>({p, field}) = value(p, field);
    }
    test_case.schedule_override = lines;
  };
  for (const int32_t value : {0, 1, 6, 7, -1, INT_MIN, INT_MAX}) {
    fill([&](int64_t, int64_t) { return value; });
    check("all " + std::to_string(value));
  }
  const int32_t hostile[] = {INT_MIN, -1, 0, 1, 2, 3, 6, 7, 8, 100, INT_MAX};
  const int trials = test::by_build(60, 12);
  for (int trial = 0; trial < trials; ++trial) {
    // A good schedule with some fields replaced, then nothing but hostile fields.
    fill([&](int64_t p, int64_t field) {
      const bool replaced = 3 * trial >= 2 * trials || rng.uniform() < 0.04;
      return replaced ? hostile[rng.integer(0, 10)] : good.at<int32_t>({p, field});
    });
    check("trial " + std::to_string(trial));
  }
}

TEST_P(SparseMlaSplitTest, DoesNotAllocateWhileRunning) {
  for (const int threads : {1, 2}) {
    CaseSpec spec;
    spec.rows = 3;
    spec.heads = 8;
    spec.primary = {RowFormat::kV32, 64, 256, 600, true};
    spec.split_parts = 8;
    SparseMlaCase test_case(spec);
    EXPECT_EQ(test_case.count_allocations(options(), threads), 0) << threads << " threads";
  }
}

TEST_P(SparseMlaSplitTest, SaysWhetherItFollowsASchedule) {
  SparseMlaProblem problem{.max_rows = 2, .num_heads = 3, .topk = 4, .softmax_scale = 1};
  EXPECT_FALSE(
      SparseMla::plan(problem, test::device_of(options(), 1), options()).reads_split_schedule());
  problem.split_parts = 4;
  EXPECT_EQ(
      SparseMla::plan(problem, test::device_of(options(), 1), options()).reads_split_schedule(),
      follows_plans());
}

template <class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(SparseMlaSplit, RefusesWhatDoesNotFitThePlan) {
  const Device cpu = Device::cpu(1);
  SparseMlaProblem problem{.max_rows = 2, .num_heads = 3, .topk = 4, .softmax_scale = 1};
  using testing::HasSubstr;
  problem.split_parts = -1;
  EXPECT_THAT(message_of([&] { SparseMla::plan(problem, cpu); }), HasSubstr("split_parts = -1"));
  problem.split_parts = 70'000;
  EXPECT_THAT(message_of([&] { SparseMla::plan(problem, cpu); }), HasSubstr("split_parts = 70000"));
  problem.split_parts = 4;
  problem.fixed_splits = 2;
  EXPECT_THAT(message_of([&] { SparseMla::plan(problem, cpu); }), HasSubstr("give one of them"));
  problem.fixed_splits = 0;
  test::Tensor q(DType::kBf16, {2, 3, 576}), kv(DType::kBf16, {9, 576}), list(DType::kI32, {2, 4});
  test::Tensor out(DType::kBf16, {2, 3, 512}), lse(DType::kF32, {2, 3});
  test::Tensor lines(DType::kI32, {4, 8}), indptr(DType::kI32, {3}), wide(DType::kI32, {5, 8});
  const auto refusal = [&](const ConstTensorView& schedule, const ConstTensorView& pieces) {
    const SparseMla plan = SparseMla::plan(problem, cpu);
    HostBuffer scratch(plan.workspace_bytes());
    SparseMlaTensors tensors;
    tensors.q = q;
    tensors.kv = kv;
    tensors.indices = list;
    tensors.split_schedule = schedule;
    tensors.split_indptr = pieces;
    tensors.out = out;
    tensors.lse = lse;
    return message_of([&] { plan.run(tensors, scratch.workspace()); });
  };
  EXPECT_THAT(refusal({}, indptr), HasSubstr("split_schedule is missing"));
  EXPECT_THAT(refusal(lines, {}), HasSubstr("split_indptr is missing"));
  EXPECT_THAT(refusal(wide, indptr), HasSubstr("split_schedule = i32 [5, 8]"));
  EXPECT_THAT(refusal(lines, lines), HasSubstr("split_indptr = i32 [4, 8]"));
  problem.split_parts = 0;
  EXPECT_THAT(refusal(lines, indptr), HasSubstr("the plan has split_parts = 0"));
}

TEST(SparseMlaSplit, WorkspaceIsBoundedByThePartsWhateverTheRows) {
  SparseMlaProblem problem{.num_heads = 128, .topk = 2048, .softmax_scale = 1};
  problem.split_parts = 64;
  constexpr size_t kPieceBytes = size_t{128} * 514 * 4;
  for (const int threads : {1, 2, 64}) {
    for (const int64_t rows : {1, 16, 4096, 1 << 20}) {
      problem.max_rows = rows;
      const size_t bytes = SparseMla::plan(problem, Device::cpu(threads)).workspace_bytes();
      const size_t pieces = static_cast<size_t>(std::min<int64_t>(rows + 63, 126));
      EXPECT_LE(bytes, static_cast<size_t>(threads) * (6u << 20) + pieces * (kPieceBytes + 256));
    }
  }
  problem.split_parts = 1;
  problem.max_rows = 1 << 20;
  EXPECT_LE(SparseMla::plan(problem, Device::cpu(2)).workspace_bytes(), size_t{2} * (6u << 20));
}

}  // namespace
}  // namespace fovea
