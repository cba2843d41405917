#include "fovea/index_quantize.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "fovea/error.h"
#include "fovea/numeric.h"
#include "tests/support/compare.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<bf16_t> bf16s(const std::vector<float>& values) {
  std::vector<bf16_t> result;
  for (const float value : values) result.push_back(bf16_from_float(value));
  return result;
}

// Inputs and outputs of one call, owned.
struct Case {
  int64_t rows;
  Tensor q, k, norm_weight, norm_bias, head_gate, positions, cos_sin;
  Tensor q_fp8, q_scale, k_fp8, k_scale, head_weight;

  Case(const IndexQuantizeProblem& problem, uint64_t seed, int64_t max_pos = 50)
      : rows(problem.max_rows),
        q_fp8(DType::kU8, {rows, problem.num_heads, problem.head_dim}),
        q_scale(DType::kF32, {rows, problem.num_heads}),
        k_fp8(DType::kU8, {rows, problem.head_dim}),
        k_scale(DType::kF32, {rows}),
        head_weight(DType::kF32, {rows, problem.num_heads}) {
    test::Rng rng(seed);
    const int64_t heads = problem.num_heads, dim = problem.head_dim, rope = problem.rope_dim;
    q = Tensor::bf16({rows, heads, dim}, rng.bf16_normals(rows * heads * dim, 3.0f));
    k = Tensor::bf16({rows, dim}, rng.bf16_normals(rows * dim, 0.7f));
    norm_weight = Tensor::f32({dim}, rng.normals(dim));
    norm_bias = Tensor::f32({dim}, rng.normals(dim, 0.3f));
    head_gate = Tensor::f32({rows, heads}, rng.normals(rows * heads));
    std::vector<int32_t> at(static_cast<size_t>(rows));
    for (int32_t& position : at) position = static_cast<int32_t>(rng.integer(0, max_pos - 1));
    positions = Tensor::i32({rows}, at);
    std::vector<float> table;
    for (int64_t p = 0; p < max_pos; ++p) {
      for (int part = 0; part < 2; ++part) {
        for (int64_t i = 0; i < rope / 2; ++i) {
          const double angle =
              static_cast<double>(p) *
              std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(rope));
          table.push_back(static_cast<float>(part == 0 ? std::cos(angle) : std::sin(angle)));
        }
      }
    }
    cos_sin = Tensor::f32({max_pos, rope}, table);
  }

  IndexQuantizeTensors tensors() {
    return {q,       k,     norm_weight, norm_bias, head_gate, positions,
            cos_sin, q_fp8, q_scale,     k_fp8,     k_scale,   head_weight};
  }
  IndexQuantizeTensors q_tensors() {
    return {q, {}, {}, {}, head_gate, positions, cos_sin, q_fp8, q_scale, {}, {}, head_weight};
  }
  IndexQuantizeTensors k_tensors() {
    return {{}, k, norm_weight, norm_bias, {}, positions, cos_sin, {}, {}, k_fp8, k_scale, {}};
  }

  std::vector<uint8_t> outputs() const {
    std::vector<uint8_t> all;
    for (const Tensor* tensor : {&q_fp8, &q_scale, &k_fp8, &k_scale, &head_weight}) {
      all.insert(all.end(), tensor->bytes().begin(), tensor->bytes().end());
    }
    return all;
  }

  // Value of channel i of head row `row` of q (row = t * heads + h).
  float q_value(int64_t row, int64_t i, int64_t dim) const {
    return e4m3_to_float(q_fp8.data<uint8_t>()[row * dim + i]) * q_scale.data<float>()[row];
  }
  float k_value(int64_t row, int64_t i, int64_t dim) const {
    return e4m3_to_float(k_fp8.data<uint8_t>()[row * dim + i]) * k_scale.data<float>()[row];
  }
};

