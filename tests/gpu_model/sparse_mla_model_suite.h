#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <limits>

#include "tests/gpu_model/gpu_model.h"
#include "tests/gpu_model/sparse_mla_model.h"
#include "tests/mla/sparse_mla_case.h"

namespace fovea::test {

/// Rows at any address, at multiples of 8 (v4 pages of an odd number of rows) and of 16 bytes.
inline CacheSpec cache_of(RowFormat format, int64_t page_size, int64_t topk, int64_t page_pad) {
  CacheSpec cache{format, page_size, (160 + page_size - 1) / page_size * page_size, topk, true};
  cache.page_pad = page_pad;
  cache.bf16_scale = page_size % 2 == 1;
  return cache;
}

/// Suite of an implementation of sparse_mla that `kRun` runs by the model of a GPU.
template <void (*kRun)(SparseMlaProblem, const SparseMlaTensors&)>
class SparseMlaModelSuite : public testing::Test {
 protected:
  void TearDown() override { gpu::settings() = {}; }

  static Outputs run(SparseMlaCase& test_case) { return test_case.run_by(kRun, "cuda"); }
  static void expect_formula(const CaseSpec& spec) {
    SparseMlaCase test_case(spec);
    EXPECT_TRUE(test_case.matches(run(test_case)))
        << to_string(spec.primary.format) << " + " << to_string(spec.extra.format) << ", heads "
        << spec.heads << ", page padding " << spec.primary.page_pad << ", seed " << spec.seed;
  }
  // Five heads of each format, `topk` keys and more of another cache; rows of `page_pad` 19 at any
  // address, those of 32 at multiples of 16 bytes. Seeds follow `seed`.
  static void expect_formula_for_formats(std::initializer_list<RowFormat> formats, int64_t topk,
                                         bool rotates, uint64_t seed) {
    for (const RowFormat format : formats) {
      const bool narrow = format == RowFormat::kV4 || format == RowFormat::kR512;
      for (const int64_t page_pad : {19, 32}) {
        const CacheSpec flat{RowFormat::kBf16, 0, 90, 70, true};
        const bool mixed = page_pad == 19;
        gpu::settings().seed = static_cast<unsigned>(++seed);
        expect_formula({.rows = 2,
                        .heads = 5,
                        .head_dim_qk = narrow ? 512 : 576,
                        .primary = cache_of(format, 2, topk, page_pad),
                        .extra = mixed ? flat : cache_of(format, 16, 70, page_pad),
                        .sink = true,
                        .fixed_splits = mixed ? 2 : 1,
                        .rope_dim = rotates && narrow ? 64 : 0,
                        .seed = seed});
      }
    }
  }
  static void expect_same_bits_in_any_order(const CaseSpec& spec) {
    SparseMlaCase test_case(spec);
    const Outputs first = run(test_case);
    for (const unsigned seed : {2U, 3U, 4U}) {
      gpu::settings().seed = seed;
      EXPECT_TRUE(SameBits(run(test_case), first));
    }
  }
  // Of one row of 9 heads.
  static void expect_nan_in_its_head(const CacheSpec& cache) {
    SparseMlaCase test_case({.rows = 1, .heads = 9, .primary = cache});
    const Outputs clean = run(test_case);
    test_case.set_q(0, 4, 100, std::numeric_limits<float>::quiet_NaN());
    const Outputs outputs = run(test_case);
    for (size_t i = 0; i < clean.out_bits.size(); ++i) {
      if (i / 512 != 4) {
        ASSERT_EQ(outputs.out_bits[i], clean.out_bits[i]);
      }
    }
    for (size_t h = 0; h < 9; ++h) {
      EXPECT_EQ(std::isnan(outputs.lse[h]), h == 4);
      for (size_t d = 0; d < 512; ++d) ASSERT_EQ(std::isnan(outputs.out[h * 512 + d]), h == 4);
    }
  }
};

}  // namespace fovea::test
