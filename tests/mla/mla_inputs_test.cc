#include "fovea/mla_inputs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "fovea/error.h"
#include "fovea/numeric.h"
#include "tests/mla/sparse_mla_case.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::StridedTensor;
using testing::HasSubstr;
constexpr float kInf = std::numeric_limits<float>::infinity();

template <class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// A bf16 tensor with wide strides between guard pages; everything between its rows is NaN.
StridedTensor normals(std::vector<int64_t> shape, test::Rng& rng, float scale = 1) {
  std::vector<int64_t> pads(shape.size(), 3);
  pads.front() = 0;
  pads.back() = 37;
  StridedTensor tensor(DType::kBf16, shape, pads, 0xFF);
  const int64_t width = shape.back();
  const int64_t heads = shape.size() == 3 ? shape[1] : 1;
  for (int64_t row = 0; row < shape[0]; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      bf16_t* to =
          shape.size() == 3 ? &tensor.at<bf16_t>({row, h, 0}) : &tensor.at<bf16_t>({row, 0});
      const std::vector<float> values = rng.normals(width, scale);
      for (int64_t d = 0; d < width; ++d) to[d] = bf16_from_float(values[static_cast<size_t>(d)]);
    }
  }
  return tensor;
}

class ConcatAbsorbedQTest : public test::TargetTest {
 protected:
  void run(const ConcatAbsorbedQProblem& problem, const ConcatAbsorbedQTensors& tensors,
           int threads) {
    const ConcatAbsorbedQ plan =
        ConcatAbsorbedQ::plan(problem, GetParam().device(threads), GetParam().options());
    EXPECT_EQ(plan.workspace_bytes(), 0u);
    plan.run(tensors, Workspace{});
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, ConcatAbsorbedQTest,
                         testing::ValuesIn(test::targets_of("concat_absorbed_q")),
                         test::target_name);

TEST_P(ConcatAbsorbedQTest, CopiesEveryBitOfStridedParts) {
  test::Rng rng(1);
  for (const auto& [rows, heads] :
       {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {70, 16}, {2, 128}}) {
    StridedTensor nope = normals({rows, heads, 512}, rng), rope = normals({rows, heads, 64}, rng);
    nope.at<bf16_t>({rows - 1, heads - 1, 511}) =
        bf16_t{0x7FA1};  // a signalling NaN keeps its bits
    for (const int threads : {1, 3}) {
      StridedTensor q(DType::kBf16, {rows, heads, 576}, {0, 2, 11}, 0xAB);
      run({rows + 4, heads}, {nope.view(), rope.view(), q.view()}, threads);
      EXPECT_TRUE(q.gaps_untouched());
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t d = 0; d < 576; ++d) {
            const bf16_t expected =
                d < 512 ? nope.at<bf16_t>({t, h, d}) : rope.at<bf16_t>({t, h, d - 512});
            ASSERT_EQ(q.at<bf16_t>({t, h, d}).bits, expected.bits) << t << ", " << h << ", " << d;
          }
        }
      }
    }
  }
}

TEST_P(ConcatAbsorbedQTest, NoRowsAreFine) {
  test::Rng rng(2);
  run({0, 4},
      {normals({0, 4, 512}, rng).view(), normals({0, 4, 64}, rng).view(),
       StridedTensor(DType::kBf16, {0, 4, 576}, {0, 0, 0}, 0).view()},
      2);
}

