#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "fovea/dtype.h"
#include "fovea/export.h"

/// Number formats, bit-exact and portable: the conversions every backend must reproduce.
namespace fovea {

/// Largest finite e4m3fn magnitude.
inline constexpr float kE4m3Max = 448.0f;

/// Exact: bf16 is the upper half of a float.
FOVEA_HOST_DEVICE inline float bf16_to_float(bf16_t value) noexcept {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

/// Rounds to nearest, ties to even. Overflow gives infinity; NaN stays a (quiet) NaN of the same
/// sign.
FOVEA_HOST_DEVICE inline bf16_t bf16_from_float(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return bf16_t{static_cast<uint16_t>((bits >> 16) | 0x0040u)};
  }
  // Adding 0x7FFF plus the lowest kept bit carries into the kept half exactly when rounding goes
  // up.
  return bf16_t{static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

/// Decodes e4m3fn: 1 sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN, there
/// is no infinity.
FOVEA_HOST_DEVICE inline float e4m3_to_float(uint8_t code) noexcept {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (magnitude < 0x08u) {  // subnormal: mantissa * 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  // Rebias the exponent from 7 to 127; the mantissa moves from bit 0 to bit 20.
  return std::bit_cast<float>(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
}

/// Encodes to e4m3fn: round to nearest, ties to even, saturating at +-448 (infinities too). NaN
/// gives 0x7F.
FOVEA_HOST_DEVICE inline uint8_t e4m3_from_float(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= std::bit_cast<uint32_t>(kE4m3Max)) return static_cast<uint8_t>(sign | 0x7E);
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {
    // Subnormal range: adding 1.5 * 2^14 leaves the value in units of 2^-9 in the low mantissa
    // bits, rounded to nearest even.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1.8p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) & 0x0Fu));
  }
  // Round the mantissa from 23 to 3 bits (ties to even), then rebias. A carry into 480 is
  // impossible below 448 + 16.
  const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded - ((127u - 7u) << 23)) >> 20));
}

/// Decodes ue8m0: 2^(code - 127). Code 0 is 2^-127 (subnormal in fp32), code 255 is NaN.
FOVEA_HOST_DEVICE inline float ue8m0_to_float(uint8_t code) noexcept {
  if (code == 0xFF) return std::numeric_limits<float>::quiet_NaN();
  if (code == 0) return 0x1p-127f;
  return std::bit_cast<float>(static_cast<uint32_t>(code) << 23);
}

/// Encodes a power of two in [2^-127, 2^127] exactly; other positive values round up to the next
/// power of two, larger ones saturate at 2^127. Zero and negative values give code 0, NaN gives
/// 255.
FOVEA_HOST_DEVICE inline uint8_t ue8m0_from_float(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0xFF;
  if ((bits >> 31) != 0 || bits <= 0x00400000u) return 0;  // up to and including 2^-127
  const uint32_t code = (bits >> 23) + ((bits & 0x007FFFFFu) != 0 ? 1u : 0u);
  return static_cast<uint8_t>(code < 254u ? code : 254u);
}

/// Decodes e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, from the low four bits.
FOVEA_HOST_DEVICE inline float e2m1_to_float(uint8_t code) noexcept {
  constexpr float kMagnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = kMagnitude[code & 7u];
  return (code & 8u) != 0 ? -magnitude : magnitude;
}

/// Encodes to e2m1: round to nearest, ties to the even code, saturating at +-6. The format has no
/// NaN: NaN gives 6.
FOVEA_HOST_DEVICE inline uint8_t e2m1_from_float(float value) noexcept {
  const uint8_t sign = std::signbit(value) ? 8u : 0u;
  const float a = std::fabs(value);
  // Midpoints between neighbours; a tie goes to the code whose mantissa bit is 0.
  uint8_t code = 7;
  if (a <= 0.25f)
    code = 0;
  else if (a < 0.75f)
    code = 1;
  else if (a <= 1.25f)
    code = 2;
  else if (a < 1.75f)
    code = 3;
  else if (a <= 2.5f)
    code = 4;
  else if (a < 3.5f)
    code = 5;
  else if (a <= 5.0f)
    code = 6;
  return static_cast<uint8_t>(sign | code);
}

/// The smallest power of two that is >= value, for finite positive value whose result is a normal
/// float.
FOVEA_HOST_DEVICE inline float round_up_to_pow2(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t exponent = (bits >> 23) + ((bits & 0x007FFFFFu) != 0 ? 1u : 0u);
  return std::bit_cast<float>(exponent << 23);
}

}  // namespace fovea
