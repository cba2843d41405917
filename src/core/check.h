#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "fovea/error.h"
#include "fovea/tensor.h"

/// Checks of arguments at the boundary, with messages in one form.
namespace fovea::internal {

/// Throws Error(kInvalidArgument, "<op>: <what>").
[[noreturn]] void invalid(const char* op, const std::string& what);

/// Throws Error(kUnsupported, "<op>: <what>").
[[noreturn]] void unsupported(const char* op, const std::string& what);

/// The largest value of an i32 tensor.
inline constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

/// In a shape list: any extent is accepted on this axis.
inline constexpr int64_t kAnyExtent = -1;

/// Requires a defined tensor of this type and shape, last axis contiguous, no negative stride, data
/// where there are elements.
void check_tensor(const char* op, const char* name, const ConstTensorView& tensor, DType dtype,
                  std::initializer_list<int64_t> shape);

/// The same for an optional tensor: absent is fine.
void check_optional(const char* op, const char* name, const ConstTensorView& tensor, DType dtype,
                    std::initializer_list<int64_t> shape);

/// Requires lowest <= value <= highest.
void check_range(const char* op, const char* name, int64_t value, int64_t lowest, int64_t highest);

/// Requires a finite value > 0.
void check_positive_finite(const char* op, const char* name, double value);

/// Narrows an integer; throws Error(kInternal) when the value does not fit.
template <class To, class From>
To checked_cast(From value) {
  const To narrow = static_cast<To>(value);
  if (static_cast<From>(narrow) != value || ((narrow < To{}) != (value < From{}))) {
    throw Error(ErrorCode::kInternal,
                "checked_cast: " + std::to_string(value) + " does not fit its target type");
  }
  return narrow;
}

#if defined(FOVEA_DEBUG_CHECKS)
#define FOVEA_DCHECK(condition)                                                             \
  do {                                                                                      \
    if (!(condition))                                                                       \
      throw ::fovea::Error(::fovea::ErrorCode::kInternal, "broken invariant: " #condition); \
  } while (false)
#else
#define FOVEA_DCHECK(condition) \
  do {                          \
  } while (false)
#endif

}  // namespace fovea::internal