TEST(ConcatAbsorbedQ, RefusesWhatDoesNotFitThePlan) {
  const Device cpu = Device::cpu(1);
  EXPECT_THAT(message_of([&] { ConcatAbsorbedQ::plan({-1, 1}, cpu); }), HasSubstr("max_rows = -1"));
  EXPECT_THAT(message_of([&] { ConcatAbsorbedQ::plan({1, 0}, cpu); }), HasSubstr("num_heads = 0"));
  const ConcatAbsorbedQ plan = ConcatAbsorbedQ::plan({2, 3}, cpu);
  test::Rng rng(3);
  const StridedTensor nope = normals({2, 3, 512}, rng), rope = normals({2, 3, 64}, rng);
  const StridedTensor q(DType::kBf16, {2, 3, 576}, {0, 0, 0}, 0x55);
  const auto refusal = [&](auto change) {
    ConcatAbsorbedQTensors tensors{nope.view(), rope.view(), q.view()};
    change(tensors);
    const std::string text = message_of([&] { plan.run(tensors, Workspace{}); });
    EXPECT_EQ(q.at<uint8_t>({0, 0, 0}), 0x55);
    return text;
  };
  using T = ConcatAbsorbedQTensors;
  EXPECT_THAT(refusal([](T& t) { t.q_nope = {}; }),
              HasSubstr("concat_absorbed_q: q_nope is missing"));
  EXPECT_THAT(refusal([&](T& t) { t.q_rope = nope.view(); }), HasSubstr("q_rope"));
  EXPECT_THAT(refusal([&](T& t) { t.q_rope.shape[0] = 1; }), HasSubstr("q_rope = bf16 [1, 3, 64]"));
  EXPECT_THAT(refusal([&](T& t) { t.q.shape[2] = 575; }), HasSubstr("q = bf16 [2, 3, 575]"));
  EXPECT_THAT(refusal([&](T& t) { t.q_nope.stride[2] = 2; }), HasSubstr("q_nope"));
  EXPECT_THAT(refusal([](T& t) { t.q_nope.shape[0] = t.q_rope.shape[0] = t.q.shape[0] = 3; }),
              HasSubstr("q_nope.shape[0] = 3"));
}

// One call of mla_rope_quantize with strided, guarded tensors.
struct RopeCase {
  int64_t rows, heads;
  StridedTensor q_nope, q_rope, k_nope, k_rope, positions, cos_sin, q_fp8, k_fp8;

  RopeCase(int64_t rows_in, int64_t heads_in, uint64_t seed, float magnitude = 1)
      : rows(rows_in), heads(heads_in) {
    test::Rng rng(seed);
    constexpr int64_t kPositions = 40;
    q_nope = normals({rows, heads, 512}, rng, magnitude);
    q_rope = normals({rows, heads, 64}, rng, magnitude);
    k_nope = normals({rows, 512}, rng, magnitude);
    k_rope = normals({rows, 64}, rng, magnitude);
    positions = StridedTensor(DType::kI32, {rows}, {0}, 0);
    for (int64_t t = 0; t < rows; ++t)
      positions.at<int32_t>({t}) = static_cast<int32_t>(rng.integer(0, kPositions - 1));
    cos_sin = StridedTensor(DType::kF32, {kPositions, 64}, {0, 5}, 0xFF);
    for (int64_t p = 0; p < kPositions; ++p) {
      for (int64_t i = 0; i < 32; ++i) {
        const double angle = static_cast<double>(p) * std::pow(1e4, -static_cast<double>(i) / 32);
        cos_sin.at<float>({p, i}) = static_cast<float>(std::cos(angle));
        cos_sin.at<float>({p, 32 + i}) = static_cast<float>(std::sin(angle));
      }
    }
    clear();
  }

  void clear() {
    q_fp8 = StridedTensor(DType::kU8, {rows, heads, 576}, {0, 1, 7}, 0xAB);
    k_fp8 = StridedTensor(DType::kU8, {rows, 576}, {0, 13}, 0xAB);
  }

  MlaRopeQuantizeTensors tensors() const {
    return {q_nope.view(),    q_rope.view(),  k_nope.view(), k_rope.view(),
            positions.view(), cos_sin.view(), q_fp8.view(),  k_fp8.view()};
  }

  std::vector<double> codes() const {
    std::vector<double> all = test::to_doubles(q_fp8.view());
    const std::vector<double> k = test::to_doubles(k_fp8.view());
    all.insert(all.end(), k.begin(), k.end());
    return all;
  }
};

