#pragma once

#include <functional>
#include <string_view>

#include "fovea/export.h"

namespace fovea {

/// Rising importance. kDispatch: which implementation runs and which refused, each fact once.
/// kWarning: something works but not as asked. kError: a failure that is also reported as an Error,
/// or a fallback after one.
enum class LogLevel { kDispatch, kWarning, kError };

using LogSink = std::function<void(LogLevel level, std::string_view message)>;

/// Replaces the sink of the process; an empty function silences it (the default). Thread-safe; the
/// sink may be called from any thread, one call at a time. What is logged once is logged once per
/// sink.
FOVEA_API void set_log_sink(LogSink sink);

}  // namespace fovea
