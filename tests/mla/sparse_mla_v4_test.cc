// sparse_mla over the rows of DeepSeek-V4: scales apart from their rows, a window and compressed
// entries under one softmax, page tables, the inverse rotation.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

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

class SparseMlaV4Test : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }
  Outputs run(SparseMlaCase& test_case, int threads = 1) {
    return test_case.run(options(), threads);
  }
  void expect_formula(CaseSpec spec) {
    spec.head_dim_qk = 512;
    SparseMlaCase test_case(spec);
    EXPECT_TRUE(test_case.matches(run(test_case)))
        << to_string(spec.primary.format) << " + " << to_string(spec.extra.format) << ", page "
        << spec.primary.page_size << ", heads " << spec.heads << ", seed " << spec.seed;
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, SparseMlaV4Test,
                         testing::ValuesIn(test::targets_of("sparse_mla", {"cuda_sm90_rows",
                                                                           "cuda_sm90_window"})),
                         test::target_name);

constexpr RowFormat kRows[] = {RowFormat::kV4, RowFormat::kR512};

CacheSpec pages_of(RowFormat format, int64_t pages, int64_t page_size, int64_t topk,
                   bool lengths = true, bool bf16_scale = false) {
  return {format, page_size, pages * page_size, topk, lengths, bf16_scale};
}

TEST_P(SparseMlaV4Test, FollowsTheFormulaForEveryHeadCountAndWidth) {
  uint64_t seed = 100;
  for (const RowFormat format : kRows) {
    for (const int64_t heads : {1, 8, 16, 20, 64, 96, 128})
      expect_formula({.rows = 1,
                      .heads = heads,
                      .primary = pages_of(format, 3, 61, 133, false),
                      .seed = ++seed});
    for (const int64_t width : {1, 5, 64, 127, 128, 192, 256})
      expect_formula({.rows = 3,
                      .heads = 3,
                      .primary = pages_of(format, 3, 61, width, true, width % 2 == 0),
                      .seed = ++seed});
  }
}

TEST_P(SparseMlaV4Test, FollowsTheFormulaForEveryPageSize) {
  for (const RowFormat format : kRows) {
    for (const int64_t page_size : {1, 2, 53, 61, 64, 69, 256}) {
      expect_formula({.rows = 2,
                      .heads = 5,
                      .primary = pages_of(format, (200 + page_size - 1) / page_size, page_size, 70,
                                          false, page_size % 2 == 1)});
    }
  }
}

// Rows at multiples of 16 bytes, which a GPU stages, and pages of an odd number of v4 rows without
// a gap, at multiples of 8. Several blocks in one part, and holes in each.
TEST_P(SparseMlaV4Test, FollowsTheFormulaForAlignedRows) {
  uint64_t seed = 300;
  for (const RowFormat format : kRows) {
    for (const int64_t heads : {5, 20, 33}) {
      CacheSpec primary = pages_of(format, 8, 16, 200, true, heads == 20);
      CacheSpec extra = pages_of(format, 40, heads == 33 ? 3 : 2, 140, true, heads == 33);
      primary.page_pad = 32;
      extra.page_pad = 0;
      expect_formula({.rows = 3,
                      .heads = heads,
                      .primary = primary,
                      .extra = extra,
                      .sink = true,
                      .fixed_splits = 1,
                      .rope_dim = 64,
                      .seed = ++seed});
      const CacheSpec rows{RowFormat::kBf16, 0, 90, 150, true};
      expect_formula({.rows = 3,
                      .heads = heads,
                      .primary = heads == 20 ? primary : rows,
                      .extra = heads == 20 ? rows : primary,
                      .fixed_splits = 1,
                      .seed = ++seed});
    }
  }
}

