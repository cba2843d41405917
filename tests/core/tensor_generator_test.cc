#include "src/core/tensor_generator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "fovea/device.h"
#include "fovea/numeric.h"
#include "src/core/parallel.h"

namespace fovea::internal {
namespace {

class TensorGeneratorTest : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (GetParam() > best_cpu_isa()) GTEST_SKIP() << "this CPU lacks " << to_string(GetParam());
    limit_cpu_isa(GetParam());
  }
  void TearDown() override { limit_cpu_isa(best_cpu_isa()); }
};
INSTANTIATE_TEST_SUITE_P(Isas, TensorGeneratorTest,
                         testing::Values(CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx3),
                         [](const auto& isa) { return std::string(to_string(isa.param)); });

constexpr TensorStream kStreams[] = {
    {0, 0, 0, TensorKind::kLatentK},
    {0x0123456789ABCDEF, 0xFEDCBA9876543210, 60, TensorKind::kIndexQ},
    {~uint64_t{0}, ~uint64_t{0}, (1 << 24) - 1, TensorKind::kNormBias}};

TEST_P(TensorGeneratorTest, VectorsEqualTheReferenceBitForBit) {
  for (const TensorStream& stream : kStreams) {
    for (const size_t count : {0u, 1u, 2u, 15u, 17u, 576u, 8209u}) {
      std::vector<float> expected(count), values(count);
      std::vector<bf16_t> rounded(count);
      generate_noise_ref(stream, 0, expected);
      generate_noise(stream, std::span<float>(values));
      generate_noise(stream, std::span<bf16_t>(rounded));
      EXPECT_EQ(values, expected);
      for (size_t i = 0; i < count; ++i) EXPECT_EQ(bf16_to_float(rounded[i]), expected[i]);
    }
  }
}

TEST_P(TensorGeneratorTest, NoiseAroundAddsTheBaseInFp32) {
  const TensorStream stream = kStreams[1];
  std::vector<bf16_t> base(64), values(192);
  generate_noise(kStreams[2], std::span<bf16_t>(base));
  std::vector<float> noise(192);
  generate_noise_ref(stream, 192, noise);
  generate_noise_around(stream, {base, 0.5f, 192}, values);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(values[i], bf16_from_float(noise[i] + 0.5f * bf16_to_float(base[i % 64])));
  }
}

TEST(TensorGenerator, ValuesHaveTheDocumentedDistribution) {
  std::vector<float> values(1 << 16);
  generate_noise_ref({7, 1, 0, TensorKind::kQ}, 0, values);
  double sum = 0, squares = 0, products = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_LE(std::fabs(values[i]), 2.0f);
    sum += values[i];
    squares += static_cast<double>(values[i]) * values[i];
    products += static_cast<double>(values[i]) * values[(i + 1) % values.size()];
  }
  const auto count = static_cast<double>(values.size());
  // Five standard errors of a mean of 2^16 values of deviation 0.577.
  EXPECT_NEAR(sum / count, 0.0, 0.012);
  EXPECT_NEAR(squares / count, 1.0 / 3, 0.01);
  EXPECT_NEAR(products / count, 0.0, 0.01);
}

TEST(TensorGenerator, EveryFieldOfTheStreamChangesTheValues) {
  const TensorStream base{1, 2, 3, TensorKind::kQ};
  std::vector<float> values(64), other(64);
  generate_noise_ref(base, 0, values);
  TensorStream changed[6] = {base, base, base, base, base, base};
  changed[0].seed = 2;
  changed[1].seed = 1 + (uint64_t{1} << 32);
  changed[2].token_id = 3;
  changed[3].token_id = 2 + (uint64_t{1} << 32);
  changed[4].layer = 4;
  changed[5].tensor = TensorKind::kIndexK;
  for (const TensorStream& stream : changed) {
    generate_noise_ref(stream, 0, other);
    EXPECT_NE(values, other);
  }
}

TEST(TensorGenerator, CosSinIsARotationByTheRopeAngles) {
  constexpr int64_t kPositions = 300;
  std::vector<float> table(kPositions * 64), parallel(kPositions * 64);
  generate_cos_sin(kPositions, 64, table.data());
  for (const int64_t p : {0, 1, 7, 299}) {
    for (int64_t i = 0; i < 32; ++i) {
      const double angle = static_cast<double>(p) * std::pow(10000.0, -static_cast<double>(i) / 32);
      EXPECT_NEAR(table[static_cast<size_t>(p * 64 + i)], std::cos(angle), 1e-7);
      EXPECT_NEAR(table[static_cast<size_t>(p * 64 + 32 + i)], std::sin(angle), 1e-7);
    }
  }
  const ThreadScope threads(3);
  generate_cos_sin(kPositions, 64, parallel.data());
  EXPECT_EQ(parallel, table);
}

}  // namespace
}  // namespace fovea::internal