class IndexQuantizeTest : public test::TargetTest {
 protected:
  void run(const IndexQuantizeProblem& problem, const IndexQuantizeTensors& tensors,
           int threads = 1) {
    run_as(GetParam().implementation, problem, tensors, threads);
  }
  static void run_as(const std::string& implementation, const IndexQuantizeProblem& problem,
                     const IndexQuantizeTensors& tensors, int threads = 1) {
    const IndexQuantize plan =
        IndexQuantize::plan(problem, test::device_of({implementation}, threads), {implementation});
    HostBuffer buffer(plan.workspace_bytes());
    plan.run(tensors, buffer.workspace());
  }
};

// Implementations may differ in the last bf16 bit before quantisation, where an fp32 value falls
// on the other side of a rounding boundary: 2^-8 of the value. If that element is the largest of
// its row, the scale moves by as much (kPow2: by nothing, or by a factor of two). So a scale is
// within 2^-7, or off by two; codes count against the coarser grid, neighbours at most: 2^-3 of a
// normal code, 2^-9 of a subnormal one, and only a small share of them may differ at all.
void expect_row_close(const uint8_t* codes, float scale, const uint8_t* expected_codes,
                      float expected_scale, int64_t dim, int64_t* different) {
  const double ratio = static_cast<double>(scale) / static_cast<double>(expected_scale);
  EXPECT_TRUE(std::fabs(ratio - 1) <= 0x1p-7 || ratio == 2 || ratio == 0.5) << ratio;
  const double grid = std::max(scale, expected_scale);
  for (int64_t i = 0; i < dim; ++i) {
    const double value = static_cast<double>(e4m3_to_float(codes[i])) * static_cast<double>(scale);
    const double expected =
        static_cast<double>(e4m3_to_float(expected_codes[i])) * static_cast<double>(expected_scale);
    *different += value != expected ? 1 : 0;
    ASSERT_LE(std::fabs(value - expected),
              std::max(0x1p-9 * grid,
                       (0x1p-3 + 0x1p-7) * std::max(std::fabs(value), std::fabs(expected))))
        << "channel " << i << ": " << value << ", expected " << expected;
  }
}

void expect_close(const IndexQuantizeProblem& problem, const Case& actual, const Case& expected) {
  int64_t different = 0;
  const int64_t dim = problem.head_dim;
  for (int64_t row = 0; row < actual.rows * problem.num_heads; ++row) {
    expect_row_close(actual.q_fp8.data<uint8_t>() + row * dim, actual.q_scale.data<float>()[row],
                     expected.q_fp8.data<uint8_t>() + row * dim,
                     expected.q_scale.data<float>()[row], dim, &different);
    const double weight = expected.head_weight.data<float>()[row] *
                          static_cast<double>(actual.q_scale.data<float>()[row]);
    EXPECT_NEAR(actual.head_weight.data<float>()[row] *
                    static_cast<double>(expected.q_scale.data<float>()[row]),
                weight, 0x1p-21 * std::fabs(weight));
  }
  for (int64_t row = 0; row < actual.rows; ++row) {
    expect_row_close(actual.k_fp8.data<uint8_t>() + row * dim, actual.k_scale.data<float>()[row],
                     expected.k_fp8.data<uint8_t>() + row * dim,
                     expected.k_scale.data<float>()[row], dim, &different);
  }
  // Whole rows differ when their scale does; about one value in 2^12 crosses a boundary.
  EXPECT_LE(different, actual.rows * (problem.num_heads + 1) * dim / 50 + 2 * dim);
}

INSTANTIATE_TEST_SUITE_P(Targets, IndexQuantizeTest,
                         testing::ValuesIn(test::targets_of("index_quantize")), test::target_name);

