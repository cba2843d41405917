// The kernels of sparse_mla for compute capability 9.0, run by the model of a GPU, against the
// formula.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "fovea/numeric.h"

#include "tests/gpu_model/sparse_mla_model_suite.h"
#include "tests/mla/sparse_mla_case.h"

namespace fovea {
namespace {

using test::cache_of;
using test::CacheSpec;
using test::SparseMlaCase;

class SparseMlaSm90Model : public test::SparseMlaModelSuite<test::gpu::run_sparse_mla_sm90> {};

// Rows at any address and at multiples of 16 bytes; up to five tiles, of both caches.
TEST_F(SparseMlaSm90Model, FollowsTheFormulaForEveryFormatAndAlignment) {
  expect_formula_for_formats(
      {RowFormat::kV4, RowFormat::kR512, RowFormat::kV32, RowFormat::kF576, RowFormat::kBf16}, 190,
      false, 0);
}

TEST_F(SparseMlaSm90Model, FollowsTheFormulaForGroupsOfHeadsAndManyTiles) {
  for (const int64_t heads : {64, 70, 128}) {
    CacheSpec cache = cache_of(heads == 70 ? RowFormat::kBf16 : RowFormat::kV32, 4, 430, 0);
    cache.lengths = false;
    expect_formula({.rows = 1,
                    .heads = heads,
                    .primary = cache,
                    .fixed_splits = 1,
                    .seed = static_cast<uint64_t>(heads)});
  }
}

// Two blocks bring half of the rows each, of lists that are long enough. Rows at any address and at
// multiples of 16 bytes; five tiles, of both caches, in one part and two.
TEST_F(SparseMlaSm90Model, BlocksThatShareRowsFollowTheFormula) {
  uint64_t seed = 90;
  for (const RowFormat format :
       {RowFormat::kV4, RowFormat::kR512, RowFormat::kV32, RowFormat::kF576}) {
    const bool narrow = format == RowFormat::kV4 || format == RowFormat::kR512;
    const bool aligned = ++seed % 2 == 0;
    test::gpu::settings().seed = static_cast<unsigned>(seed);
    expect_formula(
        {.rows = 1,
         .heads = 65,
         .head_dim_qk = narrow ? 512 : 576,
         .primary = cache_of(format, 2, 190, aligned ? 32 : 19),
         .extra = aligned ? cache_of(format, 16, 70, 32) : CacheSpec{RowFormat::kBf16, 0, 90, 70},
         .fixed_splits = narrow ? 2 : 1,
         .seed = seed});
  }
  CacheSpec empty = cache_of(RowFormat::kV32, 2, 260, 0);
  expect_formula({.rows = 2, .heads = 65, .primary = empty, .invalid_share = 1.0});
}

TEST_F(SparseMlaSm90Model, CapsTheLogits) {
  for (const float cap : {1.0f, 30.0f, 1e-3f}) {
    expect_formula({.rows = 2,
                    .heads = 9,
                    .primary = {RowFormat::kBf16, 0, 90, 80},
                    .logit_cap = cap,
                    .q_scale = 8.0f});
  }
}

TEST_F(SparseMlaSm90Model, PageTablesAndRotationsFollowTheFormula) {
  uint64_t seed = 50;
  for (const RowFormat format : {RowFormat::kV4, RowFormat::kR512, RowFormat::kBf16}) {
    CacheSpec extra = cache_of(format, 2, 130, format == RowFormat::kV4 ? 32 : 19);
    extra.lengths = false;
    extra.max_pages = 60;
    expect_formula({.rows = 4,
                    .heads = 5,
                    .head_dim_qk = 512,
                    .primary = cache_of(RowFormat::kV4, 64, 70, 0),
                    .extra = extra,
                    .sink = true,
                    .fixed_splits = format == RowFormat::kV4 ? 1 : 3,
                    .rope_dim = format == RowFormat::kV4 ? 64 : 512,
                    .seed = ++seed});
  }
}

TEST_F(SparseMlaSm90Model, EmptyRowsAndEmptyTilesHaveNoWeight) {
  expect_formula({.rows = 3,
                  .heads = 9,
                  .primary = {RowFormat::kBf16, 0, 10, 130},
                  .sink = true,
                  .invalid_share = 1.0});
  expect_formula({.rows = 2, .heads = 3, .primary = {RowFormat::kBf16, 0, 10, 0}});
  SparseMlaCase test_case(
      {.rows = 2, .heads = 4, .primary = {RowFormat::kV32, 2, 100, 330, false, false, 0, 32}});
  for (int64_t slot = 0; slot < 128; ++slot) test_case.index(0, 1, slot) = -1;
  for (int64_t slot = 256; slot < 330; ++slot) test_case.index(0, 0, slot) = -1;
  EXPECT_TRUE(test_case.matches(run(test_case)));
}

// Where the keys of a tile stand decides which thread weighs them, and no more.
TEST_F(SparseMlaSm90Model, EntriesWithoutAKeyChangeNoBit) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const test::CaseSpec spec{.rows = 1,
                              .heads = 64,
                              .primary = {RowFormat::kBf16, 0, 90, 70},
                              .q_scale = 2.0f,
                              .seed = seed};
    SparseMlaCase packed(spec), spread(spec);
    std::vector<int32_t> keys;
    for (int64_t slot = 0; slot < 70; ++slot) {
      const int32_t key = packed.index(0, 0, slot);
      if (0 <= key && key < 90) keys.push_back(key);
      packed.index(0, 0, slot) = spread.index(0, 0, slot) = -1;
    }
    ASSERT_GE(keys.size(), 6U);
    // Three keys a tile, so that no sum has another order.
    const int64_t places[] = {0, 2, 6, 64, 66, 68}, together[] = {0, 1, 2, 64, 65, 66};
    for (size_t i = 0; i < 6; ++i) {
      packed.index(0, 0, together[i]) = keys[i];
      spread.index(0, 0, places[i]) = keys[i];
    }
    EXPECT_TRUE(SameBits(run(packed), run(spread))) << seed;
  }
}

