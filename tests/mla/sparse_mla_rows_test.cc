// Whole lists over bf16 rows, which one implementation takes alone.

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

class SparseMlaRowsTest : public test::TargetTest {
 protected:
  Outputs run(SparseMlaCase& test_case, int64_t begin = 0, int64_t end = -1) {
    return test_case.run(GetParam().options(), 1, begin, end);
  }
  void expect_formula(const CaseSpec& spec) {
    SparseMlaCase test_case(spec);
    EXPECT_TRUE(test_case.matches(run(test_case)))
        << "heads " << spec.heads << ", topk " << spec.primary.topk << ", seed " << spec.seed;
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, SparseMlaRowsTest,
                         testing::ValuesIn(test::targets_of("sparse_mla", {"cuda_sm90_window"})),
                         test::target_name);

CacheSpec flat_cache(int64_t topk) { return {RowFormat::kBf16, 0, 90, topk, true}; }
// Rows at any address with a padding of 19 bytes, at multiples of 16 with 32.
CacheSpec paged_cache(int64_t page_size, int64_t topk, int64_t page_pad) {
  CacheSpec cache{RowFormat::kBf16, page_size, (160 + page_size - 1) / page_size * page_size, topk,
                  true};
  cache.page_pad = page_pad;
  return cache;
}

TEST_P(SparseMlaRowsTest, FollowsTheFormulaForEveryListWidth) {
  uint64_t seed = 0;
  for (const int64_t head_dim : {576, 512}) {
    for (const int64_t topk : {0, 1, 2, 63, 64, 65, 128, 133, 192, 2047}) {
      expect_formula({.rows = 2,
                      .heads = 20,
                      .head_dim_qk = head_dim,
                      .primary = flat_cache(topk),
                      .sink = topk % 2 != 0,
                      .seed = ++seed});
    }
  }
}

TEST_P(SparseMlaRowsTest, FollowsTheFormulaForEveryHeadCount) {
  for (const int64_t heads : {1, 7, 16, 63, 64, 65, 96, 128})
    expect_formula({.rows = 1, .heads = heads, .primary = flat_cache(150)});
}

TEST_P(SparseMlaRowsTest, FollowsTheFormulaForPagesAndSecondCaches) {
  uint64_t seed = 0;
  for (const int64_t head_dim : {576, 512}) {
    for (const int64_t page_size : {1, 2, 61}) {
      for (const int64_t page_pad : {19, 32}) {
        expect_formula({.rows = 3,
                        .heads = 9,
                        .head_dim_qk = head_dim,
                        .primary = paged_cache(page_size, 150, page_pad),
                        .extra = page_size == 1 ? flat_cache(70) : paged_cache(16, 70, page_pad),
                        .sink = true,
                        .rope_dim = head_dim == 512 ? 64 * page_size % 512 : 0,
                        .seed = ++seed});
      }
    }
  }
}

TEST_P(SparseMlaRowsTest, FollowsTheFormulaForPageTables) {
  CacheSpec extra = paged_cache(2, 130, 32);
  extra.lengths = false;
  extra.max_pages = 60;
  expect_formula({.rows = 4,
                  .heads = 5,
                  .head_dim_qk = 512,
                  .primary = paged_cache(64, 70, 0),
                  .extra = extra,
                  .rope_dim = 512});
}

// More units of 64 heads than a GPU has multiprocessors.
TEST_P(SparseMlaRowsTest, ManyRowsFollowTheFormula) {
  expect_formula({.rows = 140, .heads = 65, .primary = flat_cache(70), .sink = true});
}

TEST_P(SparseMlaRowsTest, BatchMatesNeverChangeABit) {
  constexpr int64_t kRows = 300, kHeads = 9;
  SparseMlaCase test_case({.rows = kRows, .heads = kHeads, .primary = flat_cache(330)});
  const Outputs all = run(test_case);
  EXPECT_TRUE(SameBits(run(test_case), all));
  for (const int64_t row : {0, 1, 131, 299}) {
    const Outputs one = run(test_case, row, row + 1);
    for (size_t i = 0; i < one.out_bits.size(); ++i)
      ASSERT_EQ(one.out_bits[i], all.out_bits[static_cast<size_t>(row * kHeads * 512) + i]);
    for (size_t h = 0; h < one.lse_bits.size(); ++h)
      ASSERT_EQ(one.lse_bits[h], all.lse_bits[static_cast<size_t>(row * kHeads) + h]);
  }
}

// Of large caches, by plans for many rows, keys may be taken in the order of the cache.
TEST_P(SparseMlaRowsTest, ManyRowsOfManyKeysFollowTheFormula) {
  if (GetParam().kind == DeviceKind::kCpu) GTEST_SKIP() << "no plan of the CPU orders keys";
  for (const int64_t page_size : {0, 61}) {
    CacheSpec cache{RowFormat::kBf16, page_size, 60000, 600, true};
    if (page_size != 0) cache.num_keys = 60000 / page_size * page_size;
    expect_formula({.rows = 520,
                    .heads = 1,
                    .primary = cache,
                    .invalid_share = page_size == 0 ? 0.0 : 0.2,
                    .seed = static_cast<uint64_t>(1 + page_size)});
  }
}

// Logits far apart, so that what weights are relative to moves.
TEST_P(SparseMlaRowsTest, LargeLogitsFollowTheFormula) {
  for (const float q_scale : {4.0f, 30.0f})
    expect_formula({.rows = 2, .heads = 70, .primary = flat_cache(700), .q_scale = q_scale});
  expect_formula({.rows = 4,
                  .heads = 70,
                  .primary = {RowFormat::kBf16, 0, 2000, 700, true},
                  .q_scale = 3000.0f});
}

TEST_P(SparseMlaRowsTest, EmptyRowsHaveNoWeight) {
  expect_formula(
      {.rows = 3, .heads = 9, .primary = flat_cache(130), .sink = true, .invalid_share = 1.0});
}

TEST_P(SparseMlaRowsTest, NanStaysInItsHead) {
  constexpr size_t kHead = 4, kHeads = 9;
  SparseMlaCase test_case({.rows = 1, .heads = kHeads, .primary = {RowFormat::kBf16, 0, 90, 70}});
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
