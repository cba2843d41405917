#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/core/simd_math_test.cc"
#include "src/core/simd.h"
// The functions need the helpers of simd.h.
#include "src/core/simd_math.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// `count` must be a multiple of the vector length.
void exponentials(const float* x, int64_t count, float* y) {
  const F32 d;
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(exp_f32(d, hn::LoadU(d, x + i)), d, y + i);
}

void tangents(const float* x, int64_t count, float* y) {
  const F32 d;
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(tanh_f32(d, hn::LoadU(d, x + i)), d, y + i);
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fovea/device.h"

namespace fovea::internal {

HWY_EXPORT(exponentials);
HWY_EXPORT(tangents);

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class SimdMathTest : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (GetParam() > best_cpu_isa()) GTEST_SKIP() << to_string(GetParam()) << " is not here";
    limit_cpu_isa(GetParam());
  }
  void TearDown() override { limit_cpu_isa(best_cpu_isa()); }
  std::vector<float> exp_of(std::vector<float> x) {
    x.resize((x.size() + 63) / 64 * 64, 0);
    std::vector<float> y(x.size());
    HWY_DYNAMIC_DISPATCH(exponentials)(x.data(), static_cast<int64_t>(x.size()), y.data());
    return y;
  }
  std::vector<float> tanh_of(std::vector<float> x) {
    x.resize((x.size() + 63) / 64 * 64, 0);
    std::vector<float> y(x.size());
    HWY_DYNAMIC_DISPATCH(tangents)(x.data(), static_cast<int64_t>(x.size()), y.data());
    return y;
  }
};
INSTANTIATE_TEST_SUITE_P(Isa, SimdMathTest,
                         testing::Values(CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx3),
                         [](const auto& isa) { return std::string(to_string(isa.param)); });

// Every exponent and a spread of mantissas, both signs, |x| <= largest.
std::vector<float> spread(float largest) {
  std::vector<float> x;
  for (uint32_t bits = 0; std::bit_cast<float>(bits) <= largest; bits += 9973) {
    x.push_back(std::bit_cast<float>(bits));
    x.push_back(-x.back());
  }
  return x;
}

TEST_P(SimdMathTest, ExponentialIsWithinTwoToTheMinus22) {
  const std::vector<float> x = spread(87.3f);
  const std::vector<float> y = exp_of(x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    worst = std::max(worst, std::fabs(y[i] - exact) / exact);
  }
  EXPECT_LT(worst, 0x1p-22);
}

TEST_P(SimdMathTest, ExponentialAtItsEnds) {
  const std::vector<float> y = exp_of({0.0f, -0.0f, -kInf, -88.0f, -1e30f, kInf, 89.0f, 1e30f});
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_EQ(y[1], 1.0f);
  for (size_t i : {2, 3, 4}) EXPECT_EQ(std::bit_cast<uint32_t>(y[i]), 0u);
  for (size_t i : {5, 6, 7}) EXPECT_EQ(y[i], kInf);
  for (const float value : exp_of(std::vector<float>(64, std::nanf("")))) {
    EXPECT_TRUE(std::isnan(value));
  }
}

TEST_P(SimdMathTest, TangentIsWithinTwoToTheMinus21) {
  const std::vector<float> x = spread(100.0f);
  const std::vector<float> y = tanh_of(x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::tanh(static_cast<double>(x[i]));
    if (std::fabs(exact) < 0x1p-126) {
      EXPECT_EQ(y[i], x[i]);
    } else {
      worst = std::max(worst, std::fabs(y[i] - exact) / std::fabs(exact));
    }
  }
  EXPECT_LT(worst, 0x1p-21);
}

TEST_P(SimdMathTest, TangentAtItsEnds) {
  const std::vector<float> y = tanh_of({kInf, -kInf, 1e30f, -1e30f, std::nanf(""), 0.0f});
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_EQ(y[1], -1.0f);
  EXPECT_EQ(y[2], 1.0f);
  EXPECT_EQ(y[3], -1.0f);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_EQ(y[5], 0.0f);
}

}  // namespace
}  // namespace fovea::internal

#endif  // HWY_ONCE
