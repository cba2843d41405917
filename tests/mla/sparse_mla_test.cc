#include "fovea/sparse_mla.h"

#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <cstring>
#include <limits>

#include "fovea/error.h"
#include "fovea/numeric.h"
#include "tests/mla/sparse_mla_case.h"
#include "tests/support/sanitizers.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::CacheSpec;
using test::CaseSpec;
using test::Outputs;
using test::SameBits;
using test::SparseMlaCase;
using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();

class SparseMlaTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }
  Outputs run(SparseMlaCase& test_case, int threads = 1) {
    return test_case.run(options(), threads);
  }
  void expect_formula(const CaseSpec& spec) {
    SparseMlaCase test_case(spec);
    EXPECT_TRUE(test_case.matches(run(test_case)))
        << "heads " << spec.heads << ", topk " << spec.primary.topk << ", seed " << spec.seed;
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, SparseMlaTest,
                         testing::ValuesIn(test::targets_of("sparse_mla", {"cuda_sm90_rows",
                                                                           "cuda_sm90_window"})),
                         test::target_name);

CacheSpec bf16_rows(int64_t num_keys, int64_t topk) {
  return {RowFormat::kBf16, 0, num_keys, topk, false};
}
CacheSpec v32_pages(int64_t pages, int64_t page_size, int64_t topk) {
  return {RowFormat::kV32, page_size, pages * page_size, topk, false};
}

CacheSpec f576_pages(int64_t pages, int64_t page_size, int64_t topk) {
  return {RowFormat::kF576, page_size, pages * page_size, topk, false};
}

TEST_P(SparseMlaTest, FollowsTheFormulaForEveryHeadCount) {
  for (const int64_t heads : {1, 2, 3, 4, 5, 7, 8, 9, 16, 20, 32, 40, 96, 128}) {
    expect_formula({.rows = 1, .heads = heads, .primary = bf16_rows(50, 65)});
  }
}

TEST_P(SparseMlaTest, FollowsTheFormulaForEveryListWidth) {
  for (const int64_t topk : {1, 2, 63, 64, 65, 133, 192, 2047}) {
    expect_formula({.rows = 2, .heads = 3, .primary = bf16_rows(300, topk)});
    expect_formula({.rows = 2, .heads = 3, .primary = v32_pages(5, 61, topk)});
    expect_formula({.rows = 2, .heads = 3, .primary = f576_pages(5, 61, topk)});
  }
}

TEST_P(SparseMlaTest, FollowsTheFormulaWhereFewKeysShareTheWeight) {
  for (const CaseSpec& spec : test::few_keys_share_the_weight()) expect_formula(spec);
}

TEST_P(SparseMlaTest, FollowsTheFormulaForEveryPageSizeAndWidth) {
  for (const int64_t page_size : {1, 2, 53, 61, 64, 69, 576}) {
    const int64_t pages = (200 + page_size - 1) / page_size;
    expect_formula({.rows = 2, .heads = 5, .primary = v32_pages(pages, page_size, 70)});
    expect_formula({.rows = 2, .heads = 5, .primary = f576_pages(pages, page_size, 70)});
    for (const int64_t head_dim_qk : {512, 576}) {
      expect_formula({.rows = 2,
                      .heads = 5,
                      .head_dim_qk = head_dim_qk,
                      .primary = {RowFormat::kBf16, page_size, pages * page_size, 70, false}});
    }
  }
}

TEST_P(SparseMlaTest, FollowsTheFormulaOverTwoSegmentsOfAnyFormats) {
  const CacheSpec segments[] = {{RowFormat::kBf16, 0, 90, 133, true},
                                {RowFormat::kBf16, 7, 84, 65, true},
                                {RowFormat::kV32, 2, 80, 70, true},
                                {RowFormat::kV32, 64, 128, 5, false},
                                {RowFormat::kF576, 5, 90, 70, true}};
  uint64_t seed = 1;
  for (const CacheSpec& primary : segments) {
    for (const CacheSpec& extra : segments) {
      expect_formula({.rows = 5,
                      .heads = 6,
                      .primary = primary,
                      .extra = extra,
                      .sink = true,
                      .seed = ++seed});
    }
  }
}

