#include "bench/check.h"

namespace fovea::bench {

std::string difference_text(const std::string& name, const ConstTensorView& actual,
                            const ConstTensorView& reference, const Tolerance& tolerance) {
  const Comparison comparison = compare(actual, reference, tolerance);
  return comparison.close ? std::string() : name + ": " + comparison.detail;
}

}  // namespace fovea::bench
