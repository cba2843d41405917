#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "fovea/compare.h"
#include "fovea/tensor.h"

namespace fovea::test {

using fovea::Tolerance;

// Output in bf16 (8 bits, so that rounding adds up to 2^-8): one rounding of the result and fp32
// accumulation.
inline constexpr Tolerance kBf16Output{.absolute = 1e-3, .relative = 2.01 / 128, .cosine = 7e-6};
// fp32 lse of sums of a few thousand terms: a handful of fp32 roundings of values of order 10.
inline constexpr Tolerance kLse{.absolute = 1e-5, .relative = 8.01 / 65536, .cosine = 1e-7};

/// NaN and infinities must coincide in place and sign; everything else by `tolerance`. On failure
/// the text gives the worst element, both values, the share of failing elements and the cosine
/// distance.
testing::AssertionResult ExpectClose(std::span<const double> actual,
                                     std::span<const double> reference, const Tolerance& tolerance);

/// The elements of any tensor (f32, bf16, i32, i64, u8) in row-major order, strides honoured.
std::vector<double> to_doubles(const ConstTensorView& tensor);

inline testing::AssertionResult ExpectClose(const ConstTensorView& actual,
                                            const ConstTensorView& reference,
                                            const Tolerance& tolerance) {
  return ExpectClose(to_doubles(actual), to_doubles(reference), tolerance);
}

/// Whether an implementation of attention rounds each softmax weight to bf16 before it multiplies a
/// value: those of GPUs. Sums of weights are of unrounded ones everywhere.
inline bool rounds_weights(std::string_view implementation) {
  return implementation.starts_with("cuda");
}

/// Most that the output sum_j w_j v_j / sum_j w_j (times what a sink leaves) may be off where each
/// w_j that multiplies a value was rounded to bf16: by up to 2^-8 of itself, so that the sum is off
/// by up to 2^-8 of `magnitude`, the same formula over |v_j|; then the sum itself is rounded. 2^-13
/// more is for fp32: exponentials of logits of order 100, and their sums.
inline double rounded_weights_limit(double reference, double magnitude) {
  return 0x1p-8 * (std::fabs(reference) + magnitude) + 0x1p-13 * magnitude;
}

/// ExpectClose for outputs of attention. With `num_rounded` of the two from rounded weights, an
/// element passes by `tolerance` or by as many limits as above.
testing::AssertionResult ExpectCloseOutputs(std::span<const double> actual,
                                            std::span<const double> reference,
                                            std::span<const double> magnitude, int num_rounded,
                                            const Tolerance& tolerance);

/// Relative root mean square of the difference.
double relative_rms(std::span<const double> actual, std::span<const double> reference);

}  // namespace fovea::test