TEST_P(SparseMlaTest, FollowsTheFormulaForCodesWithScales) {
  uint64_t seed = 51;
  for (const float k_scale : {0.5f, 2.0f, 0.0371f, 1.0f}) {
    for (const float q_code_scale : {0.0f, 0.5f, 2.0f, 0.01f}) {
      for (const int64_t heads : {1, 8, 20, 33}) {
        ++seed;
        // Watched by a sanitizer: every pair of scales once, and every number of heads.
        if (test::kSanitized && (seed / 4 + seed) % 4 != 0) continue;
        expect_formula({.rows = 3,
                        .heads = heads,
                        .primary = {RowFormat::kF576, 13, 130, 150, true},
                        .extra = {RowFormat::kF576, 4, 40, 70, true},
                        .sink = true,
                        .q_code_scale = q_code_scale,
                        .k_scale = k_scale,
                        .seed = seed});
      }
    }
  }
}

TEST_P(SparseMlaTest, ScalesOfCodesMultiplyLogitsAndOutput) {
  // One key of codes 1 (0x38) and one of codes 2 (0x40); q of codes 1: logits 576 * scale * (1, 2).
  Tensor q(DType::kU8, {1, 3, 576}), kv(DType::kU8, {2, 576}), indices = Tensor::i32({1, 1}, {1});
  Tensor out(DType::kBf16, {1, 3, 512}), lse(DType::kF32, {1, 3});
  std::memset(q.data<uint8_t>(), 0x38, 3 * 576);
  std::memset(kv.data<uint8_t>(), 0x38, 576);
  std::memset(kv.data<uint8_t>() + 576, 0x40, 576);
  for (const float q_scale : {0.5f, 2.0f}) {
    for (const float k_scale : {0.5f, 2.0f}) {
      SparseMlaProblem problem{.max_rows = 1, .num_heads = 3, .topk = 1, .softmax_scale = 0.125f};
      problem.row_format = RowFormat::kF576;
      problem.page_size = 1;
      problem.q_scale = q_scale;
      problem.k_scale = k_scale;
      const SparseMla plan = SparseMla::plan(problem, test::device_of(options(), 1), options());
      HostBuffer buffer(plan.workspace_bytes());
      plan.run({.q = q, .kv = kv, .indices = indices, .out = out, .lse = lse}, buffer.workspace());
      for (const float value : lse.values<float>())
        EXPECT_EQ(value, 0.125f * q_scale * k_scale * 2 * 576);
      for (const bf16_t value : out.values<bf16_t>()) EXPECT_EQ(bf16_to_float(value), 2 * k_scale);
    }
  }
}

TEST_P(SparseMlaTest, EveryFiniteCodeIsReadExactly) {
  // q = 0: the output is the value of the listed key, code by code.
  Tensor q(DType::kBf16, {1, 2, 576}), kv(DType::kU8, {1, 576}), indices = Tensor::i32({1, 1}, {0});
  Tensor out(DType::kBf16, {1, 2, 512}), lse(DType::kF32, {1, 2});
  std::memset(q.data<bf16_t>(), 0, 2 * 576 * 2);
  for (int64_t d = 0; d < 576; ++d) {
    const auto code = static_cast<uint8_t>(d);
    kv.data<uint8_t>()[d] = (code & 0x7F) == 0x7F ? uint8_t{0} : code;
  }
  SparseMlaProblem problem{.max_rows = 1, .num_heads = 2, .topk = 1, .softmax_scale = 1};
  problem.row_format = RowFormat::kF576;
  problem.page_size = 1;
  const SparseMla plan = SparseMla::plan(problem, test::device_of(options(), 1), options());
  HostBuffer buffer(plan.workspace_bytes());
  plan.run({.q = q, .kv = kv, .indices = indices, .out = out, .lse = lse}, buffer.workspace());
  for (int64_t i = 0; i < 2 * 512; ++i) {
    ASSERT_EQ(bf16_to_float(out.data<bf16_t>()[i]), e4m3_to_float(kv.data<uint8_t>()[i % 512]));
  }
}

