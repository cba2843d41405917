#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/core/fp8_tile_test.cc"
#include "src/core/simd.h"
// The tile functions need the helpers of simd.h.
#include "src/core/fp8_tile_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// `count` must be a multiple of the vector length.
void encode_floats(const float* values, int64_t count, uint8_t* codes) {
  const F32 d;
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(d))) {
    store_e4m3(d, hn::LoadU(d, values + i), codes + i);
  }
}

float quantize(const bf16_t* x, int64_t count, TileScaleRule rule, ScaleMode mode, uint8_t* codes) {
  return quantize_tile_simd(x, count, rule, mode, codes);
}

void dequantize(const uint8_t* codes, int64_t count, float scale, bf16_t* out) {
  dequantize_tile_simd(codes, count, scale, out);
}

// `count` must be a multiple of 16, `out` aligned.
void dequantize_floats(const uint8_t* codes, int64_t count, float scale, float* out) {
  dequantize_tile_to_floats(codes, count, scale, out);
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "fovea/device.h"
#include "tests/support/rng.h"

namespace fovea::internal {

HWY_EXPORT(encode_floats);
HWY_EXPORT(quantize);
HWY_EXPORT(dequantize);
HWY_EXPORT(dequantize_floats);

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr TileScaleRule kRules[] = {latent_tile_scale, index_tile_scale};
constexpr ScaleMode kModes[] = {ScaleMode::kFp32, ScaleMode::kPow2};

TEST(Fp8Scale, LatentTiles) {
  EXPECT_EQ(latent_tile_scale(0, ScaleMode::kFp32), 1.0f);
  EXPECT_EQ(latent_tile_scale(896, ScaleMode::kFp32), 2.0f);
  EXPECT_EQ(latent_tile_scale(900, ScaleMode::kFp32), 900.0f / 448.0f);
  EXPECT_EQ(latent_tile_scale(0, ScaleMode::kPow2), 0x1p-13f);
  EXPECT_EQ(latent_tile_scale(1e-6f, ScaleMode::kPow2), 0x1p-13f);
  EXPECT_EQ(latent_tile_scale(448, ScaleMode::kPow2), 1.0f);
  EXPECT_EQ(latent_tile_scale(896, ScaleMode::kPow2), 2.0f);
  EXPECT_EQ(latent_tile_scale(900, ScaleMode::kPow2), 4.0f);
  for (int exponent = -13; exponent <= 119; ++exponent) {
    EXPECT_EQ(latent_tile_scale(448 * std::ldexp(1.0f, exponent), ScaleMode::kPow2),
              std::ldexp(1.0f, exponent));
  }
  EXPECT_EQ(latent_tile_scale(bf16_to_float(bf16_t{0x7F7F}), ScaleMode::kPow2), 0x1p120f);
}

TEST(Fp8Scale, IndexTiles) {
  EXPECT_EQ(index_tile_scale(0, ScaleMode::kFp32), 1e-4f / 448.0f);
  EXPECT_EQ(index_tile_scale(5e-5f, ScaleMode::kFp32), 1e-4f / 448.0f);
  EXPECT_EQ(index_tile_scale(3, ScaleMode::kFp32), 3.0f / 448.0f);
  EXPECT_EQ(index_tile_scale(0, ScaleMode::kPow2), 0x1p-22f);
  EXPECT_EQ(index_tile_scale(448, ScaleMode::kPow2), 1.0f);
  EXPECT_EQ(index_tile_scale(450, ScaleMode::kPow2), 2.0f);
}

TEST(Fp8Tile, NonFiniteElementsStayOutOfTheLargestMagnitude) {
  const std::vector<float> values = {1, kInf, -3, std::nanf(""), -kInf, 0};
  std::vector<bf16_t> x;
  for (const float value : values) x.push_back(bf16_from_float(value));
  uint8_t codes[6];
  EXPECT_EQ(quantize_tile(x.data(), 6, latent_tile_scale, ScaleMode::kFp32, codes), 3.0f / 448.0f);
  EXPECT_EQ(codes[1], 0x7E);
  EXPECT_EQ(codes[2], 0xFE);
  EXPECT_EQ(codes[3], 0x7F);
  EXPECT_EQ(codes[4], 0xFE);
  // Nothing finite but zero: scale 1, infinities become +-448.
  x = {bf16_t{0x7F80}, bf16_t{0xFF80}, bf16_t{0}, bf16_t{0xFFC1}};
  EXPECT_EQ(quantize_tile(x.data(), 4, latent_tile_scale, ScaleMode::kFp32, codes), 1.0f);
  EXPECT_EQ(std::vector<uint8_t>(codes, codes + 4), (std::vector<uint8_t>{0x7E, 0xFE, 0, 0x7F}));
}

TEST(Fp8Tile, LargestBf16InPow2ModeDecodesToInfinity) {
  const bf16_t x{0x7F7F};
  uint8_t code = 0;
  EXPECT_EQ(quantize_tile(&x, 1, latent_tile_scale, ScaleMode::kPow2, &code), 0x1p120f);
  EXPECT_EQ(code, 0x78);
  bf16_t out;
  dequantize_tile(&code, 1, 0x1p120f, &out);
  EXPECT_EQ(out.bits, 0x7F80);
}

// The vector forms against the plain ones, on every instruction set that this CPU has.
class Fp8SimdTest : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (GetParam() > best_cpu_isa()) GTEST_SKIP() << "not on this CPU";
    limit_cpu_isa(GetParam());
  }
  void TearDown() override { limit_cpu_isa(best_cpu_isa()); }

  static void expect_encodes(std::vector<float> values) {
    while (values.size() % 64 != 0) values.push_back(0);
    std::vector<uint8_t> codes(values.size());
    HWY_DYNAMIC_DISPATCH(encode_floats)
    (values.data(), static_cast<int64_t>(values.size()), codes.data());
    int failures = 0;
    for (size_t i = 0; i < values.size() && failures < 5; ++i) {
      if (codes[i] == e4m3_from_float(values[i])) continue;
      ADD_FAILURE() << "value " << values[i] << ": code " << int{codes[i]} << ", expected "
                    << int{e4m3_from_float(values[i])};
      ++failures;
    }
  }

  static void expect_quantizes(const std::vector<bf16_t>& x, TileScaleRule rule, ScaleMode mode) {
    const auto count = static_cast<int64_t>(x.size());
    std::vector<uint8_t> codes(x.size() + 1, 0xAA), expected(x.size() + 1, 0xAA);
    const float expected_scale = quantize_tile(x.data(), count, rule, mode, expected.data());
    const float scale = HWY_DYNAMIC_DISPATCH(quantize)(x.data(), count, rule, mode, codes.data());
    ASSERT_EQ(scale, expected_scale);
    if (codes == expected) return;
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(codes[i], expected[i]) << "x " << bf16_to_float(x[i]) << " scale " << scale;
    }
    FAIL() << "wrote past the tile";
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, Fp8SimdTest,
                         testing::Values(CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx3),
                         [](const auto& isa) { return std::string(to_string(isa.param)); });

