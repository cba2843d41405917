#include "src/core/log.h"

#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace fovea {
namespace {

struct LogState {
  std::mutex mutex;
  LogSink sink;
  std::set<std::string, std::less<>> said;
};

// Never destroyed: operators may log while other statics are going down.
LogState& state() {
  static LogState* const instance = new LogState;
  return *instance;
}

}  // namespace

void set_log_sink(LogSink sink) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().sink = std::move(sink);
  state().said.clear();
}

namespace internal {

void log(LogLevel level, std::string_view message) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (state().sink) state().sink(level, message);
}

void log_once(LogLevel level, std::string_view message) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (!state().sink || state().said.contains(message)) return;
  state().said.emplace(message);
  state().sink(level, message);
}

}  // namespace internal
}  // namespace fovea
