#pragma once

#include <string_view>

#include "fovea/log.h"

namespace fovea::internal {

/// Hands `message` to the sink of the process.
void log(LogLevel level, std::string_view message);

/// The same, once per distinct message in the life of the process.
void log_once(LogLevel level, std::string_view message);

}  // namespace fovea::internal
