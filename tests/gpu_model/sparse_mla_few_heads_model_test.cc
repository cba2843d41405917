// The kernel of sparse_mla for few heads and compute capability 9.0, run by the model of a GPU,
// against the formula.

#include <gtest/gtest.h>

#include "tests/gpu_model/sparse_mla_model_suite.h"
#include "tests/mla/sparse_mla_case.h"

namespace fovea {
namespace {

using test::cache_of;
using test::CacheSpec;
using test::SparseMlaCase;

class SparseMlaFewHeadsModel
    : public test::SparseMlaModelSuite<test::gpu::run_sparse_mla_few_heads> {};

// Rows at any address and at multiples of 16 bytes; up to nine tiles, of both caches, by warpgroups
// in turn.
TEST_F(SparseMlaFewHeadsModel, FollowsTheFormulaForEveryAlignment) {
  uint64_t seed = 0;
  for (const int64_t topk : {1, 65, 190, 430}) {
    for (const int64_t page_pad : {19, 32}) {
      test::gpu::settings().seed = static_cast<unsigned>(++seed);
      expect_formula({.rows = 2,
                      .heads = 5,
                      .primary = cache_of(RowFormat::kV32, 2, topk, page_pad),
                      .extra = cache_of(RowFormat::kV32, 16, topk % 2 == 0 ? 70 : 0, page_pad),
                      .sink = true,
                      .fixed_splits = page_pad == 19 ? 2 : 1,
                      .seed = seed});
    }
  }
}

TEST_F(SparseMlaFewHeadsModel, FollowsTheFormulaForEveryFormat) {
  expect_formula_for_formats({RowFormat::kV4, RowFormat::kR512, RowFormat::kF576, RowFormat::kBf16},
                             130, true, 20);
}

TEST_F(SparseMlaFewHeadsModel, FollowsTheFormulaForGroupsOfHeads) {
  for (const int64_t heads : {8, 16, 33}) {
    CacheSpec cache = cache_of(RowFormat::kV32, 4, 250, 0);
    cache.lengths = false;
    expect_formula({.rows = 1,
                    .heads = heads,
                    .primary = cache,
                    .fixed_splits = 1,
                    .seed = static_cast<uint64_t>(heads)});
  }
}

TEST_F(SparseMlaFewHeadsModel, CapsTheLogits) {
  for (const float cap : {1.0f, 30.0f, 1e-3f}) {
    expect_formula({.rows = 2,
                    .heads = 9,
                    .primary = cache_of(RowFormat::kV32, 2, 80, 32),
                    .logit_cap = cap,
                    .q_scale = 8.0f});
  }
}

// Logits that grow from tile to tile, so that old sums shrink.
TEST_F(SparseMlaFewHeadsModel, FollowsTheFormulaForLargeLogits) {
  for (const float q_scale : {30.0f, 300.0f}) {
    CacheSpec cache = cache_of(RowFormat::kV32, 4, 400, 0);
    cache.lengths = false;
    expect_formula(
        {.rows = 1, .heads = 16, .primary = cache, .fixed_splits = 1, .q_scale = q_scale});
  }
}

TEST_F(SparseMlaFewHeadsModel, EmptyRowsAndEmptyTilesHaveNoWeight) {
  expect_formula({.rows = 3,
                  .heads = 9,
                  .primary = cache_of(RowFormat::kV32, 2, 130, 0),
                  .sink = true,
                  .invalid_share = 1.0});
  expect_formula({.rows = 2, .heads = 3, .primary = cache_of(RowFormat::kV32, 2, 0, 0)});
  SparseMlaCase test_case(
      {.rows = 2, .heads = 4, .primary = {RowFormat::kV32, 2, 100, 330, false, false, 0, 32}});
  for (int64_t slot = 0; slot < 128; ++slot) test_case.index(0, 1, slot) = -1;
  for (int64_t slot = 256; slot < 330; ++slot) test_case.index(0, 0, slot) = -1;
  EXPECT_TRUE(test_case.matches(run(test_case)));
}

TEST_F(SparseMlaFewHeadsModel, NoOrderOfTheThreadsChangesABit) {
  expect_same_bits_in_any_order({.rows = 1,
                                 .heads = 16,
                                 .primary = cache_of(RowFormat::kV32, 16, 330, 0),
                                 .fixed_splits = 1});
}

TEST_F(SparseMlaFewHeadsModel, NanStaysInItsHead) {
  expect_nan_in_its_head({RowFormat::kV32, 2, 90, 150, false, false, 0, 32});
}

}  // namespace
}  // namespace fovea