// The scale by its definition.
float scale_of(float amax, ScaleMode mode) {
  const float scale = std::max(amax, 1e-4f) / 448.0f;
  if (mode == ScaleMode::kFp32) return scale;
  int exponent = 0;
  const float mantissa = std::frexp(scale, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
}

TEST_P(IndexQuantizeTest, CodesAndScalesOfUnrotatedQueriesAreExact) {
  // Largest magnitudes: zero, below the floor, the floor's neighbourhood, powers of two and their
  // neighbours, 448 and 450 times them, huge.
  const std::vector<float> peaks = {0.0f,   1e-30f, 9.9e-5f, 1.0e-4f, 1.01e-4f, 1.0f, 1.0078125f,
                                    448.0f, 450.0f, 896.0f,  900.0f,  3e38f,    7.0f, 0.875f};
  for (const ScaleMode mode : {ScaleMode::kFp32, ScaleMode::kPow2}) {
    for (const int64_t dim : {128, 100, 7, 1}) {
      const auto heads = static_cast<int64_t>(peaks.size());
      const IndexQuantizeProblem problem{2, heads, dim, 0, RopeStyle::kHalfSplit, false, mode};
      Case c(problem, 1);
      test::Rng rng(2);
      std::vector<bf16_t> values;
      for (int64_t row = 0; row < 2 * heads; ++row) {
        const float peak = peaks[static_cast<size_t>(row % heads)];
        for (int64_t i = 0; i < dim; ++i) {
          values.push_back(bf16_from_float(i == dim / 2 ? -peak : peak * rng.uniform(-1, 1)));
        }
      }
      c.q = Tensor::bf16({2, heads, dim}, values);
      run(problem, c.q_tensors(), 2);
      for (int64_t row = 0; row < 2 * heads; ++row) {
        float amax = 0;
        for (int64_t i = 0; i < dim; ++i) {
          amax =
              std::max(amax, std::fabs(bf16_to_float(values[static_cast<size_t>(row * dim + i)])));
        }
        const float scale = scale_of(amax, mode);
        ASSERT_EQ(c.q_scale.data<float>()[row], scale) << amax;
        for (int64_t i = 0; i < dim; ++i) {
          const float value = bf16_to_float(values[static_cast<size_t>(row * dim + i)]);
          ASSERT_EQ(e4m3_to_float(c.q_fp8.data<uint8_t>()[row * dim + i]),
                    e4m3_to_float(e4m3_from_float(value / scale)))
              << value << " / " << scale;
        }
      }
    }
  }
}

TEST_P(IndexQuantizeTest, RopeTurnsThePairsOfItsStyle) {
  // A quarter turn: (a, b) -> (-b, a); channels past rope_dim stay. Small integers are exact in
  // bf16 and, with a power-of-two scale, in e4m3.
  for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
    const IndexQuantizeProblem problem{1, 1, 8, 6, style, false, ScaleMode::kPow2};
    Case c(problem, 3, 2);
    c.q = Tensor::bf16({1, 1, 8}, bf16s({1, 2, 3, 4, 5, 6, 7, 8}));
    c.cos_sin = Tensor::f32({2, 6}, {9, 9, 9, 9, 9, 9, 0, 0, 0, 1, 1, 1});
    c.positions = Tensor::i32({1}, {1});
    run(problem, c.q_tensors());
    std::vector<float> turned;
    for (int64_t i = 0; i < 8; ++i) turned.push_back(c.q_value(0, i, 8));
    const std::vector<float> expected = style == RopeStyle::kHalfSplit
                                            ? std::vector<float>{-4, -5, -6, 1, 2, 3, 7, 8}
                                            : std::vector<float>{-2, 1, -4, 3, -6, 5, 7, 8};
    EXPECT_EQ(turned, expected);
  }
}

TEST_P(IndexQuantizeTest, PositionsAreClampedToTheTable) {
  const IndexQuantizeProblem problem{4, 2, 32, 16};
  Case c(problem, 4, 5), clamped(problem, 4, 5);
  c.positions = Tensor::i32(
      {4}, {-1, std::numeric_limits<int32_t>::min(), 5, std::numeric_limits<int32_t>::max()});
  clamped.positions = Tensor::i32({4}, {0, 0, 4, 4});
  run(problem, c.tensors());
  run(problem, clamped.tensors());
  EXPECT_EQ(c.outputs(), clamped.outputs());
}

