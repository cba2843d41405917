#pragma once

#include <cstdint>
#include <string>

#include "fovea/tensor.h"

/// Comparison of a benchmark's result with the reference.
namespace fovea::bench {

/// Limits for every element (absolute or relative error) and for the whole tensor (root mean square
/// of the difference over that of the reference).
struct Closeness {
  double absolute = 0;
  double relative = 0;
  double relative_rms = 0;
};

// One rounding to bf16 (2^-9 relative) of values that differ by fp32 summation order, and
// probabilities rounded to bf16 in some implementations.
inline constexpr Closeness kBf16Output{1e-3, 2.0 / 128, 5e-3};
// fp32 results of sums of a few thousand terms.
inline constexpr Closeness kFp32Output{1e-4, 1.0 / 8192, 1e-5};
inline constexpr Closeness kExact{};

/// Empty when `actual` matches; otherwise one sentence with the number of wrong elements and the
/// worst one. NaN and infinities must coincide. Any dtype; strides are honoured.
std::string compare(const std::string& name, const ConstTensorView& actual,
                    const ConstTensorView& reference, const Closeness& closeness);

}  // namespace fovea::bench