class MlaRopeQuantizeTest : public test::TargetTest {
 protected:
  void run(const MlaRopeQuantizeProblem& problem, const MlaRopeQuantizeTensors& tensors,
           int threads = 1) {
    run_as(GetParam().implementation, problem, tensors, threads);
  }
  static void run_as(const std::string& implementation, const MlaRopeQuantizeProblem& problem,
                     const MlaRopeQuantizeTensors& tensors, int threads = 1) {
    MlaRopeQuantize::plan(problem, test::device_of({implementation}, threads), {implementation})
        .run(tensors, Workspace{});
  }
  static MlaRopeQuantizeProblem problem_of(const RopeCase& c, RopeStyle style, float q_scale = 1,
                                           float k_scale = 1) {
    return {c.rows, c.heads, style, q_scale, k_scale};
  }
  // Codes against the formula in long double: a code is one of the two neighbours at most where the
  // fp32 value lies on the other side of a boundary, and the exact one nearly always.
  static void expect_formula(const RopeCase& c, const MlaRopeQuantizeProblem& problem) {
    int64_t different = 0;
    const auto check = [&](const bf16_t* nope, const bf16_t* rope, const float* cos_sin,
                           float scale, const uint8_t* codes) {
      for (int64_t d = 0; d < 576; ++d) {
        long double x;
        if (d < 512) {
          x = bf16_to_float(nope[d]);
        } else {
          const bool half = problem.rope_style == RopeStyle::kHalfSplit;
          const int64_t i = d - 512;
          const int64_t pair = half ? i % 32 : i / 2;
          const long double a = bf16_to_float(rope[half ? pair : 2 * pair]);
          const long double b = bf16_to_float(rope[half ? pair + 32 : 2 * pair + 1]);
          const long double cosine = cos_sin[pair], sine = cos_sin[32 + pair];
          const bool first = half ? i < 32 : i % 2 == 0;
          x = first ? a * cosine - b * sine : b * cosine + a * sine;
        }
        const auto quotient = static_cast<float>(x / scale);
        const uint8_t expected = e4m3_from_float(quotient);
        if (codes[d] == expected) continue;
        ++different;
        ASSERT_GE(d, 512);  // no rope: the same quotient
        const float value = e4m3_to_float(codes[d]);
        ASSERT_LE(std::fabs(value - quotient), 0.0626f * std::fabs(quotient) + 0x1p-9f) << d;
      }
    };
    for (int64_t t = 0; t < c.rows; ++t) {
      const float* angles = &c.cos_sin.at<float>({c.positions.at<int32_t>({t}), 0});
      for (int64_t h = 0; h < c.heads; ++h) {
        check(&c.q_nope.at<bf16_t>({t, h, 0}), &c.q_rope.at<bf16_t>({t, h, 0}), angles,
              problem.q_scale, &c.q_fp8.at<uint8_t>({t, h, 0}));
      }
      check(&c.k_nope.at<bf16_t>({t, 0}), &c.k_rope.at<bf16_t>({t, 0}), angles, problem.k_scale,
            &c.k_fp8.at<uint8_t>({t, 0}));
    }
    EXPECT_LE(different, c.rows * (c.heads + 1) / 10 + 2);
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MlaRopeQuantizeTest,
                         testing::ValuesIn(test::targets_of("mla_rope_quantize")),
                         test::target_name);

TEST_P(MlaRopeQuantizeTest, FollowsTheFormulaForBothStylesAndAnyScales) {
  uint64_t seed = 0;
  for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
    for (const float q_scale : {0.5f, 2.0f, 0.013f, 1.0f}) {
      for (const float k_scale : {0.5f, 2.0f, 0.7f}) {
        RopeCase c(5, 3, ++seed, 4);
        run(problem_of(c, style, q_scale, k_scale), c.tensors());
        expect_formula(c, problem_of(c, style, q_scale, k_scale));
        EXPECT_TRUE(c.q_fp8.gaps_untouched() && c.k_fp8.gaps_untouched());
      }
    }
  }
}

TEST_P(MlaRopeQuantizeTest, CodesEqualThoseOfTheReferenceForAnyThreads) {
  for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
    for (const int64_t heads : {1, 7, 128}) {
      RopeCase c(heads == 1 ? 300 : 9, heads, static_cast<uint64_t>(heads), 30);
      const MlaRopeQuantizeProblem problem = problem_of(c, style, 0.37f, 2.0f);
      run_as("ref", problem, c.tensors());
      const std::vector<double> expected = c.codes();
      for (const int threads : {1, 2, 5}) {
        c.clear();
        run(problem, c.tensors(), threads);
        EXPECT_EQ(c.codes(), expected) << heads << " heads, " << threads << " threads";
      }
    }
  }
}

