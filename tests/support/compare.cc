#include "tests/support/compare.h"

#include <cmath>

#include "fovea/numeric.h"

namespace fovea::test {

testing::AssertionResult ExpectClose(std::span<const double> actual,
                                     std::span<const double> reference,
                                     const Tolerance& tolerance) {
  const Comparison comparison = compare(actual, reference, tolerance);
  return comparison.close ? testing::AssertionSuccess()
                          : testing::AssertionFailure() << comparison.detail;
}

namespace {

double element(const ConstTensorView& tensor, int64_t offset) {
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

std::vector<double> to_doubles(const ConstTensorView& tensor) {
  std::vector<double> values;
  const int64_t count = tensor.num_elements();
  values.reserve(static_cast<size_t>(count));
  for (int64_t flat = 0; flat < count; ++flat) {
    int64_t rest = flat;
    int64_t offset = 0;
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
      const auto i = static_cast<size_t>(axis);
      offset += rest % tensor.shape[i] * tensor.stride[i];
      rest /= tensor.shape[i];
    }
    values.push_back(element(tensor, offset));
  }
  return values;
}

double relative_rms(std::span<const double> actual, std::span<const double> reference) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    difference += (actual[i] - reference[i]) * (actual[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

}  // namespace fovea::test
