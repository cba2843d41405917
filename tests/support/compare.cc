#include "tests/support/compare.h"

#include <cmath>

#include "src/core/element.h"

namespace fovea::test {

testing::AssertionResult ExpectClose(std::span<const double> actual,
                                     std::span<const double> reference,
                                     const Tolerance& tolerance) {
  const Comparison comparison = compare(actual, reference, tolerance);
  return comparison.close ? testing::AssertionSuccess()
                          : testing::AssertionFailure() << comparison.detail;
}

std::vector<double> to_doubles(const ConstTensorView& tensor) {
  std::vector<double> values;
  const int64_t count = tensor.num_elements();
  values.reserve(static_cast<size_t>(count));
  for (int64_t flat = 0; flat < count; ++flat) values.push_back(internal::element(tensor, flat));
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
