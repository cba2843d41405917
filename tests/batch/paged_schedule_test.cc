#include <gtest/gtest.h>

#include "fovea/error.h"
#include "fovea/metadata.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;

class PagedScheduleTest : public test::TargetTest {
 protected:
  std::vector<int32_t> schedule(const std::vector<int32_t>& lens, int64_t workers,
                                int64_t rows_per_group = 1) {
    const auto rows = static_cast<int64_t>(lens.size());
    const Tensor row_len = Tensor::i32({rows}, lens);
    Tensor out(DType::kI32, {workers + 1, 2});
    out.fill_bytes(0xAB);
    test::run(PagedSchedule::plan({rows, workers, rows_per_group}, GetParam().device(1),
                                  GetParam().options()),
              {row_len, out});
    return out.values<int32_t>();
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, PagedScheduleTest,
                         testing::ValuesIn(test::targets_of("paged_schedule")), test::target_name);

using Schedule = std::vector<int32_t>;

TEST_P(PagedScheduleTest, WorkedExample) {
  // Segments 4, 2, 3 over 4 workers: starts 0, 2, 4, 6.
  EXPECT_EQ(schedule({1000, 300, 700}, 4), (Schedule{0, 0, 0, 2, 1, 0, 2, 0, 3, 0}));
}

TEST_P(PagedScheduleTest, WithoutWorkEveryWorkerStartsAtZero) {
  EXPECT_EQ(schedule({}, 3), (Schedule{0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(schedule({0, 0}, 3), (Schedule{0, 0, 0, 0, 0, 0, 2, 0}));
}

TEST_P(PagedScheduleTest, KnownFault8DegenerateLengthsCountAsZero) {
  EXPECT_EQ(schedule({-4, -3, std::numeric_limits<int32_t>::min(), 0, 1, 500}, 2),
            schedule({0, 0, 0, 0, 1, 500}, 2));
  EXPECT_EQ(schedule(std::vector<int32_t>(32, 0), 64).back(), 0);
  EXPECT_EQ(schedule({0, 0, 4096, 0}, 2), (Schedule{2, 0, 2, 8, 4, 0}));
}

TEST_P(PagedScheduleTest, FewerSegmentsThanWorkersKeepsIdleWorkersInRange) {
  // Two segments, four workers: the last two get one each, the first two have an empty range.
  EXPECT_EQ(schedule({10, 10}, 4), (Schedule{0, 0, 0, 0, 0, 0, 1, 0, 2, 0}));
  EXPECT_EQ(schedule({10}, 64), [] {
    Schedule expected(130, 0);
    expected[128] = 1;
    return expected;
  }());
}

TEST_P(PagedScheduleTest, LongestLengthsDoNotOverflow) {
  const int32_t longest = std::numeric_limits<int32_t>::max();
  const Schedule starts = schedule({longest, longest, longest}, 3);
  EXPECT_EQ(starts, (Schedule{0, 0, 1, 0, 2, 0, 3, 0}));
}

TEST_P(PagedScheduleTest, GroupsTakeTheLengthOfTheirLastRow) {
  EXPECT_EQ(schedule({998, 999, 1000, 1, 2, 300, 0, 0, 700}, 4, 3), schedule({1000, 300, 700}, 4));
}

TEST_P(PagedScheduleTest, EveryWorkerGetsItsShareOfRandomLengths) {
  test::Rng rng(11);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::vector<int32_t> lens(static_cast<size_t>(rng.integer(1, 40)));
    for (int32_t& len : lens) len = static_cast<int32_t>(rng.integer(-600, 3000));
    const int64_t workers = rng.integer(1, 70);
    const Schedule starts = schedule(lens, workers);
    // Position of each start in the segments laid end to end.
    std::vector<int64_t> flat;
    int64_t total = 0;
    std::vector<int64_t> before;
    for (const int32_t len : lens) {
      before.push_back(total);
      total += std::max(0, len + 255) / 256;
    }
    before.push_back(total);
    for (int64_t i = 0; i <= workers; ++i) {
      const auto at = static_cast<size_t>(2 * i);
      flat.push_back(before[static_cast<size_t>(starts[at])] + starts[at + 1]);
    }
    if (total == 0) flat.back() = 0;
    EXPECT_EQ(flat.front(), 0);
    EXPECT_EQ(flat.back(), total);
    for (size_t i = 0; i + 1 < flat.size(); ++i) {
      const int64_t share = flat[i + 1] - flat[i];
      EXPECT_GE(share, total / workers);
      EXPECT_LE(share, total / workers + 1);
      if (i > 0) {
        EXPECT_GE(share, flat[i] - flat[i - 1]) << "the remainder goes to the last";
      }
    }
    const auto rows = static_cast<int64_t>(lens.size());
    const Tensor row_len = Tensor::i32({rows}, lens);
    Tensor expected(DType::kI32, {workers + 1, 2});
    test::run(PagedSchedule::plan({rows, workers, 1}, Device::cpu(1), {"ref"}),
              {row_len, expected});
    EXPECT_EQ(starts, expected.values<int32_t>());
  }
}

TEST_P(PagedScheduleTest, RefusesShapesThatDoNotFit) {
  const auto plan = PagedSchedule::plan({6, 4, 3}, GetParam().device(1), GetParam().options());
  Tensor row_len(DType::kI32, {6}), schedule(DType::kI32, {5, 2});
  test::run(plan, {row_len, schedule});
  EXPECT_THROW(test::run(plan, {Tensor(DType::kI32, {5}), schedule}),
               Error);  // not a multiple of 3
  EXPECT_THROW(test::run(plan, {Tensor(DType::kI32, {9}), schedule}), Error);  // above max_rows
  EXPECT_THROW(test::run(plan, {row_len, Tensor(DType::kI32, {6, 2})}),
               Error);  // other worker count
  EXPECT_THROW(test::run(plan, {{}, schedule}), Error);
  EXPECT_THROW(PagedSchedule::plan({6, 0, 1}, Device::cpu(1)), Error);
  EXPECT_THROW(PagedSchedule::plan({6, 4, 0}, Device::cpu(1)), Error);
}

}  // namespace
}  // namespace fovea
