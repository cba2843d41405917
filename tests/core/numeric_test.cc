#include "fovea/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fovea {
namespace {

// Decoders by definition, from the fields of the code.
double e4m3_value(int code) {
  const double sign = (code & 0x80) != 0 ? -1 : 1;
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}

double e2m1_value(int code) {
  const double sign = (code & 8) != 0 ? -1 : 1;
  const int exponent = (code >> 1) & 3;
  const int mantissa = code & 1;
  return sign * (exponent == 0 ? 0.5 * mantissa : std::ldexp(2 + mantissa, exponent - 2));
}

TEST(Bf16, EveryCodeSurvivesARoundTrip) {
  for (int code = 0; code < 65536; ++code) {
    const bf16_t value{static_cast<uint16_t>(code)};
    const float decoded = bf16_to_float(value);
    if (std::isnan(decoded))
      EXPECT_TRUE(std::isnan(bf16_to_float(bf16_from_float(decoded))));
    else
      EXPECT_EQ(bf16_from_float(decoded), value);
  }
}

TEST(Bf16, MidpointsGoToTheEvenCode) {
  for (int code = 0; code < 0x7F7F; ++code) {
    const uint32_t low = static_cast<uint32_t>(code) << 16;
    const float midpoint = std::bit_cast<float>(low + 0x8000u);
    EXPECT_EQ(bf16_from_float(midpoint).bits, (code & 1) == 0 ? code : code + 1);
    EXPECT_EQ(bf16_from_float(std::bit_cast<float>(low + 0x7FFFu)).bits, code);
    EXPECT_EQ(bf16_from_float(std::bit_cast<float>(low + 0x8001u)).bits, code + 1);
  }
  EXPECT_EQ(bf16_from_float(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_TRUE(std::isnan(bf16_to_float(bf16_from_float(std::bit_cast<float>(0x7F800001u)))));
}

TEST(E4m3, EveryCodeDecodesByDefinitionAndSurvivesARoundTrip) {
  for (int code = 0; code < 256; ++code) {
    const double expected = e4m3_value(code);
    const float decoded = e4m3_to_float(static_cast<uint8_t>(code));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(decoded));
      EXPECT_EQ(e4m3_from_float(decoded), 0x7F);
    } else {
      EXPECT_EQ(decoded, expected);
      EXPECT_EQ(std::signbit(decoded), (code & 0x80) != 0);
      EXPECT_EQ(e4m3_from_float(decoded), code);
    }
  }
}

TEST(E4m3, RoundsToNearestTiesToEvenAndSaturates) {
  for (int code = 0; code < 0x7E; ++code) {
    const double low = e4m3_value(code), high = e4m3_value(code + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    EXPECT_EQ(e4m3_from_float(middle), (code & 1) == 0 ? code : code + 1) << code;
    EXPECT_EQ(e4m3_from_float(std::nextafter(middle, 0.0f)), code) << code;
    EXPECT_EQ(e4m3_from_float(std::nextafter(middle, 1e9f)), code + 1) << code;
    EXPECT_EQ(e4m3_from_float(-middle), 0x80 | ((code & 1) == 0 ? code : code + 1)) << code;
  }
  for (const float large :
       {448.0f, 463.9f, 464.0f, 480.0f, 1e4f, 3e38f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(e4m3_from_float(large), 0x7E);
    EXPECT_EQ(e4m3_from_float(-large), 0xFE);
  }
  EXPECT_EQ(e4m3_from_float(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(e4m3_from_float(-0.0f), 0x80);
}

TEST(Ue8m0, EveryCodeDecodesByDefinitionAndSurvivesARoundTrip) {
  for (int code = 0; code < 255; ++code) {
    const float decoded = ue8m0_to_float(static_cast<uint8_t>(code));
    EXPECT_EQ(decoded, std::ldexp(1.0, code - 127));
    EXPECT_EQ(ue8m0_from_float(decoded), code);
    if (code > 0 && code < 254) {
      EXPECT_EQ(ue8m0_from_float(std::nextafter(decoded, 1e38f)), code + 1);
    }
  }
  EXPECT_TRUE(std::isnan(ue8m0_to_float(255)));
  EXPECT_EQ(ue8m0_from_float(NAN), 255);
  EXPECT_EQ(ue8m0_from_float(0.0f), 0);
  EXPECT_EQ(ue8m0_from_float(std::numeric_limits<float>::max()), 254);
}

TEST(E2m1, EveryCodeDecodesByDefinitionAndRoundsToNearestEven) {
  for (int code = 0; code < 16; ++code) {
    EXPECT_EQ(e2m1_to_float(static_cast<uint8_t>(code)), e2m1_value(code));
    EXPECT_EQ(e2m1_from_float(e2m1_to_float(static_cast<uint8_t>(code))), code);
  }
  for (int code = 0; code < 7; ++code) {
    const auto middle = static_cast<float>((e2m1_value(code) + e2m1_value(code + 1)) / 2);
    EXPECT_EQ(e2m1_from_float(middle), (code & 1) == 0 ? code : code + 1);
    EXPECT_EQ(e2m1_from_float(std::nextafter(middle, 0.0f)), code);
    EXPECT_EQ(e2m1_from_float(std::nextafter(middle, 9.0f)), code + 1);
  }
  EXPECT_EQ(e2m1_from_float(1e9f), 7);
  EXPECT_EQ(e2m1_from_float(-1e9f), 15);
}

TEST(RoundUpToPow2, IsExactAtPowersOfTwo) {
  for (int exponent = -100; exponent <= 100; ++exponent) {
    const auto power = static_cast<float>(std::ldexp(1.0, exponent));
    EXPECT_EQ(round_up_to_pow2(power), power);
    EXPECT_EQ(round_up_to_pow2(std::nextafter(power, 1e38f)), 2 * power);
  }
}

}  // namespace
}  // namespace fovea