TEST_P(SparseMlaTest, FollowsTheFormulaForPeakedSoftmax) {
  // Logits of order +-60: the running maximum moves often and most weights underflow.
  expect_formula({.rows = 3, .heads = 9, .primary = bf16_rows(400, 333), .q_scale = 200.0f});
}

TEST_P(SparseMlaTest, CapsTheLogitsWhereItSupportsACap) {
  for (const float cap : {0.0f, 1.0f, 30.0f, 1e-3f}) {
    const CaseSpec spec{
        .rows = 3, .heads = 9, .primary = bf16_rows(90, 80), .logit_cap = cap, .q_scale = 8.0f};
    if (GetParam().implementation != "cpu_avx512bf16" || cap == 0) {
      expect_formula(spec);
    } else {
      SparseMlaCase test_case(spec);
      EXPECT_THROW(run(test_case), Error);
    }
  }
}

TEST_P(SparseMlaTest, SkipsWholeInvalidBlocks) {
  // The first and the last blocks of 64 and of 256 slots: the online softmax starts or ends with
  // nothing.
  for (const auto& [begin, end] : {std::pair{0, 64}, {0, 300}, {256, 512}, {400, 640}, {64, 600}}) {
    SparseMlaCase test_case({.rows = 2, .heads = 4, .primary = bf16_rows(100, 640)});
    for (int64_t slot = begin; slot < end; ++slot) test_case.index(0, 1, slot) = -1;
    EXPECT_TRUE(test_case.matches(run(test_case)));
  }
}

TEST_P(SparseMlaTest, EmptyRowsGiveZeroAndInfinityWhateverTheSink) {
  for (const EmptyLse empty_lse : {EmptyLse::kNegInf, EmptyLse::kPosInf}) {
    for (const int64_t topk : {0, 1, 70}) {
      SparseMlaCase test_case({.rows = 3,
                               .heads = 9,
                               .primary = bf16_rows(10, topk),
                               .extra = v32_pages(2, 5, topk),
                               .sink = true,
                               .empty_lse = empty_lse,
                               .invalid_share = 1.0});
      const float sinks[] = {0, kInf, -kInf, 1e38f, -1e38f, 5, -5, 88, 700};
      for (int64_t h = 0; h < 9; ++h) test_case.sink.at<float>({h}) = sinks[h];
      const Outputs outputs = run(test_case);
      for (const uint16_t bits : outputs.out_bits) ASSERT_EQ(bits, 0);
      for (const double lse : outputs.lse)
        ASSERT_EQ(lse, empty_lse == EmptyLse::kPosInf ? kInf : -kInf);
      for (const double largest : outputs.max_logits) ASSERT_EQ(largest, -kInf);
    }
  }
}

TEST_P(SparseMlaTest, SinkScalesTheOutputOnly) {
  SparseMlaCase test_case({.rows = 2, .heads = 8, .primary = bf16_rows(40, 30), .sink = true});
  const float sinks[] = {0, kInf, -kInf, 1e38f, -1e38f, 3.5f, 20, -20};
  for (int64_t h = 0; h < 8; ++h) test_case.sink.at<float>({h}) = sinks[h];
  const Outputs with = run(test_case);
  EXPECT_TRUE(test_case.matches(with));
  for (int64_t h = 0; h < 8; ++h) test_case.sink.at<float>({h}) = -kInf;
  const Outputs without = run(test_case);
  EXPECT_EQ(with.lse_bits, without.lse_bits);
  EXPECT_EQ(with.max_logits_bits, without.max_logits_bits);
  for (size_t h : {1, 3}) EXPECT_EQ(with.out[h * 512 + 17], 0.0);
  for (size_t d = 0; d < 512; ++d) EXPECT_EQ(with.out[4 * 512 + d], without.out[4 * 512 + d]);
}

