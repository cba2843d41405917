#pragma once

#include <string>
#include <string_view>

#include "fovea/compare.h"
#include "fovea/tensor.h"

/// Comparison of a benchmark's result with the reference.
namespace fovea::bench {

// One rounding to bf16 (2^-8 relative at most) of values that differ by fp32 summation order.
inline constexpr Tolerance kBf16Output{1e-3, 2.0 / 128, 5e-3};
// Attention whose weights were rounded to bf16 for the product with the values: an output is off by
// up to 2^-8 of the weights' mean of |value| more, which is below 1 for standard normals. The
// errors of many weights are nearly independent, as the values are, hence the same bound for all of
// it: an rms of about 1.7e-3 from the weights and as much from the result's own rounding.
inline constexpr Tolerance kRoundedWeightsOutput{4e-3, 2.0 / 128, 5e-3};
/// The limit for attention of an implementation.
inline const Tolerance& attention_tolerance(std::string_view implementation) {
  return implementation.starts_with("cuda") ? kRoundedWeightsOutput : kBf16Output;
}
// fp32 results of sums of a few thousand terms.
inline constexpr Tolerance kFp32Output{1e-4, 1.0 / 8192, 1e-5};
inline constexpr Tolerance kExact{};

/// Empty when `actual` matches; otherwise one sentence with the number of wrong elements and the
/// worst one, or the types or shapes that differ. NaN and infinities must coincide; strides are
/// honoured.
std::string difference_text(const std::string& name, const ConstTensorView& actual,
                            const ConstTensorView& reference, const Tolerance& tolerance);

}  // namespace fovea::bench