TEST_P(IndexQuantizeTest, HadamardIsSylvestersInNaturalOrder) {
  // 8 e_j of width 64 gives (-1)^popcount(i & j): exact everywhere.
  const IndexQuantizeProblem problem{1, 64, 64, 0, RopeStyle::kHalfSplit, true, ScaleMode::kPow2};
  Case c(problem, 5);
  std::vector<float> values(64 * 64, 0.0f);
  for (size_t j = 0; j < 64; ++j) values[j * 64 + j] = 8;
  c.q = Tensor::bf16({1, 64, 64}, bf16s(values));
  run(problem, c.q_tensors());
  for (int64_t j = 0; j < 64; ++j) {
    for (int64_t i = 0; i < 64; ++i) {
      ASSERT_EQ(c.q_value(j, i, 64), std::popcount(static_cast<uint64_t>(i & j)) % 2 == 0 ? 1 : -1);
    }
  }
}

TEST_P(IndexQuantizeTest, HadamardOnBothSidesLeavesScoresUnchanged) {
  // Sums of few basis vectors stay small multiples of a power of two, so quantisation is exact.
  const IndexQuantizeProblem plain{1, 2, 256, 0, RopeStyle::kHalfSplit, false, ScaleMode::kPow2};
  IndexQuantizeProblem rotated = plain;
  rotated.hadamard = true;
  test::Rng rng(6);
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<float> values(512, 0.0f);
    for (size_t side = 0; side < 2; ++side) {
      const size_t shared = static_cast<size_t>(trial);
      values[side * 256 + shared] = 2;
      for (int i = 0; i < 4; ++i) {
        values[side * 256 + static_cast<size_t>(rng.integer(0, 255))] = rng.integer(0, 1) ? 2 : -2;
      }
    }
    double dots[2];
    for (const bool hadamard : {false, true}) {
      Case c(plain, 7);
      c.q = Tensor::bf16({1, 2, 256}, bf16s(values));
      run(hadamard ? rotated : plain, c.q_tensors());
      double dot = 0;
      for (int64_t i = 0; i < 256; ++i) {
        dot +=
            static_cast<double>(c.q_value(0, i, 256)) * static_cast<double>(c.q_value(1, i, 256));
      }
      dots[hadamard] = dot;
    }
    EXPECT_NEAR(dots[0], dots[1], 1e-5 * std::fabs(dots[0])) << trial;
  }
}

TEST_P(IndexQuantizeTest, KeysAreLayerNormedWithMeanWeightAndBias) {
  // +-2 around any mean: normal values +-1 (to 1e-6); weight 2, bias 1: 3 and -1. An RMS norm would
  // see the mean.
  const IndexQuantizeProblem problem{3, 1, 16, 0, RopeStyle::kHalfSplit, false, ScaleMode::kPow2};
  Case c(problem, 8);
  std::vector<float> values;
  for (const float mean : {0.0f, 5.0f, -40.0f}) {
    for (int i = 0; i < 16; ++i) values.push_back(mean + (i % 2 == 0 ? 2.0f : -2.0f));
  }
  c.k = Tensor::bf16({3, 16}, bf16s(values));
  c.norm_weight = Tensor::f32({16}, std::vector<float>(16, 2.0f));
  c.norm_bias = Tensor::f32({16}, std::vector<float>(16, 1.0f));
  run(problem, c.k_tensors());
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(c.k_value(t, i, 16), i % 2 == 0 ? 3.0f : -1.0f);
  }
  // A constant row has variance 0: its normal values are 0, not 0/0.
  c.k = Tensor::bf16({3, 16}, bf16s(std::vector<float>(48, 7.0f)));
  run(problem, c.k_tensors());
  for (int64_t t = 0; t < 3; ++t) EXPECT_EQ(c.k_value(t, 3, 16), 1.0f);
}