TEST_P(SparseMlaTest, LseIsNaturalAndDuplicatesCount) {
  // Two slots with the same key: lse - max = ln 2 and the output is that key.
  SparseMlaCase test_case(
      {.rows = 1, .heads = 4, .primary = bf16_rows(9, 2), .invalid_share = 0.0});
  test_case.index(0, 0, 1) = test_case.index(0, 0, 0);
  const Outputs outputs = run(test_case);
  for (size_t h = 0; h < 4; ++h) {
    EXPECT_NEAR(outputs.lse[h] - outputs.max_logits[h], std::log(2.0), 1e-6);
    for (size_t d = 0; d < 512; ++d) {
      ASSERT_EQ(outputs.out[h * 512 + d],
                test_case.key(0, test_case.index(0, 0, 0), static_cast<int64_t>(d)));
    }
  }
}

TEST_P(SparseMlaTest, ZeroQueriesGiveTheMeanOfTheListedValues) {
  Tensor q(DType::kBf16, {1, 3, 576}), out(DType::kBf16, {1, 3, 512}), lse(DType::kF32, {1, 3});
  Tensor kv(DType::kBf16, {10, 576});
  for (int64_t key = 0; key < 10; ++key) {
    std::fill_n(kv.data<bf16_t>() + key * 576, 576, bf16_from_float(static_cast<float>(key)));
  }
  const Tensor indices = Tensor::i32({1, 4}, {7, 9, 2, 2});
  SparseMlaProblem problem{.max_rows = 1, .num_heads = 3, .topk = 4, .softmax_scale = 1};
  const SparseMla plan = SparseMla::plan(problem, test::device_of(options(), 1), options());
  HostBuffer buffer(plan.workspace_bytes());
  plan.run({.q = q, .kv = kv, .indices = indices, .out = out, .lse = lse}, buffer.workspace());
  for (const bf16_t value : out.values<bf16_t>()) EXPECT_EQ(bf16_to_float(value), 5.0f);
  for (const float value : lse.values<float>()) EXPECT_NEAR(value, std::log(4.0f), 1e-6f);
}

TEST_P(SparseMlaTest, OrderOfSlotsChangesRoundingOnly) {
  SparseMlaCase test_case({.rows = 2, .heads = 5, .primary = bf16_rows(500, 300)});
  const Outputs first = run(test_case);
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t slot = 0; slot < 150; ++slot)
      std::swap(test_case.index(0, t, slot), test_case.index(0, t, 299 - slot));
  }
  const Outputs second = run(test_case);
  EXPECT_TRUE(test_case.agree(second, first));
}

TEST_P(SparseMlaTest, FixedSplitsChangeRoundingOnly) {
  CaseSpec spec{.rows = 2,
                .heads = 9,
                .primary = {RowFormat::kBf16, 0, 400, 700, true},
                .extra = {RowFormat::kV32, 8, 160, 130, true},
                .sink = true};
  SparseMlaCase whole(spec);
  const Outputs reference = run(whole);
  for (const int64_t splits : {1, 2, 3, 8, 14, 1000}) {
    if (test::kSanitized && (splits == 2 || splits == 8)) continue;
    spec.fixed_splits = splits;
    SparseMlaCase parts(spec);
    const Outputs outputs = run(parts);
    EXPECT_TRUE(parts.matches(outputs)) << splits;
    EXPECT_TRUE(parts.agree(outputs, reference));
    EXPECT_TRUE(SameBits(outputs, run(parts, 2))) << splits;
    EXPECT_TRUE(SameBits(outputs, run(parts, 3))) << splits;
  }
}

