#pragma once

#include <string>

#include "fovea/compare.h"
#include "fovea/tensor.h"

/// Comparison of a benchmark's result with the reference.
namespace fovea::bench {

// One rounding to bf16 (2^-9 relative) of values that differ by fp32 summation order, and
// probabilities rounded to bf16 in some implementations.
inline constexpr Tolerance kBf16Output{1e-3, 2.0 / 128, 5e-3};
// fp32 results of sums of a few thousand terms.
inline constexpr Tolerance kFp32Output{1e-4, 1.0 / 8192, 1e-5};
inline constexpr Tolerance kExact{};

/// Empty when `actual` matches; otherwise one sentence with the number of wrong elements and the
/// worst one, or the types or shapes that differ. NaN and infinities must coincide; strides are
/// honoured.
std::string difference_text(const std::string& name, const ConstTensorView& actual,
                            const ConstTensorView& reference, const Tolerance& tolerance);

}  // namespace fovea::bench
