#include "bench/check.h"

#include <fmt/format.h>

#include <cmath>

#include "fovea/numeric.h"

namespace fovea::bench {
namespace {

int64_t offset_of(const TensorShape& tensor, int64_t flat) {
  int64_t offset = 0;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<size_t>(axis);
    offset += flat % tensor.shape[i] * tensor.stride[i];
    flat /= tensor.shape[i];
  }
  return offset;
}

double element(const ConstTensorView& tensor, int64_t flat) {
  const int64_t offset = offset_of(tensor, flat);
  switch (tensor.dtype) {
    case DType::kU8:
      return static_cast<const uint8_t*>(tensor.data)[offset];
    case DType::kI32:
      return static_cast<const int32_t*>(tensor.data)[offset];
    case DType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(tensor.data)[offset]);
    case DType::kF32:
      return static_cast<const float*>(tensor.data)[offset];
    case DType::kBf16:
      return bf16_to_float(static_cast<const bf16_t*>(tensor.data)[offset]);
    case DType::kNone:
      break;
  }
  return 0;
}

}  // namespace

std::string compare(const std::string& name, const ConstTensorView& actual,
                    const ConstTensorView& reference, const Closeness& closeness) {
  const int64_t count = reference.num_elements();
  if (actual.num_elements() != count)
    return fmt::format("{} has {} elements, expected {}", name, actual.num_elements(), count);
  int64_t failures = 0, worst = 0;
  double worst_error = -1, difference_square = 0, reference_square = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double a = element(actual, i);
    const double r = element(reference, i);
    if (std::isfinite(r)) reference_square += r * r;
    if (a == r || (std::isnan(a) && std::isnan(r))) continue;
    const double error = std::isfinite(a) && std::isfinite(r) ? std::fabs(a - r) : INFINITY;
    if (error < INFINITY) {
      difference_square += error * error;
      if (error <= closeness.absolute || error <= closeness.relative * std::fabs(r)) continue;
    }
    ++failures;
    if (error > worst_error) {
      worst_error = error;
      worst = i;
    }
  }
  if (failures > 0) {
    return fmt::format("{}: {} of {} elements are wrong; worst at flat index {}: {}, expected {}",
                       name, failures, count, worst, element(actual, worst),
                       element(reference, worst));
  }
  const double rms = std::sqrt(difference_square / std::fmax(reference_square, 1e-300));
  if (difference_square > 0 && rms > closeness.relative_rms) {
    return fmt::format("{}: relative rms error {:.3g}, expected at most {:.3g}", name, rms,
                       closeness.relative_rms);
  }
  return {};
}

}  // namespace fovea::bench
