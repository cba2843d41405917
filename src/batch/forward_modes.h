#pragma once

#include <string>

#include "fovea/metadata.h"
#include "src/core/check.h"

/// Groups of forward modes that agree in how they count rows.
namespace fovea::internal {

/// False for a value outside the enumeration.
inline bool is_known(ForwardMode mode) { return !to_string(mode).empty(); }

inline void check_mode(const char* op, ForwardMode mode) {
  if (is_known(mode)) return;
  invalid(op, "mode = " + std::to_string(static_cast<int>(mode)) +
                  ", expected one of the seven forward modes");
}

inline bool is_extend(ForwardMode mode) {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed;
}
inline bool is_decode(ForwardMode mode) {
  return mode == ForwardMode::kDecode || mode == ForwardMode::kIdle;
}
inline bool reads_ext_len(ForwardMode mode) {
  return is_extend(mode) || mode == ForwardMode::kDraftExtend;
}

}  // namespace fovea::internal
