#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "fovea/export.h"

namespace fovea {

/// The closed list of reasons for which the library throws.
enum class ErrorCode {
  kInvalidArgument,  ///< A shape, type, option or host value is outside the documented domain.
  kUnsupported,      ///< Legal, but no implementation (or not the forced one) does it.
  kOutOfMemory,      ///< A pool, workspace or cache is too small; the message names bytes or pages.
  kDevice,           ///< The device or its driver failed.
  kIo,               ///< A file is missing, unreadable, malformed or cannot be written.
  kMismatch,         ///< A verification that was asked for found a difference.
  kInternal,         ///< A broken invariant of the library itself: please report it.
};

/// The word used in messages, files and exit texts, e.g. "invalid_argument".
FOVEA_API std::string_view to_string(ErrorCode code) noexcept;

/// The only exception type the library throws. It is thrown from plan(), loaders and readers, and
/// from run() for tensors that do not match their plan, always before anything is written.
///
/// what() reads "<code word>: <operator>: <argument> = <found>, expected <expected>; <way out>".
class FOVEA_API Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message);

  ErrorCode code() const noexcept { return code_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  ErrorCode code_;
  std::string text_;
};

}  // namespace fovea