TEST_P(IndexQuantizeTest, AgreesWithTheReferenceForAnyThreadCount) {
  for (const auto& [dim, rope, hadamard] :
       std::vector<std::tuple<int64_t, int64_t, bool>>{{128, 64, true},
                                                       {128, 64, false},
                                                       {128, 0, true},
                                                       {128, 128, true},
                                                       {64, 20, true},
                                                       {100, 36, false},
                                                       {7, 4, false},
                                                       {2, 2, true},
                                                       {1, 0, true},
                                                       {512, 64, true}}) {
    for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
      for (const ScaleMode mode : {ScaleMode::kFp32, ScaleMode::kPow2}) {
        const IndexQuantizeProblem problem{3, 5, dim, rope, style, hadamard, mode};
        Case expected(problem, 9), c(problem, 9);
        run_as("ref", problem, expected.tensors());
        run(problem, c.tensors(), 1);
        expect_close(problem, c, expected);
        for (const int threads : {2, 3}) {
          Case again(problem, 9);
          run(problem, again.tensors(), threads);
          EXPECT_EQ(again.outputs(), c.outputs());
        }
      }
    }
  }
}

TEST_P(IndexQuantizeTest, HeadWeightsFoldTheScaleIn) {
  const IndexQuantizeProblem problem{2, 64, 128};
  Case c(problem, 10);
  run(problem, c.tensors());
  for (size_t i = 0; i < 128; ++i) {
    const double expected = static_cast<double>(c.head_gate.data<float>()[i]) /
                            std::sqrt(64.0 * 128.0) *
                            static_cast<double>(c.q_scale.data<float>()[i]);
    EXPECT_NEAR(c.head_weight.data<float>()[i], expected, 4 * 0x1p-24 * std::fabs(expected));
  }
}

TEST_P(IndexQuantizeTest, NonFiniteElementsFollowTheCodecRules) {
  // NaN becomes the NaN code, infinity the largest code; neither enters the scale.
  const IndexQuantizeProblem problem{1, 3, 16, 0, RopeStyle::kHalfSplit, false, ScaleMode::kFp32};
  Case c(problem, 11);
  std::vector<float> values(48, 0.5f);
  values[3] = std::nanf("");
  values[16 + 5] = kInf;
  values[16 + 6] = -kInf;
  std::fill(values.begin() + 32, values.end(), std::nanf(""));
  c.q = Tensor::bf16({1, 3, 16}, bf16s(values));
  run(problem, c.tensors());
  const uint8_t* codes = c.q_fp8.data<uint8_t>();
  for (int64_t i = 0; i < 16; ++i) {
    EXPECT_EQ(codes[i], i == 3 ? 0x7F : 0x7E);
    EXPECT_EQ(codes[16 + i], i == 6 ? 0xFE : 0x7E);
    EXPECT_EQ(codes[32 + i], 0x7F);
  }
  EXPECT_EQ(c.q_scale.data<float>()[0], 0.5f / 448.0f);
  EXPECT_EQ(c.q_scale.data<float>()[1], 0.5f / 448.0f);
  EXPECT_EQ(c.q_scale.data<float>()[2], 1e-4f / 448.0f);
}