TEST_P(SparseMlaTest, ThreadsAndBatchMatesNeverChangeABit) {
  for (const int64_t heads : {1, 8, 20, 40, 41}) {
    if (test::kSanitized && heads % 20 == 0) continue;
    CaseSpec spec{.rows = 7,
                  .heads = heads,
                  .primary = {RowFormat::kV32, 61, 610, test::by_build(600, 330), true},
                  .extra = {RowFormat::kBf16, 0, 100, 65, true},
                  .sink = true};
    if (heads > 40) {
      spec.primary.format = spec.extra.format = RowFormat::kF576;
      spec.extra.page_size = 10;
      spec.q_code_scale = 0.3f;
      spec.k_scale = 0.7f;
    }
    SparseMlaCase test_case(spec);
    const Outputs all = run(test_case);
    for (const int threads : {1, 2, 3}) {
      EXPECT_TRUE(SameBits(all, run(test_case, threads))) << threads << " threads";
      for (const int64_t row : {0, 3, 6}) {
        const Outputs alone = test_case.run(options(), threads, row, row + 1);
        const auto begin = static_cast<size_t>(row * heads);
        EXPECT_TRUE(std::equal(alone.out_bits.begin(), alone.out_bits.end(),
                               all.out_bits.begin() + static_cast<std::ptrdiff_t>(begin * 512)));
        EXPECT_TRUE(std::equal(alone.lse_bits.begin(), alone.lse_bits.end(),
                               all.lse_bits.begin() + static_cast<std::ptrdiff_t>(begin)));
      }
    }
  }
}

TEST_P(SparseMlaTest, LengthsEqualListsPaddedWithMinusOne) {
  SparseMlaCase test_case({.rows = 4, .heads = 3, .primary = {RowFormat::kBf16, 0, 90, 70, true}});
  const Outputs with_lengths = run(test_case);
  for (int64_t t = 0; t < 4; ++t) {
    const int64_t length = std::clamp(test_case.topk_length_of(0, t), 0, 70);
    for (int64_t slot = length; slot < 70; ++slot) test_case.index(0, t, slot) = -1;
    test_case.topk_length_of(0, t) = INT_MAX;
  }
  EXPECT_TRUE(SameBits(with_lengths, run(test_case)));
}

TEST_P(SparseMlaTest, NanAndInfinityStayInTheirRowAndHead) {
  for (const float bad : {std::nanf(""), kInf}) {
    SparseMlaCase test_case(
        {.rows = 3, .heads = 9, .primary = bf16_rows(90, 70), .invalid_share = 0.1});
    const Outputs clean = run(test_case);
    test_case.set_q(1, 4, 100, bad);
    const Outputs outputs = run(test_case);
    for (size_t i = 0; i < 27; ++i) {
      const bool hit = i == 9 + 4;
      // An infinite q gives logits of either sign: the positive ones make the head NaN.
      EXPECT_EQ(std::isnan(outputs.lse[i]), hit);
      EXPECT_EQ(std::isnan(outputs.max_logits[i]), hit);
      for (size_t d = 0; d < 512; ++d) {
        ASSERT_EQ(std::isnan(outputs.out[i * 512 + d]), hit);
        if (!hit) {
          ASSERT_EQ(outputs.out_bits[i * 512 + d], clean.out_bits[i * 512 + d]);
        }
      }
    }
  }
}

TEST_P(SparseMlaTest, NanInAReferencedTokenReachesEveryHeadOfTheRowsThatListIt) {
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576}) {
    SparseMlaCase test_case(
        {.rows = 3, .heads = 9, .primary = {format, 10, 100, 300, false}, .invalid_share = 0.9});
    // Key 0 is NaN and no list names it.
    test_case.index(0, 2, 77) = 0;
    const Outputs outputs = run(test_case);
    for (size_t i = 0; i < 27; ++i) {
      EXPECT_EQ(std::isnan(outputs.lse[i]), i >= 18);
      for (size_t d = 0; d < 512; ++d) ASSERT_EQ(std::isnan(outputs.out[i * 512 + d]), i >= 18);
    }
  }
}

