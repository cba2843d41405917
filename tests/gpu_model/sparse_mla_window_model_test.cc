// The kernel of sparse_mla over short lists for compute capability 9.0, run by the model of a GPU,
// against the formula.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/gpu_model/sparse_mla_model_suite.h"
#include "tests/mla/sparse_mla_case.h"

namespace fovea {
namespace {

using test::cache_of;
using test::CacheSpec;
using test::SparseMlaCase;

class SparseMlaWindowModel : public test::SparseMlaModelSuite<test::gpu::run_sparse_mla_window> {};

// Rows at any address and at multiples of 16 bytes.
TEST_F(SparseMlaWindowModel, ListsOfAnyLengthFollowTheFormula) {
  uint64_t seed = 0;
  for (const RowFormat format : {RowFormat::kV4, RowFormat::kR512}) {
    for (const int64_t page_pad : {19, 32}) {
      for (const int64_t topk : {1, 64, 65, 128}) {
        test::gpu::settings().seed = static_cast<unsigned>(++seed);
        expect_formula({.rows = 2,
                        .heads = 9,
                        .head_dim_qk = 512,
                        .primary = cache_of(format, 2 + topk % 2, topk, page_pad),
                        .sink = topk == 64,
                        .rope_dim = topk == 65 ? 64 : 0,
                        .seed = seed});
      }
    }
  }
}

// Both caches, the second one by lists and by a page table.
TEST_F(SparseMlaWindowModel, SecondCachesFollowTheFormula) {
  CacheSpec extra = cache_of(RowFormat::kR512, 16, 48, 32);
  expect_formula({.rows = 3,
                  .heads = 65,
                  .head_dim_qk = 512,
                  .primary = cache_of(RowFormat::kV4, 2, 75, 32),
                  .extra = extra,
                  .sink = true,
                  .rope_dim = 512,
                  .seed = 30});
  extra.lengths = false;
  extra.max_pages = 60;
  expect_formula({.rows = 3,
                  .heads = 5,
                  .head_dim_qk = 512,
                  .primary = cache_of(RowFormat::kV4, 2, 30, 19),
                  .extra = extra,
                  .seed = 31});
}

// More rows than blocks, in blocks of 64 and of 128 heads; a row in one block and in two.
TEST_F(SparseMlaWindowModel, ABlockTakesRowAfterRow) {
  uint64_t seed = 60;
  for (const int64_t heads : {17, 64, 70, 128}) {
    for (const int num_sms : {1, 2, 3, 4, 30}) {
      if (heads == 128 && num_sms > 2) continue;
      test::gpu::settings().num_sms = num_sms;
      test::gpu::settings().seed = static_cast<unsigned>(++seed);
      expect_formula(
          {.rows = 5,
           .heads = heads,
           .head_dim_qk = 512,
           .primary = cache_of(num_sms % 2 == 0 ? RowFormat::kV4 : RowFormat::kR512, 64, 100, 32),
           .sink = true,
           .rope_dim = 64,
           .seed = seed});
    }
  }
}

TEST_F(SparseMlaWindowModel, EmptyRowsHaveNoWeight) {
  test::gpu::settings().num_sms = 1;
  expect_formula({.rows = 3,
                  .heads = 9,
                  .head_dim_qk = 512,
                  .primary = cache_of(RowFormat::kV4, 2, 128, 32),
                  .sink = true,
                  .invalid_share = 1.0});
  expect_formula(
      {.rows = 3, .heads = 3, .head_dim_qk = 512, .primary = cache_of(RowFormat::kV4, 2, 0, 32)});
}

TEST_F(SparseMlaWindowModel, LargeLogitsFollowTheFormula) {
  for (const float q_scale : {4.0f, 30.0f}) {
    expect_formula({.rows = 2,
                    .heads = 9,
                    .head_dim_qk = 512,
                    .primary = cache_of(RowFormat::kV4, 2, 128, 32),
                    .q_scale = q_scale});
  }
}

TEST_F(SparseMlaWindowModel, NoOrderOfTheThreadsChangesABit) {
  test::gpu::settings().num_sms = 1;
  expect_same_bits_in_any_order({.rows = 3,
                                 .heads = 70,
                                 .head_dim_qk = 512,
                                 .primary = cache_of(RowFormat::kV4, 2, 120, 32)});
}

}  // namespace
}  // namespace fovea
