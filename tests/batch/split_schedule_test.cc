#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "fovea/error.h"
#include "fovea/metadata.h"
#include "tests/batch/metadata_oracle.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::split_blocks_of;
using test::split_oracle;
using test::SplitArrays;
using test::Tensor;
using test::Values;

constexpr int64_t kOverhead = 5;

SplitPart part_of(const SplitArrays& schedule, int64_t p) {
  SplitPart part;
  std::memcpy(&part, schedule.parts.data() + 8 * p, sizeof(part));
  return part;
}

class SplitScheduleTest : public test::TargetTest {
 protected:
  SplitArrays schedule(const Values& lens, int64_t parts) {
    const auto rows = static_cast<int64_t>(lens.size());
    const Tensor topk_length = Tensor::i32({rows}, lens);
    Tensor out(DType::kI32, {parts, 8}), indptr(DType::kI32, {rows + 1});
    out.fill_bytes(0xAB);
    indptr.fill_bytes(0xAB);
    test::run(SplitSchedule::plan({rows, parts}, GetParam().device(1), GetParam().options()),
              {topk_length, out, indptr});
    return {out.values<int32_t>(), indptr.values<int32_t>()};
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, SplitScheduleTest,
                         testing::ValuesIn(test::targets_of("split_schedule")), test::target_name);

TEST_P(SplitScheduleTest, WorkedExample) {
  // Blocks 16, 5, 11; cost 47, budget ceil(47 / 4) + 5 = 17. Part 0 takes 12 of 16; part 1 the
  // other 4 (9 spent) and 3 of 5; part 2 the other 2 (7 spent) and 5 of 11; part 3 the other 6.
  const SplitArrays expected = {{0, 0, 0,  12, 0, 1, 1, 0,   //
                                 0, 1, 12, 3,  1, 1, 1, 0,   //
                                 1, 2, 3,  5,  1, 1, 1, 0,   //
                                 2, 2, 5,  11, 1, 1, 1, 0},  //
                                {0, 2, 4, 6}};
  EXPECT_EQ(schedule({1000, 300, 700}, 4).parts, expected.parts);
  EXPECT_EQ(schedule({1000, 300, 700}, 4).indptr, expected.indptr);
}

TEST_P(SplitScheduleTest, OneRowInSeveralPieces) {
  // 32 blocks, cost 37, budget ceil(37 / 3) + 5 = 18: 13, 13 and the last 6.
  EXPECT_EQ(schedule({2048}, 3), (SplitArrays{{0, 0, 0,  13, 0, 1, 1, 0,  //
                                               0, 0, 13, 26, 1, 1, 1, 0,  //
                                               0, 0, 26, 32, 2, 1, 1, 0},
                                              {0, 3}}));
}

TEST_P(SplitScheduleTest, OnePartTakesEverythingInOnePieceEach) {
  EXPECT_EQ(schedule({1000, 0, 700}, 1), (SplitArrays{{0, 2, 0, 11, 0, 0, 0, 0}, {0, 1, 2, 3}}));
}

TEST_P(SplitScheduleTest, EmptyRowsHaveOneBlockAndNegativeLengthsAreEmpty) {
  const int32_t low = std::numeric_limits<int32_t>::min();
  EXPECT_EQ(schedule({0, -1, low, -64}, 2), schedule({1, 64, 1, 1}, 2));
  EXPECT_EQ(schedule({0, 0}, 1), (SplitArrays{{0, 1, 0, 1, 0, 0, 0, 0}, {0, 1, 2}}));
}

TEST_P(SplitScheduleTest, PartsWithoutWorkStartAfterTheLastRow) {
  // Two rows of one block, cost 12, budget ceil(12 / 4) + 5 = 8: one row a part.
  EXPECT_EQ(schedule({5, 0}, 4), (SplitArrays{{0, 0, 0, 1, 0, 0, 0, 0,  //
                                               1, 1, 0, 1, 0, 0, 0, 0,  //
                                               2, 1, 0, 0, 0, 0, 0, 0,  //
                                               2, 1, 0, 0, 0, 0, 0, 0},
                                              {0, 1, 2}}));
  EXPECT_EQ(schedule({}, 2),
            (SplitArrays{{0, -1, 0, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0}, {0}}));
}

TEST_P(SplitScheduleTest, LongestLengthsDoNotOverflow) {
  const int32_t longest = std::numeric_limits<int32_t>::max();
  const Values lens(70, longest);
  EXPECT_EQ(schedule(lens, 3), split_oracle(lens, 3));
}

TEST_P(SplitScheduleTest, BlockAndBudgetBoundariesEqualTheFormula) {
  for (int32_t len = 0; len <= 1300; ++len) {
    for (const int64_t parts : {1, 2, 3, 7}) {
      ASSERT_EQ(schedule({len}, parts), split_oracle({len}, parts)) << len << " in " << parts;
      ASSERT_EQ(schedule({len, 64, 65, len}, parts), split_oracle({len, 64, 65, len}, parts))
          << len << " in " << parts;
    }
  }
}

TEST_P(SplitScheduleTest, RandomLengthsEqualTheFormula) {
  test::Rng rng(12);
  for (int repeat = 0; repeat < 200; ++repeat) {
    Values lens(static_cast<size_t>(rng.integer(0, 80)));
    const int64_t longest = std::vector<int64_t>{1, 64, 2048, 100000}[rng.next() % 4];
    for (int32_t& len : lens) len = static_cast<int32_t>(rng.integer(-longest / 8, longest));
    const int64_t parts = rng.integer(1, 140);
    ASSERT_EQ(schedule(lens, parts), split_oracle(lens, parts)) << "repeat " << repeat;
  }
}

TEST_P(SplitScheduleTest, ManyRowsHaveNoLimit) {
  test::Rng rng(13);
  Values lens(20000);
  for (int32_t& len : lens) len = static_cast<int32_t>(rng.integer(0, 2048));
  EXPECT_EQ(schedule(lens, 132), split_oracle(lens, 132));
}

// The properties that consumers rely on, checked without the formula.
TEST_P(SplitScheduleTest, EveryBlockIsWalkedOnceAndPiecesAreNumberedInOrder) {
  test::Rng rng(14);
  for (int repeat = 0; repeat < 100; ++repeat) {
    Values lens(static_cast<size_t>(rng.integer(1, 60)));
    for (int32_t& len : lens) len = static_cast<int32_t>(rng.integer(-10, 9000));
    const auto rows = static_cast<int32_t>(lens.size());
    const int64_t parts = rng.integer(1, 90);
    const SplitArrays found = schedule(lens, parts);
    int64_t cost = 0;
    for (const int32_t len : lens) cost += split_blocks_of(len) + kOverhead;
    int32_t row = 0, pieces = 0, split_pieces = 0;
    int64_t block = 0;
    bool idle = false;
    for (int64_t p = 0; p < parts; ++p) {
      const SplitPart part = part_of(found, p);
      EXPECT_EQ(part.unused, 0);
      if (part.first_row == rows) {
        idle = true;
        continue;
      }
      ASSERT_FALSE(idle) << "work after a part without work";
      ASSERT_EQ(part.first_row, row);
      ASSERT_EQ(part.first_block, block);
      int64_t spent = 0;
      int split_here = 0;
      for (row = part.first_row; row <= part.last_row; ++row) {
        const auto r = static_cast<size_t>(row);
        const int64_t begin = row == part.first_row ? part.first_block : 0;
        const int64_t end = row == part.last_row ? part.end_block : split_blocks_of(lens[r]);
        ASSERT_LT(begin, end);
        const int32_t split = row == part.first_row ? part.first_split : 0;
        ASSERT_EQ(found.indptr[r] + split, pieces) << "pieces are numbered in walking order";
        ++pieces;
        const bool is_split = found.indptr[r + 1] - found.indptr[r] > 1;
        EXPECT_EQ(is_split, begin > 0 || end < split_blocks_of(lens[r]));
        if (row == part.first_row) {
          EXPECT_EQ(part.first_is_split, is_split ? 1 : 0);
        }
        if (row == part.last_row) {
          EXPECT_EQ(part.last_is_split, is_split ? 1 : 0);
        }
        split_here += is_split ? 1 : 0;
        spent += end - begin + kOverhead;
        block = end;
        if (end < split_blocks_of(lens[r])) break;
        block = 0;
      }
      EXPECT_LE(split_here, 2);
      EXPECT_LE(spent, (cost + parts - 1) / parts + kOverhead);
      split_pieces += split_here;
    }
    EXPECT_EQ(row, rows);
    EXPECT_EQ(block, 0);
    EXPECT_EQ(found.indptr.back(), pieces);
    EXPECT_LE(split_pieces, std::min<int64_t>(rows + parts, 2 * parts));
  }
}

TEST_P(SplitScheduleTest, WritesOnlyItsArraysAndStridedRowsEqualPackedOnes) {
  const Values lens = {1000, 300, 700};
  const Tensor topk_length = Tensor::i32({3}, lens);
  test::GuardedMemory indptr(4 * 4);
  Tensor wide(DType::kI32, {4, 11});
  wide.fill_bytes(0xAB);
  TensorView view = wide;
  view.shape[1] = 8;
  const auto plan = SplitSchedule::plan({3, 4}, GetParam().device(1), GetParam().options());
  const TensorView guarded = make_tensor(indptr.data(), DType::kI32, {4});
  test::run(plan, {topk_length, view, guarded});
  const SplitArrays expected = split_oracle(lens, 4);
  const Values rows = wide.values<int32_t>();
  for (size_t p = 0; p < 4; ++p) {
    for (size_t i = 0; i < 11; ++i) {
      EXPECT_EQ(rows[p * 11 + i],
                i < 8 ? expected.parts[p * 8 + i] : static_cast<int32_t>(0xABABABAB));
    }
  }
  HostBuffer workspace(plan.workspace_bytes());
  const test::AllocationCounter counter;
  plan.run({topk_length, view, guarded}, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST_P(SplitScheduleTest, RefusesShapesThatDoNotFit) {
  const auto plan = SplitSchedule::plan({6, 4}, GetParam().device(1), GetParam().options());
  Tensor lens(DType::kI32, {6}), schedule(DType::kI32, {4, 8}), indptr(DType::kI32, {7});
  test::run(plan, {lens, schedule, indptr});
  EXPECT_THROW(test::run(plan, {Tensor(DType::kI32, {7}), schedule, Tensor(DType::kI32, {8})}),
               Error);
  EXPECT_THROW(test::run(plan, {lens, Tensor(DType::kI32, {5, 8}), indptr}), Error);
  EXPECT_THROW(test::run(plan, {lens, Tensor(DType::kI32, {4, 7}), indptr}), Error);
  EXPECT_THROW(test::run(plan, {lens, schedule, Tensor(DType::kI32, {6})}), Error);
  EXPECT_THROW(test::run(plan, {{}, schedule, indptr}), Error);
  EXPECT_THROW(test::run(plan, {Tensor(DType::kF32, {6}), schedule, indptr}), Error);
  EXPECT_THROW(SplitSchedule::plan({-1, 4}, Device::cpu(1)), Error);
  EXPECT_THROW(SplitSchedule::plan({6, 0}, Device::cpu(1)), Error);
  EXPECT_THROW(SplitSchedule::plan({6, int64_t{1} << 31}, Device::cpu(1)), Error);
}

}  // namespace
}  // namespace fovea