TEST_P(SparseMlaTest, NanCodesOfTheQueryStayInTheirHead) {
  SparseMlaCase test_case({.rows = 3,
                           .heads = 9,
                           .primary = f576_pages(9, 10, 70),
                           .invalid_share = 0.1,
                           .q_code_scale = 0.5f});
  test_case.set_q(1, 4, 575, std::nanf(""));
  const Outputs outputs = run(test_case);
  for (size_t i = 0; i < 27; ++i) {
    EXPECT_EQ(std::isnan(outputs.lse[i]), i == 9 + 4);
    for (size_t d = 0; d < 512; ++d) ASSERT_EQ(std::isnan(outputs.out[i * 512 + d]), i == 9 + 4);
  }
}

TEST_P(SparseMlaTest, LogitsOfMinusInfinityHaveNoWeight) {
  // q = +inf in one channel where every key is negative: all logits are -inf, the head is empty.
  Tensor q(DType::kBf16, {1, 2, 576}), out(DType::kBf16, {1, 2, 512}), lse(DType::kF32, {1, 2});
  Tensor kv(DType::kBf16, {3, 576});
  for (int64_t i = 0; i < 3 * 576; ++i) kv.data<bf16_t>()[i] = bf16_from_float(-1);
  for (int64_t d = 0; d < 576; ++d) q.data<bf16_t>()[d] = bf16_from_float(1);
  q.data<bf16_t>()[30] = bf16_from_float(kInf);
  const Tensor indices = Tensor::i32({1, 3}, {2, 0, 1});
  SparseMlaProblem problem{.max_rows = 1, .num_heads = 2, .topk = 3, .softmax_scale = 1};
  const SparseMla plan = SparseMla::plan(problem, test::device_of(options(), 1), options());
  HostBuffer buffer(plan.workspace_bytes());
  plan.run({.q = q, .kv = kv, .indices = indices, .out = out, .lse = lse}, buffer.workspace());
  EXPECT_EQ(lse.data<float>()[0], -kInf);
  for (int64_t d = 0; d < 512; ++d) {
    EXPECT_EQ(out.data<bf16_t>()[d].bits, 0);
    EXPECT_EQ(bf16_to_float(out.data<bf16_t>()[512 + d]), -1.0f);
  }
}

TEST_P(SparseMlaTest, PackedRowsAndTheRowsTheyDecodeToGiveTheSameBits) {
  for (const RowFormat format : {RowFormat::kV32, RowFormat::kF576}) {
    SparseMlaCase packed({.rows = 3, .heads = 20, .primary = {format, 13, 130, 300, false}});
    SparseMlaCase plain(
        {.rows = 3, .heads = 20, .primary = {RowFormat::kBf16, 0, 130, 300, false}});
    plain.copy_rows_from(packed);
    EXPECT_TRUE(SameBits(run(packed), run(plain)));
  }
}

TEST_P(SparseMlaTest, DoesNotAllocateWhileRunning) {
  for (const int threads : {1, 2}) {
    SparseMlaCase test_case(
        {.rows = 3, .heads = 8, .primary = v32_pages(4, 64, 330), .extra = bf16_rows(20, 70)});
    EXPECT_EQ(test_case.count_allocations(options(), threads), 0) << threads << " threads";
    SparseMlaCase codes(
        {.rows = 3, .heads = 8, .primary = f576_pages(4, 64, 330), .q_code_scale = 2.0f});
    EXPECT_EQ(codes.count_allocations(options(), threads), 0) << threads << " threads";
  }
}

}  // namespace
}  // namespace fovea
