#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fovea/export.h"

namespace fovea {

/// Element types of tensors. e4m3 codes, ue8m0 scales and packed rows are kU8 beside an explicit
/// format.
enum class DType : uint8_t { kNone, kU8, kI32, kI64, kF32, kBf16 };

/// Bytes of one element; 0 for kNone.
constexpr size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kU8:
      return 1;
    case DType::kBf16:
      return 2;
    case DType::kI32:
    case DType::kF32:
      return 4;
    case DType::kI64:
      return 8;
    case DType::kNone:
      break;
  }
  return 0;
}

/// "u8", "i32", "i64", "f32", "bf16" or "none".
FOVEA_API std::string_view to_string(DType dtype) noexcept;

/// A bfloat16 bit pattern. Conversions live in fovea/numeric.h; the type has no arithmetic on
/// purpose.
struct bf16_t {
  uint16_t bits;
  friend bool operator==(bf16_t a, bf16_t b) noexcept { return a.bits == b.bits; }
};

/// How one token's row is stored in a pool (byte layouts: docs/formats.md).
enum class RowFormat : uint8_t {
  kBf16,  ///< width bf16 values.
  kV32,   ///< 656 B: 512 e4m3, 4 fp32 scales, 64 bf16 rope values (DeepSeek-V3.2 latent).
  kI132,  ///< 132 B per token, values first and scales last in each page: 128 e4m3, 1 fp32 scale
          ///< (index keys).
  kV4,  ///< 584 B per token, two regions of a page: 448 e4m3 and 64 bf16 rope values; then 7 ue8m0
        ///< scales (DeepSeek-V4 latent).
  kR512,  ///< 512 B: 512 e4m3 of x / inv_scale[slot]; the scales are a tensor beside the pool.
  kF576,  ///< 576 B: 576 e4m3 of x / k_scale, one scale for the whole cache, kept by the caller.
};

/// "bf16", "v32", "i132", "v4", "r512", "f576".
FOVEA_API std::string_view to_string(RowFormat format) noexcept;

/// How the scale of an fp8 tile is chosen from the tile's largest magnitude.
enum class ScaleMode : uint8_t {
  kFp32,  ///< amax / 448, any fp32 value.
  kPow2,  ///< The smallest power of two that is at least amax / 448.
};

/// "fp32", "pow2".
FOVEA_API std::string_view to_string(ScaleMode mode) noexcept;

/// Which channels form the pairs of a rotary embedding of width n.
enum class RopeStyle : uint8_t {
  kHalfSplit,    ///< (i, i + n/2)
  kInterleaved,  ///< (2i, 2i + 1)
};

/// "half_split", "interleaved".
FOVEA_API std::string_view to_string(RopeStyle style) noexcept;

}  // namespace fovea
