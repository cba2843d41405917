// Short lists over v4 and r512 rows, which one implementation takes alone.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/mla/sparse_mla_case.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::CacheSpec;
using test::CaseSpec;
using test::Outputs;
using test::SparseMlaCase;

class SparseMlaWindowTest : public test::TargetTest {
 protected:
  Outputs run(SparseMlaCase& test_case, int64_t begin = 0, int64_t end = -1) {
    return test_case.run(GetParam().options(), 1, begin, end);
  }
  void expect_formula(CaseSpec spec) {
    spec.head_dim_qk = 512;
    SparseMlaCase test_case(spec);
    EXPECT_TRUE(test_case.matches(run(test_case)))
        << to_string(spec.primary.format) << ", rows " << spec.rows << ", heads " << spec.heads
        << ", topk " << spec.primary.topk << ", seed " << spec.seed;
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, SparseMlaWindowTest,
                         testing::ValuesIn(test::targets_of("sparse_mla", {"cuda_sm90_rows"})),
                         test::target_name);

constexpr RowFormat kRows[] = {RowFormat::kV4, RowFormat::kR512};

// Rows at any address with a padding of 19 bytes, at multiples of 16 with 32.
CacheSpec window_of(RowFormat format, int64_t page_size, int64_t topk, int64_t page_pad = 0) {
  CacheSpec cache{format, page_size, (160 + page_size - 1) / page_size * page_size, topk, true};
  cache.page_pad = page_pad;
  cache.bf16_scale = page_size % 2 == 1;
  return cache;
}

TEST_P(SparseMlaWindowTest, FollowsTheFormulaForEveryListWidth) {
  uint64_t seed = 0;
  for (const RowFormat format : kRows) {
    for (const int64_t topk : {0, 1, 7, 8, 63, 64, 65, 100, 127, 128}) {
      expect_formula({.rows = 3,
                      .heads = 20,
                      .primary = window_of(format, 64, topk),
                      .sink = topk % 2 != 0,
                      .seed = ++seed});
    }
  }
}

TEST_P(SparseMlaWindowTest, FollowsTheFormulaForEveryHeadCount) {
  for (const RowFormat format : kRows) {
    for (const int64_t heads : {1, 7, 16, 63, 64, 65, 96, 128})
      expect_formula({.rows = 2, .heads = heads, .primary = window_of(format, 64, 128)});
  }
}

TEST_P(SparseMlaWindowTest, FollowsTheFormulaForPagesAndSecondLists) {
  uint64_t seed = 30;
  for (const RowFormat format : kRows) {
    for (const int64_t page_size : {1, 2, 61}) {
      for (const int64_t page_pad : {19, 32}) {
        const RowFormat other = page_size == 2 ? RowFormat::kV4 : RowFormat::kR512;
        expect_formula({.rows = 3,
                        .heads = 70,
                        .primary = window_of(format, page_size, 60, page_pad),
                        .extra = window_of(other, 16, page_size, page_pad == 19 ? 32 : 19),
                        .sink = true,
                        .rope_dim = 64 * page_size % 512,
                        .seed = ++seed});
      }
    }
  }
}

TEST_P(SparseMlaWindowTest, FollowsTheFormulaForPageTables) {
  CacheSpec extra = window_of(RowFormat::kV4, 2, 56, 32);
  extra.lengths = false;
  extra.max_pages = 60;
  expect_formula({.rows = 4,
                  .heads = 5,
                  .primary = window_of(RowFormat::kV4, 64, 70),
                  .extra = extra,
                  .rope_dim = 512});
}

// As many rows as a GPU takes at a time with two blocks a row and one, and more; heads of one
// warpgroup and of two. Lists are short for the sake of the formula.
TEST_P(SparseMlaWindowTest, FollowsTheFormulaForEveryNumberOfRows) {
  uint64_t seed = 60;
  for (const int64_t rows : {34, 70, 140}) {
    for (const int64_t heads : {64, 65}) {
      const RowFormat format = rows == 70 ? RowFormat::kR512 : RowFormat::kV4;
      expect_formula({.rows = rows,
                      .heads = heads,
                      .primary = window_of(format, 64, 9),
                      .sink = true,
                      .seed = ++seed});
    }
  }
}

TEST_P(SparseMlaWindowTest, BatchMatesNeverChangeABit) {
  constexpr int64_t kBatch = 140, kHeads = 65;
  SparseMlaCase test_case({.rows = kBatch,
                           .heads = kHeads,
                           .head_dim_qk = 512,
                           .primary = window_of(RowFormat::kV4, 64, 12)});
  const Outputs all = run(test_case);
  EXPECT_TRUE(SameBits(run(test_case), all));
  for (const int64_t row : {0, 1, 131, 139}) {
    const Outputs one = run(test_case, row, row + 1);
    for (size_t i = 0; i < one.out_bits.size(); ++i)
      ASSERT_EQ(one.out_bits[i], all.out_bits[static_cast<size_t>(row * kHeads * 512) + i]);
    for (size_t h = 0; h < one.lse_bits.size(); ++h)
      ASSERT_EQ(one.lse_bits[h], all.lse_bits[static_cast<size_t>(row * kHeads) + h]);
  }
}

TEST_P(SparseMlaWindowTest, LargeLogitsFollowTheFormula) {
  for (const float q_scale : {4.0f, 30.0f}) {
    expect_formula({.rows = 2,
                    .heads = 70,
                    .primary = window_of(RowFormat::kV4, 64, 128),
                    .q_scale = q_scale});
  }
}

TEST_P(SparseMlaWindowTest, EmptyRowsHaveNoWeight) {
  for (const RowFormat format : kRows) {
    expect_formula({.rows = 3,
                    .heads = 9,
                    .primary = window_of(format, 64, 128),
                    .sink = true,
                    .invalid_share = 1.0});
  }
}

TEST_P(SparseMlaWindowTest, NanStaysInItsHead) {
  constexpr size_t kHead = 4, kHeads = 9;
  CacheSpec cache = window_of(RowFormat::kV4, 64, 70);
  cache.lengths = false;
  SparseMlaCase test_case({.rows = 1, .heads = kHeads, .head_dim_qk = 512, .primary = cache});
  const Outputs clean = run(test_case);
  test_case.set_q(0, kHead, 100, std::numeric_limits<float>::quiet_NaN());
  const Outputs outputs = run(test_case);
  for (size_t h = 0; h < kHeads; ++h) EXPECT_EQ(std::isnan(outputs.lse[h]), h == kHead);
  for (size_t i = 0; i < clean.out_bits.size(); ++i) {
    if (i / 512 == kHead) {
      ASSERT_TRUE(std::isnan(outputs.out[i]));
    } else {
      ASSERT_EQ(outputs.out_bits[i], clean.out_bits[i]);
    }
  }
}

}  // namespace
}  // namespace fovea