TEST_P(MlaRopeQuantizeTest, TurnsPairsOfTheStyleByTheAngleOfTheirPosition) {
  // cos 0, sin 1: (a, b) <- (-b, a). Channel i of the rope part holds i + 1.
  for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
    RopeCase c(1, 1, 4);
    c.positions.at<int32_t>({0}) = 7;
    for (int64_t i = 0; i < 32; ++i) {
      c.cos_sin.at<float>({7, i}) = 0;
      c.cos_sin.at<float>({7, 32 + i}) = 1;
    }
    for (int64_t i = 0; i < 64; ++i)
      c.k_rope.at<bf16_t>({0, i}) = bf16_from_float(static_cast<float>(i % 8 + 1));
    run(problem_of(c, style, 1, 0.5f), c.tensors());
    for (int64_t i = 0; i < 64; ++i) {
      const bool half = style == RopeStyle::kHalfSplit;
      const bool first = half ? i < 32 : i % 2 == 0;
      const int64_t partner = half ? (i + 32) % 64 : i ^ 1;
      const auto value = static_cast<float>(partner % 8 + 1) * (first ? -2.0f : 2.0f);
      EXPECT_EQ(e4m3_to_float(c.k_fp8.at<uint8_t>({0, 512 + i})), value) << i;
    }
  }
}

TEST_P(MlaRopeQuantizeTest, HostileValuesSaturateAndNanStaysInItsChannels) {
  for (const RopeStyle style : {RopeStyle::kHalfSplit, RopeStyle::kInterleaved}) {
    RopeCase c(2, 3, 6);
    run(problem_of(c, style, 0.5f, 2), c.tensors());
    const std::vector<double> clean = c.codes();
    const auto at = [&](int64_t d) -> bf16_t& { return c.q_nope.at<bf16_t>({1, 1, d}); };
    at(0) = bf16_from_float(kInf);
    at(1) = bf16_from_float(-kInf);
    at(2) = bf16_from_float(std::nanf(""));
    at(3) = bf16_from_float(-std::nanf(""));
    at(4) = bf16_from_float(1e30f);
    at(511) = bf16_from_float(-1e30f);
    at(100) = bf16_t{0x8000};
    c.q_rope.at<bf16_t>({1, 1, 10}) = bf16_from_float(std::nanf(""));
    c.q_rope.at<bf16_t>({1, 1, 20}) = bf16_from_float(1e30f);
    c.q_rope.at<bf16_t>({1, 1, 52}) = bf16_from_float(1e30f);
    c.q_rope.at<bf16_t>({1, 1, 30}) = bf16_from_float(kInf);
    c.clear();
    run(problem_of(c, style, 0.5f, 2), c.tensors());
    const uint8_t* codes = &c.q_fp8.at<uint8_t>({1, 1, 0});
    const uint8_t expected[] = {0x7E, 0xFE, 0x7F, 0x7F, 0x7E};
    for (int64_t d = 0; d < 5; ++d) EXPECT_EQ(codes[d], expected[d]) << d;
    EXPECT_EQ(codes[511], 0xFE);
    EXPECT_EQ(codes[100], 0x80);
    const bool half = style == RopeStyle::kHalfSplit;
    for (int64_t i = 0; i < 64; ++i) {
      const bool touched = half ? i % 32 == 10 : i / 2 == 5;
      const bool infinite = half ? i % 32 == 30 : i / 2 == 15;
      if (infinite) continue;
      EXPECT_EQ((codes[512 + i] & 0x7F) == 0x7F, touched) << i;
    }
    // No other row has changed.
    const std::vector<double> dirty = c.codes();
    for (size_t i = 0; i < clean.size(); ++i) {
      if (i / 576 == 4) continue;
      ASSERT_EQ(dirty[i], clean[i]) << i;
    }
    run_as("ref", problem_of(c, style, 0.5f, 2), c.tensors());
    EXPECT_EQ(c.codes(), dirty);
  }
}

TEST_P(MlaRopeQuantizeTest, PositionsOutsideTheTableAreClamped) {
  RopeCase c(4, 2, 8);
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t d = 0; d < 64; ++d) c.k_rope.at<bf16_t>({t, d}) = c.k_rope.at<bf16_t>({0, d});
  }
  const int32_t positions[] = {INT_MIN, 0, INT_MAX, 39};
  for (int64_t t = 0; t < 4; ++t) c.positions.at<int32_t>({t}) = positions[t];
  run(problem_of(c, RopeStyle::kInterleaved), c.tensors());
  for (int64_t d = 512; d < 576; ++d) {
    EXPECT_EQ(c.k_fp8.at<uint8_t>({0, d}), c.k_fp8.at<uint8_t>({1, d}));
    EXPECT_EQ(c.k_fp8.at<uint8_t>({2, d}), c.k_fp8.at<uint8_t>({3, d}));
  }
}

