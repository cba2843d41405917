// The large dimensions of the specification (6.2): every implementation but the reference against
// the formula, on sampled rows.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "fovea/sparse_mla.h"
#include "tests/mla/sparse_mla_case.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::CacheSpec;
using test::CaseSpec;
using test::Outputs;
using test::SameBits;
using test::SparseMlaCase;

class FullSparseMlaTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }

  // As many of `rows` as a few seconds allow for: plain loops take a hundredth of a SIMD target's.
  int64_t affordable(int64_t rows, int64_t heads, int64_t slots) const {
    const bool slow = GetParam().implementation == "ref" || GetParam().isa == CpuIsa::kBaseline;
    const int64_t budget = slow ? 200'000 : 2'000'000;
    return std::clamp<int64_t>(budget / (heads * slots), 1, rows);
  }

  // Runs with 2 threads; compares the first, a middle and the last row (of long lists the first)
  // with the formula.
  void check(CaseSpec spec) {
    const int64_t slots = spec.primary.topk + spec.extra.topk;
    spec.rows = affordable(spec.rows, spec.heads, slots);
    SparseMlaCase test_case(spec);
    const Outputs all = test_case.run(options(), 2);
    std::vector<int64_t> sampled = {0, spec.rows / 2, spec.rows - 1};
    sampled.erase(std::unique(sampled.begin(), sampled.end()), sampled.end());
    if (spec.heads * slots > 10'000) sampled.resize(1);
    for (const int64_t row : sampled) {
      const Outputs alone = test_case.run(options(), 1, row, row + 1);
      EXPECT_TRUE(test_case.matches(alone, row, row + 1))
          << "row " << row << ", seed " << spec.seed << ", heads " << spec.heads << ", topk "
          << spec.primary.topk << ", page " << spec.primary.page_size;
      const auto begin = static_cast<std::ptrdiff_t>(row * spec.heads);
      EXPECT_TRUE(std::equal(alone.out_bits.begin(), alone.out_bits.end(),
                             all.out_bits.begin() + begin * 512));
      EXPECT_TRUE(
          std::equal(alone.lse_bits.begin(), alone.lse_bits.end(), all.lse_bits.begin() + begin));
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, FullSparseMlaTest,
                         testing::ValuesIn(test::targets_of("sparse_mla", {"cuda_sm90_rows",
                                                                           "cuda_sm90_window"})),
                         test::target_name);

struct Widths {
  int64_t num_keys;
  int64_t topk;
};

TEST_P(FullSparseMlaTest, PrefillDimensions) {
  const Widths regular[] = {{128, 128}, {256, 256}, {512, 512}};
  const Widths irregular[] = {{592, 128}, {1840, 256}, {1592, 384}, {1521, 512},
                              {95, 128},  {153, 256},  {114, 384}};
  uint64_t seed = 100;
  for (const int64_t head_dim_qk : {512, 576}) {
    for (const int64_t heads : {64, 128}) {
      for (const int64_t rows : {1, 62, 213}) {
        CaseSpec spec;
        spec.rows = rows;
        spec.heads = heads;
        spec.head_dim_qk = head_dim_qk;
        for (const Widths& widths : regular) {
          spec.primary = {RowFormat::kBf16, 0, widths.num_keys, widths.topk, false};
          spec.sink = false;
          spec.seed = ++seed;
          check(spec);
        }
        for (const Widths& widths : irregular) {
          spec.primary = {RowFormat::kBf16, 0, widths.num_keys, widths.topk, seed % 2 == 0};
          spec.sink = seed % 3 != 0;
          spec.seed = ++seed;
          check(spec);
        }
      }
    }
  }
}

TEST_P(FullSparseMlaTest, PrefillCorners) {
  for (const auto& [rows, num_keys, topk] : {std::array<int64_t, 3>{1, 128, 128},
                                             {1, 256, 256},
                                             {1234, 4321, 4096},
                                             {4096, 2048, 2048},
                                             {1, 32, 2048},
                                             {1024, 32, 2048},
                                             {1, 64, 8192},
                                             {1024, 64, 8192}}) {
    for (const double invalid_share : {0.97, 1.0}) {
      CaseSpec spec;
      spec.rows = rows;
      spec.heads = 128;
      spec.primary = {RowFormat::kBf16, 0, num_keys, topk, false};
      spec.invalid_share = invalid_share;
      check(spec);
    }
  }
}

TEST_P(FullSparseMlaTest, DecodeDimensions) {
  const std::array<int64_t, 3> shapes[] = {{512, 64, 2},     {512, 64, 64},    {512, 64, 69},
                                           {1024, 576, 2},   {1024, 576, 61},  {2046, 2048, 2},
                                           {2046, 2048, 64}, {2046, 2048, 576}};
  uint64_t seed = 200;
  for (const int64_t head_dim_qk : {576, 512}) {
    for (const int64_t heads : {64, 128}) {
      for (const int64_t rows : {4, 74, 321 * 3}) {
        for (const auto& [num_keys, topk, page_size] : shapes) {
          CaseSpec spec;
          spec.rows = rows;
          spec.heads = heads;
          spec.head_dim_qk = head_dim_qk;
          const int64_t rounded = (num_keys + page_size - 1) / page_size * page_size;
          spec.primary = {head_dim_qk == 576 ? RowFormat::kV32 : RowFormat::kBf16, page_size,
                          rounded, topk, seed % 2 == 0};
          if (seed % 3 == 0) {
            spec.extra = {spec.primary.format, 64, 512, 64 + 5 * static_cast<int64_t>(seed % 17),
                          seed % 2 == 1};
          }
          spec.sink = seed % 5 < 3;
          spec.seed = ++seed;
          check(spec);
        }
      }
    }
  }
}

TEST_P(FullSparseMlaTest, ModelWidthIsEqualForThreadsSplitsAndBatches) {
  for (const int64_t heads : {16, 128}) {
    CaseSpec spec;
    spec.rows = affordable(5, heads, 2048);
    spec.heads = heads;
    spec.primary = {RowFormat::kV32, 64, 8192, 2048, false};
    SparseMlaCase test_case(spec);
    const Outputs one = test_case.run(options(), 1);
    EXPECT_TRUE(test_case.matches(test_case.run(options(), 1, 0, 1), 0, 1));
    for (const int threads : {2, 3, 7})
      EXPECT_TRUE(SameBits(one, test_case.run(options(), threads)));
    spec.fixed_splits = 5;
    SparseMlaCase parts(spec);
    const Outputs split = parts.run(options(), 1);
    for (const int threads : {2, 3}) EXPECT_TRUE(SameBits(split, parts.run(options(), threads)));
    EXPECT_TRUE(parts.agree(split, one));
  }
}

TEST_P(FullSparseMlaTest, SeventyThousandRows) {
  CaseSpec spec;
  spec.rows = 70'000;
  spec.heads = 1;
  spec.head_dim_qk = 512;
  spec.primary = {RowFormat::kBf16, 0, 50, 3, true};
  SparseMlaCase test_case(spec);
  const Outputs all = test_case.run(options(), 2);
  for (const int64_t row : {0, 65'535, 65'536, 69'999}) {
    const Outputs alone = test_case.run(options(), 1, row, row + 1);
    EXPECT_TRUE(test_case.matches(alone, row, row + 1));
    EXPECT_TRUE(std::equal(alone.out_bits.begin(), alone.out_bits.end(),
                           all.out_bits.begin() + static_cast<std::ptrdiff_t>(row * 512)));
  }
}

}  // namespace
}  // namespace fovea
