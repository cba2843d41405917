#pragma once

#include <string>

#include "fovea/tensor.h"

namespace fovea::cli {

/// What two tensors of one output may differ by. An element passes when |a - r| <= absolute or
/// |a - r| <= relative * |r|; the whole tensor by its relative rms. NaN and infinities must
/// coincide. All zero: every element equal (-0 and +0 are).
struct Tolerance {
  double absolute = 0;
  double relative = 0;
  double rms = 0;
};

// One rounding to bf16 (half an ulp is 2^-9 relative) of the result, sums in fp32, and
// probabilities rounded to bf16 in some implementations; 5e-3 is the project's limit for a bf16
// output.
inline constexpr Tolerance kBf16Tolerance{1e-3, 2.01 / 128, 5e-3};
// fp32 sums of a few thousand terms.
// The same where an implementation may round the probabilities to bf16 for the second product: each
// then errs by 2^-9 of itself, hence the output by up to 2^-9 * max |v|, and |v| stays below 2 in
// the problems of verify.
inline constexpr Tolerance kBf16ProductTolerance{4e-3, 2.01 / 128, 5e-3};
inline constexpr Tolerance kFp32Tolerance{1e-5, 1e-4, 1e-5};
inline constexpr Tolerance kExact{};

struct Comparison {
  bool equal = true;
  double rms = 0;      ///< Relative rms of the difference over finite elements.
  std::string detail;  ///< The worst element, when not equal.
};

/// Compares packed tensors of one type and shape; other types or shapes are a mismatch.
Comparison compare(const ConstTensorView& actual, const ConstTensorView& expected,
                   const Tolerance& tolerance);

/// Whether shape, type and every byte are the same.
bool same_bytes(const ConstTensorView& a, const ConstTensorView& b);

}  // namespace fovea::cli
