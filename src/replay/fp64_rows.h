#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "fovea/dtype.h"
#include "fovea/numeric.h"

/// Arithmetic of the checkers.
namespace fovea::internal {

/// Four sums, so that the compiler may use vectors; `count` is a multiple of four.
inline double dot(const double* a, const double* b, int64_t count) {
  double sums[4] = {0, 0, 0, 0};
  for (int64_t i = 0; i < count; i += 4) {
    for (int64_t lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

inline std::vector<double> widened(std::span<const bf16_t> values) {
  std::vector<double> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(), bf16_to_float);
  return result;
}

}  // namespace fovea::internal
