#pragma once

#include <limits>
#include <span>
#include <string>

#include "fovea/export.h"
#include "fovea/tensor.h"

namespace fovea {

/// How far a result may be from its reference. An element passes when |a - r| <= absolute or |a -
/// r| <= relative * |r|; the whole tensor is bounded too, unless the limit is left at infinity. All
/// defaults: every element equal (-0 and +0 are).
struct Tolerance {
  double absolute = 0;
  double relative = 0;
  /// Of sqrt(sum (a - r)^2 / sum r^2).
  double relative_rms = std::numeric_limits<double>::infinity();
  /// Of 1 - 2<a,r> / (<a,a> + <r,r>); not looked at when <r,r> < 1e-12.
  double cosine = std::numeric_limits<double>::infinity();
};

/// The outcome of a comparison.
struct Comparison {
  bool close = true;
  double relative_rms = 0;  ///< Over the finite elements.
  std::string
      detail;  ///< When not close: the share of failures and the worst element with both values, or
               ///< the measure of the whole tensor that is too large, or the shapes that differ.
};

/// Compares two tensors of one type and shape, strides honoured. NaN and infinities must coincide
/// in place and sign; finite elements follow `tolerance`. Another type or shape is a mismatch,
/// never an error.
FOVEA_API Comparison compare(const ConstTensorView& actual, const ConstTensorView& reference,
                             const Tolerance& tolerance);

/// The same for numbers at hand.
FOVEA_API Comparison compare(std::span<const double> actual, std::span<const double> reference,
                             const Tolerance& tolerance);

}  // namespace fovea
