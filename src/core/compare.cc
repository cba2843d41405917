#include "fovea/compare.h"

#include <cmath>
#include <cstdio>

#include "src/core/element.h"

namespace fovea {
namespace {

bool same_type_and_shape(const TensorShape& a, const TensorShape& b) {
  if (a.dtype != b.dtype || a.rank != b.rank) return false;
  for (size_t axis = 0; axis < static_cast<size_t>(a.rank); ++axis) {
    if (a.shape[axis] != b.shape[axis]) return false;
  }
  return true;
}

std::string position(const TensorShape& tensor, int64_t flat) {
  std::string text;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    const int64_t extent = tensor.shape[static_cast<size_t>(axis)];
    if (!text.empty()) text.insert(0, ", ");
    text.insert(0, std::to_string(flat % extent));
    flat /= extent;
  }
  return "[" + text + "]";
}

// Sums over the finite elements, and the element that is furthest beyond its limit.
struct Measures {
  int64_t failures = 0;
  int64_t worst = 0;
  double worst_excess = -1;
  double dot = 0, norm_actual = 0, norm_reference = 0, norm_difference = 0;

  void add(int64_t flat, double a, double r, const Tolerance& tolerance) {
    double excess = 0;
    if (std::isfinite(a) && std::isfinite(r)) {
      const double error = std::fabs(a - r);
      dot += a * r;
      norm_actual += a * a;
      norm_reference += r * r;
      norm_difference += error * error;
      excess = error - std::fmax(tolerance.absolute, tolerance.relative * std::fabs(r));
    } else if (a != r && !(std::isnan(a) && std::isnan(r))) {
      excess = HUGE_VAL;
    }
    if (excess <= 0) return;
    ++failures;
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = flat;
    }
  }

  double relative_rms() const {
    return norm_reference > 0 ? std::sqrt(norm_difference / norm_reference)
                              : std::sqrt(norm_difference);
  }
  double cosine_distance() const {
    return norm_reference < 1e-12 ? 0 : 1 - 2 * dot / (norm_actual + norm_reference);
  }
};

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

template <class Actual, class Reference>
Comparison compare_elements(const TensorShape& shape, Actual actual, Reference reference,
                            const Tolerance& tolerance) {
  Measures measures;
  const int64_t count = shape.num_elements();
  for (int64_t i = 0; i < count; ++i) measures.add(i, actual(i), reference(i), tolerance);
  Comparison result{true, measures.relative_rms(), {}};
  if (measures.failures > 0) {
    result.detail = std::to_string(measures.failures) + " of " + std::to_string(count) +
                    " elements differ; worst at " + position(shape, measures.worst) + ": " +
                    number(actual(measures.worst)) + ", expected " +
                    number(reference(measures.worst));
  } else if (result.relative_rms > tolerance.relative_rms) {
    result.detail = "relative rms " + number(result.relative_rms) + ", expected at most " +
                    number(tolerance.relative_rms);
  } else if (measures.cosine_distance() > tolerance.cosine) {
    result.detail = "cosine distance " + number(measures.cosine_distance()) +
                    ", expected at most " + number(tolerance.cosine);
  }
  result.close = result.detail.empty();
  return result;
}

}  // namespace

Comparison compare(const ConstTensorView& actual, const ConstTensorView& reference,
                   const Tolerance& tolerance) {
  if (!same_type_and_shape(actual, reference)) {
    return {false, 0, "is " + to_string(actual) + ", expected " + to_string(reference)};
  }
  return compare_elements(
      reference, [&](int64_t i) { return internal::element(actual, i); },
      [&](int64_t i) { return internal::element(reference, i); }, tolerance);
}

Comparison compare(std::span<const double> actual, std::span<const double> reference,
                   const Tolerance& tolerance) {
  if (actual.size() != reference.size()) {
    return {false, 0,
            "has " + std::to_string(actual.size()) + " elements, expected " +
                std::to_string(reference.size())};
  }
  TensorShape shape;
  shape.rank = 1;
  shape.shape[0] = static_cast<int64_t>(reference.size());
  return compare_elements(
      shape, [&](int64_t i) { return actual[static_cast<size_t>(i)]; },
      [&](int64_t i) { return reference[static_cast<size_t>(i)]; }, tolerance);
}

}  // namespace fovea
