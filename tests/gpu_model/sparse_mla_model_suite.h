#pragma once

#include <gtest/gtest.h>

#include "tests/gpu_model/gpu_model.h"
#include "tests/gpu_model/sparse_mla_model.h"
#include "tests/mla/sparse_mla_case.h"

namespace fovea::test {

/// Suite of an implementation of sparse_mla that `kRun` runs by the model of a GPU.
template <void (*kRun)(SparseMlaProblem, const SparseMlaTensors&)>
class SparseMlaModelSuite : public testing::Test {
 protected:
  void TearDown() override { gpu::settings() = {}; }

  static Outputs run(SparseMlaCase& test_case) { return test_case.run_by(kRun); }
  static void expect_formula(const CaseSpec& spec) {
    SparseMlaCase test_case(spec);
    EXPECT_TRUE(test_case.matches(run(test_case)))
        << to_string(spec.primary.format) << " + " << to_string(spec.extra.format) << ", heads "
        << spec.heads << ", page padding " << spec.primary.page_pad << ", seed " << spec.seed;
  }
};

/// Rows at any address, at multiples of 8 (v4 pages of an odd number of rows) and of 16 bytes.
inline CacheSpec cache_of(RowFormat format, int64_t page_size, int64_t topk, int64_t page_pad) {
  CacheSpec cache{format, page_size, (160 + page_size - 1) / page_size * page_size, topk, true};
  cache.page_pad = page_pad;
  cache.bf16_scale = page_size % 2 == 1;
  return cache;
}

}  // namespace fovea::test
