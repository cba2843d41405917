#include "cli/compare.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "fovea/numeric.h"

namespace fovea::cli {
namespace {

double element(const ConstTensorView& tensor, int64_t i) {
  switch (tensor.dtype) {
    case DType::kU8:
      return static_cast<const uint8_t*>(tensor.data)[i];
    case DType::kI32:
      return static_cast<const int32_t*>(tensor.data)[i];
    case DType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(tensor.data)[i]);
    case DType::kF32:
      return static_cast<const float*>(tensor.data)[i];
    case DType::kBf16:
      return bf16_to_float(static_cast<const bf16_t*>(tensor.data)[i]);
    case DType::kNone:
      break;
  }
  return 0;
}

bool same_kind(double a, double r) {
  if (std::isnan(r) || std::isnan(a)) return std::isnan(r) && std::isnan(a);
  return std::isinf(r) || std::isinf(a) ? a == r : true;
}

std::string position(const ConstTensorView& tensor, int64_t flat) {
  std::string text;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    const int64_t extent = tensor.shape[static_cast<size_t>(axis)];
    text.insert(0, fmt::format("{}{}", flat % extent, text.empty() ? "" : ", "));
    flat /= extent;
  }
  return "[" + text + "]";
}

}  // namespace

Comparison compare(const ConstTensorView& actual, const ConstTensorView& expected,
                   const Tolerance& tolerance) {
  Comparison result;
  if (to_string(actual) != to_string(expected)) {
    return {false, 0, fmt::format("is {}, expected {}", to_string(actual), to_string(expected))};
  }
  int64_t failures = 0, worst = 0;
  double worst_excess = -1, difference = 0, norm = 0;
  const int64_t count = expected.num_elements();
  for (int64_t i = 0; i < count; ++i) {
    const double a = element(actual, i), r = element(expected, i);
    double excess = 0;  // how far beyond its limit
    if (!same_kind(a, r)) {
      excess = HUGE_VAL;
    } else if (std::isfinite(r)) {
      const double error = std::fabs(a - r);
      difference += error * error;
      norm += r * r;
      excess = error - std::fmax(tolerance.absolute, tolerance.relative * std::fabs(r));
    }
    if (excess <= 0) continue;
    ++failures;
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = i;
    }
  }
  result.rms = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
  if (failures > 0) {
    result.equal = false;
    result.detail =
        fmt::format("{} of {} elements differ; worst at {}: {}, expected {}", failures, count,
                    position(expected, worst), element(actual, worst), element(expected, worst));
  } else if (result.rms > tolerance.rms) {
    result.equal = false;
    result.detail = fmt::format("relative rms {:.3g}, at most {:.3g}", result.rms, tolerance.rms);
  }
  return result;
}

bool same_bytes(const ConstTensorView& a, const ConstTensorView& b) {
  if (to_string(a) != to_string(b)) return false;
  const size_t bytes = static_cast<size_t>(a.num_elements()) * size_of(a.dtype);
  return bytes == 0 || std::memcmp(a.data, b.data, bytes) == 0;
}

}  // namespace fovea::cli
