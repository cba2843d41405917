#pragma once

#include <cmath>

#include "fovea/export.h"
#include "fovea/kda.h"

/// The scalar functions of a KDA layer, shared by every implementation on the host and the device.
/// Real is double in the references and float elsewhere.
namespace fovea::internal {

/// Added to the sum of squares, inside the square root.
inline constexpr double kKdaNormEpsilon = 1e-6;
/// Least log decay in base 2 that chunked implementations use: exp2 of it is 0 in fp32, and sums of
/// it over a chunk keep the fraction bits of channels that did not close.
inline constexpr float kKdaLeastLog2Decay = -160.0f;
inline constexpr double kLog2E = 1.4426950408889634074;

template <class Real>
FOVEA_HOST_DEVICE inline Real kda_sigmoid(Real x) {
  return Real(1) / (Real(1) + std::exp(-x));
}

template <class Real>
FOVEA_HOST_DEVICE inline Real kda_softplus(Real x) {
  return x > Real(20) ? x : std::log1p(std::exp(x));
}

/// Natural log decay of input `a` (raw g plus dt_bias) at rate exp(a_log).
template <class Real>
FOVEA_HOST_DEVICE inline Real kda_log_decay(GateKind kind, float lower_bound, Real a, Real rate) {
  switch (kind) {
    case GateKind::kSoftplus:
      return -rate * kda_softplus(a);
    case GateKind::kLowerBound:
      return static_cast<Real>(lower_bound) * kda_sigmoid(rate * a);
    case GateKind::kGiven:
      break;
  }
  return a;
}

/// The same log decay in base 2, not below kKdaLeastLog2Decay; NaN stays NaN.
FOVEA_HOST_DEVICE inline float kda_log2_decay(float log_decay) {
  const float log2_decay = log_decay * static_cast<float>(kLog2E);
  return log2_decay < kKdaLeastLog2Decay ? kKdaLeastLog2Decay : log2_decay;
}

template <class Real>
FOVEA_HOST_DEVICE inline Real kda_beta(BetaKind kind, bool allow_neg_eigval, Real b) {
  if (kind == BetaKind::kProb) return b;
  return (allow_neg_eigval ? Real(2) : Real(1)) * kda_sigmoid(b);
}

/// What the channels of a vector with this sum of squares are multiplied by.
template <class Real>
FOVEA_HOST_DEVICE inline Real kda_inverse_norm(Real sum_of_squares) {
  return Real(1) / std::sqrt(sum_of_squares + static_cast<Real>(kKdaNormEpsilon));
}

/// The factor of q: layer.scale, or K^-1/2.
inline double kda_scale(const KdaLayer& layer) {
  return layer.scale != 0 ? static_cast<double>(layer.scale)
                          : 1.0 / std::sqrt(static_cast<double>(layer.head_dim_k));
}

}  // namespace fovea::internal
