#pragma once

#include "fovea/compare.h"
#include "fovea/tensor.h"

/// The limits of `fovea verify`.
namespace fovea::cli {

// One rounding to bf16 (8 bits: 2^-8 relative at most) of the result and sums in fp32; 5e-3 is the
// project's limit for a bf16 output.
inline constexpr Tolerance kBf16Tolerance{1e-3, 2.01 / 128, 5e-3};
// The same where an implementation may round the weights to bf16 for the product with the values:
// each then errs by up to 2^-8 of itself, hence the output by up to 2^-8 of the weights' mean of
// |v|, and that stays below 1 in the problems of verify.
inline constexpr Tolerance kBf16ProductTolerance{4e-3, 2.01 / 128, 5e-3};
// The same for standard normal values, where that mean may reach 2 if keys are few.
inline constexpr Tolerance kBf16NormalProductTolerance{8e-3, 2.01 / 128, 5e-3};
// fp32 sums of a few thousand terms.
inline constexpr Tolerance kFp32Tolerance{1e-5, 1e-4, 1e-5};
inline constexpr Tolerance kExact{};

/// Whether shape, type and every byte are the same.
bool same_bytes(const ConstTensorView& a, const ConstTensorView& b);

}  // namespace fovea::cli