TEST_F(SparseMlaSm90Model, NoOrderOfTheThreadsChangesABit) {
  expect_same_bits_in_any_order({.rows = 1,
                                 .heads = 64,
                                 .head_dim_qk = 512,
                                 .primary = cache_of(RowFormat::kV4, 16, 250, 0),
                                 .extra = cache_of(RowFormat::kR512, 16, 140, 0),
                                 .fixed_splits = 1});
}

// With queries of zero and one key a row the output is the key: all codes, with scales at the edges
// of what each way of decoding takes. Rows 15 and 31 have a NaN.
TEST_F(SparseMlaSm90Model, OneKeyComesBackAsItDecodes) {
  constexpr int64_t kRows = 32, kPageSize = 16, kPages = kRows / kPageSize;
  for (const RowFormat format : {RowFormat::kV4, RowFormat::kV32}) {
    const bool is_v4 = format == RowFormat::kV4;
    const int64_t width = is_v4 ? 512 : 576, latent = is_v4 ? 448 : 512;
    const int64_t page_bytes = is_v4 ? 9792 : kPageSize * 656;
    std::vector<uint8_t> pool(static_cast<size_t>(kPages * page_bytes));
    std::vector<uint16_t> q(static_cast<size_t>(kRows * width)), out(kRows * 512);
    std::vector<int32_t> indices(kRows);
    std::vector<float> lse(kRows);
    const std::array<uint8_t, 8> v4_scales = {0, 1, 60, 127, 133, 134, 135, 240};
    const std::array<float, 8> v32_scales = {0.0f,     1e-40f, 3e-39f, 1.7e-3f,
                                             0.37193f, 2.0f,   300.7f, 1.3e30f};
    const auto scale_of = [&](int64_t t, int64_t tile) {
      const auto i = static_cast<size_t>((t + tile) % 8);
      return is_v4 ? ue8m0_to_float(v4_scales[i]) : v32_scales[i];
    };
    const auto code_of = [&](int64_t t, int64_t d) {
      const int64_t code = d == t % 17 ? 8 * t + 7 : (t * 31 + d * 7) % 256;
      return static_cast<uint8_t>((code & 0x7F) == 0x7F && d != t % 17 ? 0x7E : code);
    };
    for (int64_t t = 0; t < kRows; ++t) {
      indices[static_cast<size_t>(t)] = static_cast<int32_t>(t);
      uint8_t* const page = pool.data() + t / kPageSize * page_bytes;
      uint8_t* const row = page + t % kPageSize * (is_v4 ? 576 : 656);
      for (int64_t d = 0; d < latent; ++d) row[d] = code_of(t, d);
      for (int64_t d = 0; d < 64; ++d) {  // the rope channels, any bits but those of NaN
        const auto bits = static_cast<uint16_t>(t * 64 + d + 0x3F00);
        std::memcpy(row + (is_v4 ? 448 : 528) + 2 * d, &bits, 2);
      }
      for (int64_t i = 0; i < (is_v4 ? 7 : 4); ++i) {
        const float scale = scale_of(t, i);
        if (is_v4) {
          page[kPageSize * 576 + t % kPageSize * 8 + i] = v4_scales[static_cast<size_t>(t + i) % 8];
        } else {
          std::memcpy(row + 512 + 4 * i, &scale, 4);
        }
      }
    }
    SparseMlaProblem problem;
    problem.max_rows = kRows;
    problem.num_heads = 1;
    problem.head_dim_qk = width;
    problem.topk = 1;
    problem.softmax_scale = 1;
    problem.row_format = format;
    problem.page_size = kPageSize;
    SparseMlaTensors tensors;
    tensors.q = make_tensor(std::as_const(q).data(), DType::kBf16, {kRows, 1, width});
    tensors.kv = make_tensor(std::as_const(pool).data(), DType::kU8, {kPages, page_bytes});
    tensors.indices = make_tensor(std::as_const(indices).data(), DType::kI32, {kRows, 1});
    tensors.out = make_tensor(out.data(), DType::kBf16, {kRows, 1, 512});
    tensors.lse = make_tensor(lse.data(), DType::kF32, {kRows, 1});
    test::gpu::run_sparse_mla_sm90(problem, tensors);
    for (int64_t t = 0; t < kRows; ++t) {
      const bool is_nan = t % 16 == 15;
      EXPECT_EQ(std::isnan(lse[static_cast<size_t>(t)]), is_nan) << t;
      for (int64_t d = 0; d < latent; ++d) {
        const uint16_t actual = out[static_cast<size_t>(t * 512 + d)];
        if (is_nan) {
          ASSERT_TRUE(std::isnan(bf16_to_float({actual}))) << t << ", " << d;
          continue;
        }
        const float scale = scale_of(t, d / (is_v4 ? 64 : 128));
        float expected = bf16_to_float(bf16_from_float(e4m3_to_float(code_of(t, d)) * scale));
        ASSERT_EQ(bf16_to_float({actual}), expected) << t << ", " << d << ", scale " << scale;
      }
    }
  }
}

TEST_F(SparseMlaSm90Model, NanStaysInItsHead) {
  expect_nan_in_its_head({RowFormat::kBf16, 0, 90, 70});
}

}  // namespace
}  // namespace fovea
