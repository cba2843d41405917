// The kernels of sparse_mla for GPUs, run by a model of one, against the formula. What only a GPU
// knows, its own rounding and timing, is left to the suites that run there.

#include <gtest/gtest.h>

#include "tests/gpu_model/sparse_mla_model_suite.h"
#include "tests/mla/sparse_mla_case.h"

namespace fovea {
namespace {

using test::cache_of;
using test::CacheSpec;
using test::CaseSpec;
using test::Outputs;
using test::SparseMlaCase;

class SparseMlaModel : public test::SparseMlaModelSuite<test::gpu::run_sparse_mla> {};

TEST_F(SparseMlaModel, FollowsTheFormulaForEveryFormatAndAlignment) {
  uint64_t seed = 0;
  for (const RowFormat format :
       {RowFormat::kV4, RowFormat::kR512, RowFormat::kV32, RowFormat::kF576}) {
    const int64_t dim = format == RowFormat::kV4 || format == RowFormat::kR512 ? 512 : 576;
    for (const int64_t page_pad : {0, 19, 32}) {
      const CacheSpec flat{RowFormat::kBf16, 0, 90, 70, true};
      for (const bool mixed : {false, true}) {
        test::gpu::settings().seed = static_cast<unsigned>(++seed);
        expect_formula({.rows = 2,
                        .heads = 5,
                        .head_dim_qk = dim,
                        .primary = cache_of(format, 3, 150, page_pad),
                        .extra = mixed ? flat : cache_of(format, 16, 70, page_pad),
                        .sink = true,
                        .fixed_splits = mixed ? 2 : 1,
                        .seed = seed});
      }
    }
  }
}

TEST_F(SparseMlaModel, FollowsTheFormulaForEveryNumberOfHeadsInABlock) {
  for (const int num_sms : {1, 132}) {  // large blocks, small blocks
    for (const int64_t heads : {20, 33}) {
      for (const RowFormat format : {RowFormat::kV4, RowFormat::kR512, RowFormat::kBf16}) {
        test::gpu::settings().num_sms = num_sms;
        CacheSpec cache = cache_of(format, 16, 150, 0);
        if (format == RowFormat::kBf16) cache = {format, 0, 90, 230};  // the ring
        cache.lengths = false;
        expect_formula({.rows = 1,
                        .heads = heads,
                        .head_dim_qk = 512,
                        .primary = cache,
                        .rope_dim = 64,
                        .seed = static_cast<uint64_t>(heads)});
      }
    }
  }
}

TEST_F(SparseMlaModel, FollowsTheFormulaWithLittleSharedMemory) {
  test::gpu::settings().max_shared_bytes = 101376;  // compute capability 8.9: no staging
  for (const RowFormat format : {RowFormat::kV4, RowFormat::kR512}) {
    expect_formula(
        {.rows = 2, .heads = 20, .head_dim_qk = 512, .primary = cache_of(format, 16, 150, 0)});
  }
}

TEST_F(SparseMlaModel, PageTablesAndRotationsFollowTheFormula) {
  uint64_t seed = 50;
  for (const RowFormat format : {RowFormat::kV4, RowFormat::kR512, RowFormat::kBf16}) {
    for (const int64_t splits : {1, 3}) {
      CacheSpec extra = cache_of(format, 2, 130, splits == 1 ? 0 : 19);
      extra.lengths = false;
      extra.max_pages = 60;
      expect_formula({.rows = 4,
                      .heads = 5,
                      .head_dim_qk = 512,
                      .primary = cache_of(RowFormat::kV4, 64, 70, 0),
                      .extra = extra,
                      .sink = true,
                      .fixed_splits = splits,
                      .rope_dim = splits == 1 ? 64 : 512,
                      .seed = ++seed});
    }
  }
}

TEST_F(SparseMlaModel, NoOrderOfTheThreadsChangesABit) {
  SparseMlaCase test_case({.rows = 2,
                           .heads = 20,
                           .head_dim_qk = 512,
                           .primary = cache_of(RowFormat::kV4, 16, 150, 0),
                           .extra = cache_of(RowFormat::kR512, 16, 140, 0),
                           .fixed_splits = 1});
  const Outputs first = run(test_case);
  for (const unsigned seed : {2U, 3U}) {
    test::gpu::settings().seed = seed;
    EXPECT_TRUE(SameBits(run(test_case), first));
  }
}

// Rows of fewer keys than parts, and a row without a key, are among them.
TEST_F(SparseMlaModel, PartsThatFoldThemselvesGiveTheBitsOfASecondLaunch) {
  struct Parts {
    RowFormat format;
    int64_t splits, topk, heads;
  };
  for (const Parts& parts : {Parts{RowFormat::kBf16, 2, 150, 5},
                             {RowFormat::kV4, 3, 200, 20},
                             {RowFormat::kV4, 8, 520, 5},
                             {RowFormat::kBf16, 9, 600, 5},
                             {RowFormat::kBf16, 16, 1030, 5}}) {
    const bool is_plain = parts.format == RowFormat::kBf16;
    const CacheSpec plain{RowFormat::kBf16, 0, 160, parts.topk, true};
    SparseMlaCase test_case(
        {.rows = 3,
         .heads = parts.heads,
         .head_dim_qk = is_plain ? 576 : 512,
         .primary = is_plain ? plain : cache_of(parts.format, 16, parts.topk, 0),
         .sink = true,
         .fixed_splits = parts.splits,
         .seed = static_cast<uint64_t>(parts.topk)});
    test::gpu::settings().num_sms = 10000;  // all clusters run at a time
    test::gpu::sparse_mla_has_clusters() = true;
    const Outputs folded = run(test_case);
    EXPECT_TRUE(test_case.matches(folded)) << parts.splits << " parts";
    test::gpu::sparse_mla_has_clusters() = false;
    EXPECT_TRUE(SameBits(run(test_case), folded)) << parts.splits << " parts";
    test::gpu::sparse_mla_has_clusters() = true;
  }
}

// Blocks of fewer heads are for speed alone.
TEST_F(SparseMlaModel, HeadsOfABlockChangeNoBit) {
  CacheSpec cache = cache_of(RowFormat::kV4, 16, 150, 0);
  cache.lengths = false;
  SparseMlaCase test_case(
      {.rows = 1, .heads = 33, .head_dim_qk = 512, .primary = cache, .fixed_splits = 1});
  const Outputs small_blocks = run(test_case);
  test::gpu::settings().num_sms = 1;
  EXPECT_TRUE(SameBits(run(test_case), small_blocks));
}

}  // namespace
}  // namespace fovea