TEST_P(IndexQuantizeTest, ANanRowStaysInItsRow) {
  const IndexQuantizeProblem problem{5, 4, 128, 64, RopeStyle::kHalfSplit, true};
  Case clean(problem, 12), c(problem, 12);
  run(problem, clean.tensors());
  c.k.data<bf16_t>()[2 * 128 + 17] = {0x7FFF};
  c.q.data<bf16_t>()[(3 * 4 + 1) * 128 + 90] = {0x7FFF};
  run(problem, c.tensors(), 2);
  for (int64_t i = 0; i < 128; ++i) {
    EXPECT_EQ(c.k_fp8.data<uint8_t>()[2 * 128 + i] & 0x7F, 0x7F);
    EXPECT_EQ(c.q_fp8.data<uint8_t>()[(3 * 4 + 1) * 128 + i] & 0x7F, 0x7F);  // rotation spreads it
  }
  for (int64_t row = 0; row < 20; ++row) {
    if (row == 13) continue;
    EXPECT_EQ(std::memcmp(c.q_fp8.data<uint8_t>() + row * 128,
                          clean.q_fp8.data<uint8_t>() + row * 128, 128),
              0);
  }
  for (int64_t t = 0; t < 5; ++t) {
    if (t == 2) continue;
    EXPECT_EQ(
        std::memcmp(c.k_fp8.data<uint8_t>() + t * 128, clean.k_fp8.data<uint8_t>() + t * 128, 128),
        0);
  }
}

TEST_P(IndexQuantizeTest, QueriesAndKeysCanBeLeftOut) {
  const IndexQuantizeProblem problem{6, 4, 128, 64, RopeStyle::kHalfSplit, true};
  Case both(problem, 13), apart(problem, 13);
  run(problem, both.tensors());
  run(problem, apart.q_tensors());
  run(problem, apart.k_tensors());
  EXPECT_EQ(apart.outputs(), both.outputs());
}

TEST_P(IndexQuantizeTest, ARowDoesNotDependOnItsBatch) {
  const IndexQuantizeProblem problem{40, 3, 128, 64, RopeStyle::kInterleaved, true};
  Case c(problem, 14);
  run(problem, c.tensors(), 3);
  for (const int64_t t : {0, 7, 39}) {
    Case one(problem, 14);
    IndexQuantizeTensors tensors = one.tensors();
    for (ConstTensorView* view : {&tensors.q, &tensors.k, &tensors.head_gate, &tensors.positions}) {
      *view = slice_rows(*view, t, t + 1);
    }
    for (TensorView* view : {&tensors.q_fp8, &tensors.q_scale, &tensors.k_fp8, &tensors.k_scale,
                             &tensors.head_weight}) {
      *view = slice_rows(*view, t, t + 1);
    }
    run(problem, tensors);
    EXPECT_EQ(
        std::memcmp(one.q_fp8.data<uint8_t>() + t * 384, c.q_fp8.data<uint8_t>() + t * 384, 384),
        0);
    EXPECT_EQ(
        std::memcmp(one.k_fp8.data<uint8_t>() + t * 128, c.k_fp8.data<uint8_t>() + t * 128, 128),
        0);
    EXPECT_EQ(one.k_scale.data<float>()[t], c.k_scale.data<float>()[t]);
  }
}

TEST_P(IndexQuantizeTest, HonoursStridesAndReadsNothingOutside) {
  for (const int64_t dim : {128, 14}) {
    const IndexQuantizeProblem problem{3, 2, dim, 8};
    Case packed(problem, 15), c(problem, 15);
    run(problem, packed.tensors());
    // q, k and q_fp8 as slices of something wider, each ending at an unreadable page.
    const int64_t pitch = dim + 3;
    test::GuardedMemory q(static_cast<size_t>((5 * pitch + dim) * 2));
    test::GuardedMemory k(static_cast<size_t>((2 * pitch + dim) * 2));
    test::GuardedMemory q_fp8(static_cast<size_t>(5 * pitch + dim));
    for (int64_t row = 0; row < 6; ++row) {
      std::memcpy(static_cast<bf16_t*>(q.data()) + row * pitch, c.q.data<bf16_t>() + row * dim,
                  static_cast<size_t>(dim * 2));
    }
    for (int64_t row = 0; row < 3; ++row) {
      std::memcpy(static_cast<bf16_t*>(k.data()) + row * pitch, c.k.data<bf16_t>() + row * dim,
                  static_cast<size_t>(dim * 2));
    }
    IndexQuantizeTensors tensors = c.tensors();
    tensors.q.data = q.data();
    tensors.q.stride = {2 * pitch, pitch, 1};
    tensors.k.data = k.data();
    tensors.k.stride = {pitch, 1};
    tensors.q_fp8.data = q_fp8.data();
    tensors.q_fp8.stride = {2 * pitch, pitch, 1};
    run(problem, tensors, 2);
    for (int64_t row = 0; row < 6; ++row) {
      EXPECT_EQ(std::memcmp(static_cast<uint8_t*>(q_fp8.data()) + row * pitch,
                            packed.q_fp8.data<uint8_t>() + row * dim, static_cast<size_t>(dim)),
                0);
    }
    EXPECT_EQ(c.k_fp8.bytes(), packed.k_fp8.bytes());
    EXPECT_EQ(c.head_weight.bytes(), packed.head_weight.bytes());
  }
}

