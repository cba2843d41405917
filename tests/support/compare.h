#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/compare.h"
#include "fovea/tensor.h"

namespace fovea::test {

using fovea::Tolerance;

// Output in bf16 (epsilon 2^-8, half an ulp 2^-9 relative): one rounding of the result, P rounded
// to bf16 in some implementations, and fp32 accumulation.
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

/// Relative root mean square of the difference.
double relative_rms(std::span<const double> actual, std::span<const double> reference);

}  // namespace fovea::test