TEST_P(SparseMlaV4Test, WindowAndCompressedEntriesShareOneSoftmax) {
  const CacheSpec segments[] = {pages_of(RowFormat::kV4, 2, 64, 128),
                                pages_of(RowFormat::kV4, 40, 2, 65),
                                pages_of(RowFormat::kR512, 9, 13, 133),
                                pages_of(RowFormat::kR512, 5, 16, 20, true, true),
                                {RowFormat::kBf16, 0, 90, 70, true}};
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

TEST_P(SparseMlaV4Test, EitherSegmentMayBeEmpty) {
  for (const RowFormat format : kRows) {
    expect_formula({.rows = 3,
                    .heads = 5,
                    .primary = pages_of(format, 2, 64, 128),
                    .extra = pages_of(format, 2, 16, 0, false),
                    .sink = true});
    expect_formula({.rows = 3,
                    .heads = 5,
                    .primary = pages_of(format, 2, 64, 0, false),
                    .extra = pages_of(format, 20, 16, 200),
                    .sink = true});
  }
}

TEST_P(SparseMlaV4Test, PackedRowsAndTheRowsTheyDecodeToGiveTheSameBits) {
  for (const bool bf16_scale : {false, true}) {
    for (const RowFormat format : kRows) {
      SparseMlaCase packed({.rows = 3,
                            .heads = 20,
                            .head_dim_qk = 512,
                            .primary = pages_of(format, 10, 13, 300, false, bf16_scale)});
      SparseMlaCase plain({.rows = 3,
                           .heads = 20,
                           .head_dim_qk = 512,
                           .primary = {RowFormat::kBf16, 0, 130, 300, false}});
      plain.copy_rows_from(packed);
      EXPECT_TRUE(SameBits(run(packed), run(plain))) << to_string(format);
    }
  }
}

TEST_P(SparseMlaV4Test, KeysOfAPageTableFollowTheFormula) {
  uint64_t seed = 30;
  for (const RowFormat format : {RowFormat::kV4, RowFormat::kR512, RowFormat::kBf16}) {
    for (const auto& [page_size, max_pages, bound] :
         {std::tuple<int64_t, int64_t, int64_t>{2, 40, 80}, {64, 3, 150}, {1, 70, 300}}) {
      CacheSpec extra{format, page_size, 9 * page_size, bound, false, true};
      extra.max_pages = max_pages;
      expect_formula({.rows = 9,
                      .heads = 5,
                      .primary = pages_of(RowFormat::kV4, 2, 64, 128),
                      .extra = extra,
                      .sink = true,
                      .seed = ++seed});
    }
  }
  CacheSpec flat{RowFormat::kBf16, 0, 40, 30, false};  // rows of bf16 [S, 512] as pages of one
  flat.max_pages = 35;
  expect_formula(
      {.rows = 9, .heads = 5, .primary = pages_of(RowFormat::kV4, 2, 64, 20), .extra = flat});
}

TEST_P(SparseMlaV4Test, KeysOfAPageTableMayHave576Channels) {
  uint64_t seed = 40;
  for (const RowFormat format : {RowFormat::kV32, RowFormat::kF576, RowFormat::kBf16}) {
    for (const int64_t page_pad : {0, 19}) {
      CacheSpec primary = pages_of(format, 5, 16, 150), extra = pages_of(format, 9, 16, 150);
      primary.page_pad = extra.page_pad = page_pad;
      extra.lengths = false;
      extra.max_pages = 10;
      SparseMlaCase test_case({.rows = 5,
                               .heads = 20,
                               .primary = primary,
                               .extra = extra,
                               .fixed_splits = 1,
                               .seed = ++seed});
      EXPECT_TRUE(test_case.matches(run(test_case))) << to_string(format) << ", " << page_pad;
    }
  }
}

TEST_P(SparseMlaV4Test, PageTableAndListOfTheSameKeysGiveTheSameBits) {
  // Entries 0 .. n - 1 in order: what a dense layer attends to, and a selection of everything.
  CacheSpec dense = pages_of(RowFormat::kV4, 12, 2, 24),
            window = pages_of(RowFormat::kR512, 4, 32, 128);
  dense.max_pages = 12;
  const CaseSpec spec{.rows = 7,
                      .heads = 9,
                      .head_dim_qk = 512,
                      .primary = window,
                      .extra = dense,
                      .sink = true,
                      .seed = 5};
  SparseMlaCase by_table(spec);
  const Outputs expected = run(by_table);
  EXPECT_TRUE(by_table.matches(expected));
  const Outputs by_list = by_table.run_with_lists(options());
  EXPECT_TRUE(SameBits(by_list, expected));
}

TEST_P(SparseMlaV4Test, InverseRotationTurnsTheLastChannels) {
  uint64_t seed = 60;
  for (const int64_t rope_dim : {64, 2, 32, 512}) {
    for (const int64_t heads : {1, 9, 40}) {
      expect_formula({.rows = 6,
                      .heads = heads,
                      .primary = pages_of(RowFormat::kV4, 3, 64, 128),
                      .extra = pages_of(RowFormat::kV4, 40, 2, 65),
                      .sink = true,
                      .rope_dim = rope_dim,
                      .seed = ++seed});
      expect_formula({.rows = 2,
                      .heads = heads,
                      .primary = {RowFormat::kBf16, 0, 90, 150, true},
                      .sink = true,
                      .fixed_splits = heads == 9 ? 2 : 1,
                      .rope_dim = rope_dim,
                      .seed = ++seed});
    }
  }
}

// Case 20: with rotated queries, keys and outputs only distances matter.
TEST_P(SparseMlaV4Test, ShiftingEveryPositionLeavesTheTurnedOutput) {
  const int64_t keys = 40, max_pos = 400;
  test::Rng rng(91);
  const std::vector<float> raw_keys = rng.normals(keys * 512, 0.3f);
  const std::vector<float> raw_query = rng.normals(512, 1.0f);
  Tensor table(DType::kF32, {max_pos, 64});
  for (int64_t p = 0; p < max_pos; ++p) {
    for (int64_t i = 0; i < 32; ++i) {
      const double angle = static_cast<double>(p) * std::pow(10000.0, -static_cast<double>(i) / 32);
      table.data<float>()[p * 64 + i] = static_cast<float>(std::cos(angle));
      table.data<float>()[p * 64 + 32 + i] = static_cast<float>(std::sin(angle));
    }
  }
  const auto rotate = [&](const float* x, int64_t p, bf16_t* to) {
    const float* turn = table.data<float>() + p * 64;
    for (int64_t d = 0; d < 448; ++d) to[d] = bf16_from_float(x[d]);
    for (int64_t i = 0; i < 32; ++i) {
      const float a = x[448 + 2 * i], b = x[449 + 2 * i];
      to[448 + 2 * i] = bf16_from_float(a * turn[i] - b * turn[32 + i]);
      to[449 + 2 * i] = bf16_from_float(b * turn[i] + a * turn[32 + i]);
    }
  };
  const auto attend = [&](int64_t shift, int64_t rope_dim) {
    Tensor q(DType::kBf16, {1, 1, 512}), kv(DType::kBf16, {keys, 512}),
        out(DType::kBf16, {1, 1, 512});
    Tensor lse(DType::kF32, {1, 1}), indices(DType::kI32, {1, keys});
    for (int64_t j = 0; j < keys; ++j) {
      rotate(raw_keys.data() + j * 512, j + shift, kv.data<bf16_t>() + j * 512);
      indices.data<int32_t>()[j] = static_cast<int32_t>(j);
    }
    rotate(raw_query.data(), keys - 1 + shift, q.data<bf16_t>());
    const Tensor positions = Tensor::i32({1}, {static_cast<int32_t>(keys - 1 + shift)});
    SparseMlaProblem problem{.max_rows = 1, .num_heads = 1, .head_dim_qk = 512, .topk = keys};
    problem.softmax_scale = 0.05f;
    problem.inverse_rope_dim = rope_dim;
    SparseMlaTensors tensors{.q = q, .kv = kv, .indices = indices, .out = out, .lse = lse};
    if (rope_dim > 0) {
      tensors.inverse_rope = table;
      tensors.positions = positions;
    }
    const SparseMla plan = SparseMla::plan(problem, test::device_of(options(), 1), options());
    HostBuffer buffer(plan.workspace_bytes());
    plan.run(tensors, buffer.workspace());
    return test::to_doubles(out.view());
  };
  const std::vector<double> here = attend(0, 64), there = attend(300, 64), plain = attend(300, 0);
  double turned = 0, as_it_is = 0;
  for (size_t d = 448; d < 512; ++d) {
    turned = std::max(turned, std::fabs(here[d] - there[d]));
    as_it_is = std::max(as_it_is, std::fabs(here[d] - plain[d]));
  }
  EXPECT_LT(turned, 0.02);  // queries and keys are rounded to bf16 after their rotation
  EXPECT_GT(as_it_is, 0.1);
}

TEST_P(SparseMlaV4Test, EveryScaleByteIsReadExactly) {
  // q = 0: the output is the listed key. Scales of every writer, 2^-22 of zero tiles among them.
  Tensor q(DType::kBf16, {1, 2, 512}), indices = Tensor::i32({1, 1}, {0});
  Tensor kv(DType::kU8, {1, 584}), out(DType::kBf16, {1, 2, 512}), lse(DType::kF32, {1, 2});
  SparseMlaProblem problem{.max_rows = 1, .num_heads = 2, .head_dim_qk = 512, .topk = 1};
  problem.softmax_scale = 1;
  problem.row_format = RowFormat::kV4;
  problem.page_size = 1;
  const SparseMla plan = SparseMla::plan(problem, test::device_of(options(), 1), options());
  HostBuffer buffer(plan.workspace_bytes());
  for (int scale = 0; scale < 256; ++scale) {
    if (scale > 245 && scale < 255) continue;  // 448 times such a scale is beyond bf16
    for (int d = 0; d < 448; ++d) {
      const auto code = static_cast<uint8_t>(d * 5);
      kv.data<uint8_t>()[d] = (code & 0x7F) == 0x7F ? uint8_t{0} : code;
    }
    for (int g = 0; g < 7; ++g) kv.data<uint8_t>()[576 + g] = static_cast<uint8_t>(scale);
    kv.data<uint8_t>()[583] = 0xFF;
    plan.run({.q = q, .kv = kv, .indices = indices, .out = out, .lse = lse}, buffer.workspace());
    for (int64_t i = 0; i < 2 * 512; ++i) {
      const float found = bf16_to_float(out.data<bf16_t>()[i]);
      if (scale == 255) {
        ASSERT_TRUE(std::isnan(found));
        continue;
      }
      if (i % 512 >= 448) continue;
      const double value =
          e4m3_to_float(kv.data<uint8_t>()[i % 512]) * std::ldexp(1.0, scale - 127);
      // Below the normal numbers a processor that flushes them may give zero.
      if (std::fabs(value) < 0x1p-126) continue;
      ASSERT_EQ(found, static_cast<float>(value)) << "scale " << scale << " channel " << i;
    }
  }
}

// Case 2: slot 0 holds NaN codes, scales and rope; every bad index leaves it alone.
TEST_P(SparseMlaV4Test, UnreadRowsHaveNoInfluence) {
  for (const RowFormat format : kRows) {
    for (const bool bf16_scale : {false, true}) {
      SparseMlaCase test_case({.rows = 4,
                               .heads = 9,
                               .head_dim_qk = 512,
                               .primary = pages_of(format, 5, 16, 128, true, bf16_scale),
                               .invalid_share = 0.7});
      const Outputs outputs = run(test_case);
      for (const double value : outputs.out) ASSERT_TRUE(std::isfinite(value));
      EXPECT_TRUE(test_case.matches(outputs));
    }
  }
}

// Case 7: a sink of 0 beside one key of logit 0 takes half of the weight.
TEST_P(SparseMlaV4Test, SinkOfZeroHalvesASingleKeyOfLogitZero) {
  for (const int64_t splits : {0, 1, 2, 7}) {
    Tensor q(DType::kBf16, {1, 2, 512}), kv(DType::kU8, {1, 584}), sink(DType::kF32, {2});
    Tensor out(DType::kBf16, {1, 2, 512}), lse(DType::kF32, {1, 2});
    const Tensor indices = Tensor::i32({1, 3}, {-1, 0, 7});
    std::memset(kv.data<uint8_t>(), 0x40, 448);  // 2
    std::memset(kv.data<uint8_t>() + 576, 127, 7);
    sink.data<float>()[1] = -kInf;
    SparseMlaProblem problem{.max_rows = 1, .num_heads = 2, .head_dim_qk = 512, .topk = 3};
    problem.softmax_scale = 0.1f;
    problem.row_format = RowFormat::kV4;
    problem.page_size = 1;
    problem.fixed_splits = splits;
    const SparseMla plan = SparseMla::plan(problem, test::device_of(options(), 1), options());
    HostBuffer buffer(plan.workspace_bytes());
    plan.run({.q = q, .kv = kv, .indices = indices, .sink = sink, .out = out, .lse = lse},
             buffer.workspace());
    for (int64_t d = 0; d < 448; ++d) {
      ASSERT_EQ(bf16_to_float(out.data<bf16_t>()[d]), 1.0f);
      ASSERT_EQ(bf16_to_float(out.data<bf16_t>()[512 + d]), 2.0f);
    }
    EXPECT_EQ(lse.data<float>()[0], 0.0f);
  }
}

TEST_P(SparseMlaV4Test, SplitsThreadsAndBatchMatesChangeRoundingOrNothing) {
  CaseSpec spec{.rows = 5,
                .heads = 20,
                .head_dim_qk = 512,
                .primary = pages_of(RowFormat::kV4, 4, 64, 128),
                .extra = pages_of(RowFormat::kV4, 100, 4, test::by_build(600, 330)),
                .sink = true,
                .rope_dim = 64};
  for (const int64_t splits : {0, 1, 2, 7}) {
    spec.fixed_splits = splits;
    SparseMlaCase test_case(spec);
    const Outputs all = run(test_case);
    EXPECT_TRUE(test_case.matches(all)) << splits;
    for (const int threads : {2, 3}) EXPECT_TRUE(SameBits(all, run(test_case, threads)));
    const Outputs alone = test_case.run(options(), 2, 3, 4);
    EXPECT_TRUE(std::equal(alone.out_bits.begin(), alone.out_bits.end(),
                           all.out_bits.begin() + 3 * 20 * 512));
  }
}

TEST_P(SparseMlaV4Test, DoesNotAllocateWhileRunning) {
  CacheSpec dense = pages_of(RowFormat::kR512, 12, 2, 24);
  dense.max_pages = 12;
  SparseMlaCase test_case({.rows = 3,
                           .heads = 8,
                           .head_dim_qk = 512,
                           .primary = pages_of(RowFormat::kV4, 4, 64, 128),
                           .extra = dense,
                           .rope_dim = 64});
  for (const int threads : {1, 2}) EXPECT_EQ(test_case.count_allocations(options(), threads), 0);
}

TEST(SparseMlaV4, PlansRefuseWhatTheirTableDoesNotList) {
  const SparseMlaProblem good = [] {
    SparseMlaProblem problem{.max_rows = 1, .num_heads = 1, .head_dim_qk = 512, .topk = 1};
    problem.softmax_scale = 1;
    problem.row_format = RowFormat::kV4;
    problem.page_size = 64;
    return problem;
  }();
  EXPECT_NO_THROW(SparseMla::plan(good, Device::cpu(1)));
  const auto refuse = [&](auto change) {
    SparseMlaProblem problem = good;
    change(problem);
    EXPECT_THROW(SparseMla::plan(problem, Device::cpu(1)), Error);
  };
  refuse([](SparseMlaProblem& p) { p.head_dim_qk = 576; });
  refuse([](SparseMlaProblem& p) { p.page_size = 0; });
  refuse([](SparseMlaProblem& p) { p.row_format = RowFormat::kI132; });
  refuse([](SparseMlaProblem& p) { p.extra_row_format = RowFormat::kV32; });
  refuse([](SparseMlaProblem& p) { p.k_scale = 2; });
  refuse([](SparseMlaProblem& p) { p.extra_max_pages = -1; });
  for (const int64_t rope_dim : {-2, 3, 514})
    refuse([&](SparseMlaProblem& p) { p.inverse_rope_dim = rope_dim; });
  refuse([](SparseMlaProblem& p) {
    p.row_format = RowFormat::kV32, p.head_dim_qk = 576, p.inverse_rope_dim = 64;
  });
}

TEST(SparseMlaV4, RunRefusesTensorsThatDoNotMatchThePlanBeforeItWrites) {
  const Tensor q(DType::kBf16, {1, 1, 512}), indices = Tensor::i32({1, 1}, {0});
  const Tensor v4(DType::kU8, {2, 3 * 584}), r512(DType::kU8, {2, 3 * 512});
  const Tensor scale(DType::kF32, {6, 1}), table = Tensor::i32({1, 2}, {0, 1});
  const Tensor one = Tensor::i32({1}, {0}), rotation(DType::kF32, {4, 64});
  Tensor out(DType::kBf16, {1, 1, 512}), lse(DType::kF32, {1, 1});
  out.fill_bytes(0x11);
  const std::vector<uint8_t> before = out.bytes();
  SparseMlaProblem problem{.max_rows = 1, .num_heads = 1, .head_dim_qk = 512, .topk = 1};
  problem.softmax_scale = 1;
  problem.row_format = RowFormat::kR512;
  problem.page_size = 3;
  problem.extra_row_format = RowFormat::kV4;
  problem.extra_topk = 6;
  problem.extra_max_pages = 2;
  problem.inverse_rope_dim = 64;
  SparseMlaTensors good;
  good.q = q;
  good.kv = r512;
  good.indices = indices;
  good.extra_kv = v4;
  good.inv_scale = scale;
  good.extra_page_table = table;
  good.extra_len = good.row_to_request = good.positions = one;
  good.inverse_rope = rotation;
  good.out = out;
  good.lse = lse;
  const auto refuse = [&](auto change) {
    SparseMlaTensors tensors = good;
    SparseMlaProblem changed = problem;
    change(changed, tensors);
    const SparseMla plan = SparseMla::plan(changed, Device::cpu(1));
    HostBuffer buffer(plan.workspace_bytes());
    EXPECT_THROW(plan.run(tensors, buffer.workspace()), Error);
  };
  const Tensor short_pages(DType::kU8, {2, 3 * 584 - 1}), few_scales(DType::kF32, {5, 1});
  const Tensor narrow(DType::kF32, {4, 32}), no_rows(DType::kF32, {0, 64}),
      two = Tensor::i32({2}, {0, 0});
  refuse([](auto&, SparseMlaTensors& t) { t.inv_scale = {}; });
  refuse([&](auto&, SparseMlaTensors& t) { t.inv_scale = few_scales; });
  refuse([&](auto&, SparseMlaTensors& t) { t.extra_inv_scale = scale; });
  refuse([&](auto&, SparseMlaTensors& t) { t.extra_kv = short_pages; });
  refuse([](auto&, SparseMlaTensors& t) { t.extra_page_table = {}; });
  refuse([&](auto&, SparseMlaTensors& t) { t.extra_page_table = indices; });
  refuse([](auto&, SparseMlaTensors& t) { t.extra_len = {}; });
  refuse([&](auto&, SparseMlaTensors& t) { t.row_to_request = two; });
  refuse([&](auto&, SparseMlaTensors& t) { t.extra_indices = indices; });
  refuse([&](auto&, SparseMlaTensors& t) { t.extra_topk_length = one; });
  refuse([](auto& p, SparseMlaTensors&) { p.extra_max_pages = 0; });
  refuse([&](auto&, SparseMlaTensors& t) { t.inverse_rope = narrow; });
  refuse([&](auto&, SparseMlaTensors& t) { t.inverse_rope = no_rows; });
  refuse([](auto&, SparseMlaTensors& t) { t.positions = {}; });
  refuse([](auto& p, SparseMlaTensors&) { p.inverse_rope_dim = 0; });
  EXPECT_EQ(out.bytes(), before);
  const SparseMla plan = SparseMla::plan(problem, Device::cpu(1));
  HostBuffer buffer(plan.workspace_bytes());
  EXPECT_NO_THROW(plan.run(good, buffer.workspace()));
}

}  // namespace
}  // namespace fovea
