#pragma once

#include <cmath>
#include <limits>

#include "fovea/export.h"

namespace fovea::internal {

/// 1 / (1 + exp(sink - lse)): what the attention sink leaves of the output. Both in natural-log
/// units; 0 for an empty row (lse = -inf) whatever the sink is. The subtraction comes first, so
/// that no large sink overflows.
template <class Real>
FOVEA_HOST_DEVICE Real sink_factor(Real sink, Real lse) {
  if (lse == -std::numeric_limits<Real>::infinity()) return Real{0};
  const Real x = sink - lse;
  if (x > 0) {
    const Real e = std::exp(-x);
    return e / (1 + e);
  }
  return 1 / (1 + std::exp(x));
}

inline double sink_factor(float sink, double lse) {
  return sink_factor(static_cast<double>(sink), lse);
}

}  // namespace fovea::internal