TEST_P(MlaRopeQuantizeTest, EitherHalfMayBeAbsent) {
  RopeCase c(6, 5, 9);
  const MlaRopeQuantizeProblem problem = problem_of(c, RopeStyle::kInterleaved, 2, 0.5f);
  run(problem, c.tensors());
  const std::vector<double> both = c.codes();
  c.clear();
  MlaRopeQuantizeTensors q_only = c.tensors(), k_only = c.tensors();
  q_only.k_nope = q_only.k_rope = {};
  q_only.k_fp8 = {};
  k_only.q_nope = k_only.q_rope = {};
  k_only.q_fp8 = {};
  run(problem, q_only, 2);
  EXPECT_EQ(c.k_fp8.at<uint8_t>({0, 0}), 0xAB);
  run(problem, k_only, 2);
  EXPECT_EQ(c.codes(), both);
}

TEST_P(MlaRopeQuantizeTest, NoRowsNeedNoTable) {
  const auto none = [](DType dtype, std::vector<int64_t> shape) {
    return StridedTensor(dtype, shape, std::vector<int64_t>(shape.size(), 0), 0);
  };
  const StridedTensor nope = none(DType::kBf16, {0, 512}), rope = none(DType::kBf16, {0, 64});
  const StridedTensor positions = none(DType::kI32, {0}), table = none(DType::kF32, {0, 64});
  const StridedTensor codes = none(DType::kU8, {0, 576});
  MlaRopeQuantizeTensors tensors;
  tensors.k_nope = nope.view();
  tensors.k_rope = rope.view();
  tensors.positions = positions.view();
  tensors.cos_sin = table.view();
  tensors.k_fp8 = codes.view();
  run({4, 1}, tensors);
}

TEST(MlaRopeQuantize, RefusesWhatDoesNotFitThePlan) {
  const Device cpu = Device::cpu(1);
  const auto plan_refusal = [&](auto change) {
    MlaRopeQuantizeProblem problem{2, 3};
    change(problem);
    return message_of([&] { MlaRopeQuantize::plan(problem, cpu); });
  };
  using P = MlaRopeQuantizeProblem;
  EXPECT_THAT(plan_refusal([](P& p) { p.max_rows = -1; }), HasSubstr("max_rows = -1"));
  EXPECT_THAT(plan_refusal([](P& p) { p.num_heads = 0; }), HasSubstr("num_heads = 0"));
  for (const float scale : {0.0f, -1.0f, kInf, std::nanf("")}) {
    EXPECT_THAT(plan_refusal([&](P& p) { p.q_scale = scale; }), HasSubstr("q_scale"));
    EXPECT_THAT(plan_refusal([&](P& p) { p.k_scale = scale; }), HasSubstr("k_scale"));
  }
  const MlaRopeQuantize plan = MlaRopeQuantize::plan({2, 3}, cpu);
  const RopeCase c(2, 3, 1);
  const auto refusal = [&](auto change) {
    MlaRopeQuantizeTensors tensors = c.tensors();
    change(tensors);
    const std::string text = message_of([&] { plan.run(tensors, Workspace{}); });
    EXPECT_EQ(c.q_fp8.at<uint8_t>({0, 0, 0}), 0xAB);
    return text;
  };
  using T = MlaRopeQuantizeTensors;
  EXPECT_THAT(refusal([](T& t) { t.q_rope = {}; }), HasSubstr("q_rope is missing"));
  EXPECT_THAT(refusal([](T& t) { t.k_fp8 = {}; }), HasSubstr("k_fp8 is missing"));
  EXPECT_THAT(refusal([](T& t) { t.positions = {}; }), HasSubstr("positions is missing"));
  EXPECT_THAT(refusal([](T& t) { t.cos_sin.shape[1] = 63; }), HasSubstr("cos_sin"));
  EXPECT_THAT(refusal([](T& t) { t.cos_sin.shape[0] = 0; }), HasSubstr("cos_sin.shape[0] = 0"));
  EXPECT_THAT(refusal([](T& t) { t.k_nope.shape[0] = 1; }), HasSubstr("k_nope = bf16 [1, 512]"));
  EXPECT_THAT(refusal([](T& t) { t.q_fp8.shape[1] = 2; }), HasSubstr("q_fp8 = u8 [2, 2, 576]"));
  EXPECT_THAT(refusal([](T& t) {
                t.q_nope = t.q_rope = t.k_nope = t.k_rope = {};
                t.q_fp8 = t.k_fp8 = {};
              }),
              HasSubstr("both missing"));
}

}  // namespace
}  // namespace fovea