TEST_P(Fp8SimdTest, StoreEncodesEveryBf16PatternAtManyScales) {
  for (const float scale : {1.0f, 0.3333333f, 448.0f / 255.0f, 0x1p-20f, 0x1p100f, 1e-4f}) {
    std::vector<float> values;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      values.push_back(bf16_to_float(bf16_t{static_cast<uint16_t>(bits)}) / scale);
    }
    expect_encodes(values);
  }
}

TEST_P(Fp8SimdTest, StoreEncodesTiesTheirNeighboursAndRandomBits) {
  std::vector<float> values;
  for (int code = 0; code < 0x7F; ++code) {
    const float low = e4m3_to_float(static_cast<uint8_t>(code));
    const float high = code == 0x7E ? 480.0f : e4m3_to_float(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    for (const float value : {low, middle, std::nextafter(middle, 0.0f),
                              std::nextafter(middle, kInf), std::nextafter(low, kInf)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  test::Rng rng(1);
  for (int i = 0; i < 100000; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(rng.next())));
  }
  expect_encodes(values);
}

TEST_P(Fp8SimdTest, QuantizesEveryPairOfElementAndLargestMagnitude) {
  // The quotient depends on the exponents only through their difference, and a code is 0 from 19
  // binades below amax on: 128 mantissas of amax times the 20 binades below each are all there is.
  // In tiles of 64, so that a subnormal code sends only its neighbours down the slow path.
  for (const int exponent : {127, 127 - 40, 254, 30}) {
    for (int mantissa = 0; mantissa < 128; ++mantissa) {
      const int amax_bits = exponent << 7 | mantissa;
      for (int bits = std::max(0, amax_bits - (20 << 7)); bits <= amax_bits; bits += 63) {
        std::vector<bf16_t> x(64);
        for (int i = 0; i < 63; ++i) {
          const int element = std::min(bits + i, amax_bits);
          x[static_cast<size_t>(i)].bits = static_cast<uint16_t>(element | (element & 1) << 15);
        }
        x[63].bits = static_cast<uint16_t>(amax_bits);
        for (const TileScaleRule rule : kRules) {
          for (const ScaleMode mode : kModes) expect_quantizes(x, rule, mode);
        }
      }
    }
  }
}

TEST_P(Fp8SimdTest, QuantizesTilesOfAnyMagnitudeWithAndWithoutTinyElements) {
  test::Rng rng(4);
  for (int exponent = -126; exponent < 128; ++exponent) {
    for (const bool has_tiny : {false, true}) {
      std::vector<bf16_t> x = rng.bf16_normals(128, std::ldexp(0.2f, exponent));
      for (bf16_t& element : x) {
        if (has_tiny && rng.integer(0, 3) == 0) {
          element = bf16_from_float(bf16_to_float(element) * rng.uniform(0.0f, 1e-4f));
        }
      }
      for (const TileScaleRule rule : kRules) {
        for (const ScaleMode mode : kModes) expect_quantizes(x, rule, mode);
      }
    }
  }
}

TEST_P(Fp8SimdTest, QuantizesEverythingBelowTheFloorOfIndexTiles) {
  const uint16_t floor_bits = bf16_from_float(1e-4f).bits;
  std::vector<bf16_t> x;
  for (uint16_t bits = 0; bits < floor_bits; ++bits) x.push_back(bf16_t{bits});
  for (const ScaleMode mode : kModes) expect_quantizes(x, index_tile_scale, mode);
}

TEST_P(Fp8SimdTest, QuantizesTinyTilesZerosAndNonFiniteElementsAtAnyLength) {
  test::Rng rng(2);
  for (const int count : {0, 1, 7, 31, 64, 100, 128, 129}) {
    for (const float magnitude : {0.0f, 1e-40f, 1e-37f, 1e-30f, 1e-6f, 1.0f, 1e30f}) {
      for (const bf16_t special : {bf16_t{0x8000}, bf16_t{0x7F80}, bf16_t{0xFF80}, bf16_t{0x7FC0},
                                   bf16_t{0x7F81}, bf16_t{0x0001}}) {
        std::vector<bf16_t> x = rng.bf16_normals(count, magnitude);
        if (count > 0) x[static_cast<size_t>(rng.integer(0, count - 1))] = special;
        for (const TileScaleRule rule : kRules) {
          for (const ScaleMode mode : kModes) expect_quantizes(x, rule, mode);
        }
      }
    }
  }
}

TEST_P(Fp8SimdTest, DequantizesEveryCodeAtEveryKindOfScale) {
  test::Rng rng(3);
  std::vector<float> scales = {0.0f,
                               -0.0f,
                               kInf,
                               -kInf,
                               std::nanf(""),
                               -2.5f,
                               127.99999f,
                               128.0f,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::denorm_min()};
  for (int exponent = -149; exponent < 128; ++exponent) {
    scales.push_back(std::ldexp(1.0f, exponent));
    scales.push_back(std::ldexp(1.0f + static_cast<float>(rng.uniform()), exponent));
  }
  std::vector<uint8_t> all(256), numbers;
  for (int code = 0; code < 256; ++code) {
    all[static_cast<size_t>(code)] = static_cast<uint8_t>(code);
    if ((code & 0x7F) != 0x7F) numbers.push_back(static_cast<uint8_t>(code));
  }
  for (const float scale : scales) {
    for (const std::vector<uint8_t>& codes : {all, numbers}) {
      alignas(64) float floats[256];
      const int64_t whole = static_cast<int64_t>(codes.size()) / 16 * 16;
      HWY_DYNAMIC_DISPATCH(dequantize_floats)(codes.data(), whole, scale, floats);
      const auto count = static_cast<int64_t>(codes.size());
      std::vector<bf16_t> out(codes.size() + 1, bf16_t{0xAAAA}), expected = out;
      dequantize_tile(codes.data(), count, scale, expected.data());
      HWY_DYNAMIC_DISPATCH(dequantize)(codes.data(), count, scale, out.data());
      for (size_t i = 0; i <= codes.size(); ++i) {
        ASSERT_EQ(out[i].bits, expected[i].bits) << "element " << i << " scale " << scale;
      }
      for (size_t i = 0; i < static_cast<size_t>(whole); ++i) {
        ASSERT_EQ(std::bit_cast<uint32_t>(floats[i]), uint32_t{expected[i].bits} << 16)
            << "element " << i << " scale " << scale;
      }
    }
  }
}

}  // namespace
}  // namespace fovea::internal

#endif  // HWY_ONCE
