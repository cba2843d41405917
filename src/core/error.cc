#include "fovea/error.h"

#include <utility>

namespace fovea {

std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kOutOfMemory:
      return "out_of_memory";
    case ErrorCode::kDevice:
      return "device";
    case ErrorCode::kIo:
      return "io";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "?";
}

Error::Error(ErrorCode code, std::string message) : code_(code) {
  text_ = std::string(to_string(code)) + ": " + std::move(message);
}

}  // namespace fovea
