// The kernel of sparse_mla over bf16 rows for compute capability 9.0, run by the model of a GPU,
// against the formula.

#include <gtest/gtest.h>

#include <vector>

#include "tests/gpu_model/sparse_mla_model_suite.h"
#include "tests/mla/sparse_mla_case.h"

namespace fovea {
namespace {

using test::cache_of;
using test::CacheSpec;
using test::SparseMlaCase;

class SparseMlaRowsModel : public test::SparseMlaModelSuite<test::gpu::run_sparse_mla_rows> {};

CacheSpec flat_cache(int64_t topk) { return {RowFormat::kBf16, 0, 90, topk, true}; }

// Lists of one to five tiles, an even and an odd number, that end within a tile and with it.
TEST_F(SparseMlaRowsModel, ListsOfAnyLengthFollowTheFormula) {
  uint64_t seed = 0;
  for (const int64_t head_dim : {576, 512}) {
    for (const int64_t topk : {1, 64, 65, 128, 191, 256, 300}) {
      CacheSpec cache = flat_cache(topk);
      cache.lengths = topk == 191;
      test::gpu::settings().seed = static_cast<unsigned>(++seed);
      expect_formula({.rows = topk == 191 ? 3 : 1,
                      .heads = 9,
                      .head_dim_qk = head_dim,
                      .primary = cache,
                      .sink = topk == 128,
                      .seed = seed});
    }
  }
}

// Caches of so many rows that keys are taken in the order of regions.
TEST_F(SparseMlaRowsModel, ListsOverManyRowsFollowTheFormula) {
  for (const int64_t topk : {512, 700}) {
    CacheSpec cache{RowFormat::kBf16, 0, 60000, topk, true};
    cache.lengths = topk == 700;
    expect_formula({.rows = 2,
                    .heads = 9,
                    .primary = cache,
                    .invalid_share = topk == 700 ? 0.2 : 0.0,
                    .seed = static_cast<uint64_t>(topk)});
  }
}

// Pages of rows at any address and at multiples of 16 bytes, keys of both caches.
TEST_F(SparseMlaRowsModel, PagesAndSecondCachesFollowTheFormula) {
  uint64_t seed = 20;
  for (const int64_t head_dim : {576, 512}) {
    for (const int64_t page_pad : {19, 32}) {
      test::gpu::settings().seed = static_cast<unsigned>(++seed);
      expect_formula(
          {.rows = 2,
           .heads = 70,
           .head_dim_qk = head_dim,
           .primary = cache_of(RowFormat::kBf16, 2, 150, page_pad),
           .extra = page_pad == 19 ? flat_cache(70) : cache_of(RowFormat::kBf16, 16, 70, page_pad),
           .sink = true,
           .rope_dim = head_dim == 512 ? 64 : 0,
           .seed = seed});
    }
  }
}

TEST_F(SparseMlaRowsModel, PageTablesAndRotationsFollowTheFormula) {
  CacheSpec extra = cache_of(RowFormat::kBf16, 2, 130, 32);
  extra.lengths = false;
  extra.max_pages = 60;
  expect_formula({.rows = 4,
                  .heads = 5,
                  .head_dim_qk = 512,
                  .primary = cache_of(RowFormat::kBf16, 64, 70, 0),
                  .extra = extra,
                  .rope_dim = 512,
                  .seed = 51});
}

// More units than blocks, of uneven length: places and barriers go from row to row.
TEST_F(SparseMlaRowsModel, ABlockTakesRowAfterRow) {
  for (const int num_sms : {1, 2, 3}) {
    test::gpu::settings().num_sms = num_sms;
    test::gpu::settings().seed = static_cast<unsigned>(num_sms);
    expect_formula({.rows = 7,
                    .heads = num_sms == 2 ? 65 : 17,
                    .primary = flat_cache(200),
                    .sink = true,
                    .seed = 60 + static_cast<uint64_t>(num_sms)});
  }
}

// Which block takes a row, and behind which others, changes no bit.
TEST_F(SparseMlaRowsModel, BlocksChangeNoBit) {
  SparseMlaCase test_case({.rows = 5, .heads = 9, .primary = flat_cache(330)});
  const auto first = run(test_case);
  for (const int num_sms : {1, 3}) {
    test::gpu::settings().num_sms = num_sms;
    EXPECT_TRUE(SameBits(run(test_case), first));
  }
}

TEST_F(SparseMlaRowsModel, EmptyRowsAndEmptyTilesHaveNoWeight) {
  test::gpu::settings().num_sms = 1;
  expect_formula(
      {.rows = 3, .heads = 9, .primary = flat_cache(130), .sink = true, .invalid_share = 1.0});
  expect_formula({.rows = 3, .heads = 3, .primary = flat_cache(0)});
  SparseMlaCase test_case({.rows = 3, .heads = 4, .primary = {RowFormat::kBf16, 0, 90, 330}});
  for (int64_t slot = 0; slot < 128; ++slot) test_case.index(0, 1, slot) = -1;
  for (int64_t slot = 256; slot < 330; ++slot) test_case.index(0, 0, slot) = -1;
  EXPECT_TRUE(test_case.matches(run(test_case)));
}

// Logits far apart, so that references move and lag behind.
TEST_F(SparseMlaRowsModel, LargeLogitsFollowTheFormula) {
  for (const float q_scale : {4.0f, 30.0f}) {
    expect_formula({.rows = 2, .heads = 9, .primary = flat_cache(330), .q_scale = q_scale});
  }
  expect_formula({.rows = 2,
                  .heads = 9,
                  .primary = {RowFormat::kBf16, 0, 2000, 330, true},
                  .q_scale = 3000.0f});
}

TEST_F(SparseMlaRowsModel, NoOrderOfTheThreadsChangesABit) {
  test::gpu::settings().num_sms = 1;
  expect_same_bits_in_any_order({.rows = 3, .heads = 64, .primary = flat_cache(200)});
}

TEST_F(SparseMlaRowsModel, NanStaysInItsHead) {
  expect_nan_in_its_head({RowFormat::kBf16, 0, 90, 70});
}

}  // namespace
}  // namespace fovea
