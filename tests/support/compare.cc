#include "tests/support/compare.h"

#include <cmath>
#include <limits>

#include "src/core/element.h"

namespace fovea::test {

testing::AssertionResult ExpectClose(std::span<const double> actual,
                                     std::span<const double> reference,
                                     const Tolerance& tolerance) {
  const Comparison comparison = compare(actual, reference, tolerance);
  return comparison.close ? testing::AssertionSuccess()
                          : testing::AssertionFailure() << comparison.detail;
}

testing::AssertionResult ExpectCloseOutputs(std::span<const double> actual,
                                            std::span<const double> reference,
                                            std::span<const double> magnitude, int num_rounded,
                                            const Tolerance& tolerance) {
  if (num_rounded == 0 || actual.size() != reference.size())
    return ExpectClose(actual, reference, tolerance);
  // What passes by the limits counts as equal for the element's sake, not for the whole tensor's.
  std::vector<double> judged(actual.begin(), actual.end());
  for (size_t i = 0; i < judged.size(); ++i) {
    const double limit = num_rounded * rounded_weights_limit(reference[i], magnitude[i]);
    if (std::fabs(actual[i] - reference[i]) <= limit) judged[i] = reference[i];
  }
  const auto elements = ExpectClose(judged, reference, tolerance);
  if (!elements) return elements;
  return ExpectClose(actual, reference,
                     {.absolute = std::numeric_limits<double>::infinity(),
                      .relative_rms = tolerance.relative_rms,
                      .cosine = tolerance.cosine});
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
