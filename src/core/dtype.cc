#include "fovea/dtype.h"

namespace fovea {

std::string_view to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::kNone:
      return "none";
    case DType::kU8:
      return "u8";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kF32:
      return "f32";
    case DType::kBf16:
      return "bf16";
  }
  return "?";
}

std::string_view to_string(RowFormat format) noexcept {
  switch (format) {
    case RowFormat::kBf16:
      return "bf16";
    case RowFormat::kV32:
      return "v32";
    case RowFormat::kI132:
      return "i132";
    case RowFormat::kV4:
      return "v4";
    case RowFormat::kR512:
      return "r512";
    case RowFormat::kF576:
      return "f576";
  }
  return "?";
}

std::string_view to_string(ScaleMode mode) noexcept {
  return mode == ScaleMode::kFp32 ? "fp32" : "pow2";
}

std::string_view to_string(RopeStyle style) noexcept {
  return style == RopeStyle::kHalfSplit ? "half_split" : "interleaved";
}

}  // namespace fovea