TEST_P(IndexQuantizeTest, HasTheSameBitsOnEveryInstructionSet) {
  for (const int64_t dim : {128, 64, 8, 2}) {
    for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
      const IndexQuantizeProblem problem{6, 3, dim, dim / 2 / 2 * 2, style, true};
      Case c(problem, 18), baseline(problem, 18);
      run(problem, c.tensors());
      limit_cpu_isa(CpuIsa::kBaseline);
      run(problem, baseline.tensors());
      limit_cpu_isa(GetParam().isa);
      EXPECT_EQ(c.outputs(), baseline.outputs()) << dim;
    }
  }
}

TEST_P(IndexQuantizeTest, DoesNotAllocateInRun) {
  const IndexQuantizeProblem problem{70, 4, 128, 64, RopeStyle::kHalfSplit, true};
  Case c(problem, 16);
  const IndexQuantizeTensors tensors = c.tensors();
  for (const int threads : {1, 2, 3}) {
    const IndexQuantize plan =
        IndexQuantize::plan(problem, GetParam().device(threads), GetParam().options());
    HostBuffer buffer(plan.workspace_bytes());
    plan.run(tensors, buffer.workspace());
    const test::AllocationCounter counter;
    plan.run(tensors, buffer.workspace());
    EXPECT_EQ(counter.count(), 0);
  }
}

TEST(IndexQuantize, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  EXPECT_THROW(IndexQuantize::plan({1, 0, 128}, cpu), Error);
  EXPECT_THROW(IndexQuantize::plan({1, 1, 0, 0}, cpu), Error);
  EXPECT_THROW(IndexQuantize::plan({1, 1, 128, 63}, cpu), Error);
  EXPECT_THROW(IndexQuantize::plan({1, 1, 128, 130}, cpu), Error);
  EXPECT_THROW(IndexQuantize::plan({1, 1, 100, 64, RopeStyle::kHalfSplit, true}, cpu), Error);
  const IndexQuantizeProblem problem{3, 2, 128, 64};
  const IndexQuantize plan = IndexQuantize::plan(problem, cpu);
  HostBuffer buffer(plan.workspace_bytes());
  Case c(problem, 17);
  EXPECT_NO_THROW(plan.run(c.tensors(), buffer.workspace()));
  const auto refused = [&](auto change) {
    IndexQuantizeTensors tensors = c.tensors();
    change(tensors);
    EXPECT_THROW(plan.run(tensors, buffer.workspace()), Error);
  };
  refused([](IndexQuantizeTensors& t) { t.q = {}; });
  refused([](IndexQuantizeTensors& t) { t.norm_bias = {}; });
  refused([](IndexQuantizeTensors& t) { t.cos_sin.shape[1] = 32; });
  refused([](IndexQuantizeTensors& t) { t.cos_sin.shape[0] = 0; });
  refused([](IndexQuantizeTensors& t) { t.k_scale.shape[0] = 2; });
  refused([](IndexQuantizeTensors& t) { t.q.dtype = DType::kF32; });
  refused([](IndexQuantizeTensors& t) { t = IndexQuantizeTensors(); });
}

}  // namespace
}  // namespace fovea
