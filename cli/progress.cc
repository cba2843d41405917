#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace fovea::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr const char* kClearLine = "\r\x1b[K";

}  // namespace

ProgressBar::ProgressBar() : is_terminal_(isatty(STDERR_FILENO) != 0) {}

ProgressBar::~ProgressBar() {
  if (drawn_) fmt::print(stderr, "{}", kClearLine);
}

void ProgressBar::update(int64_t done, int64_t total, const std::string& text) {
  const auto now = std::chrono::steady_clock::now();
  if (!is_terminal_ || (drawn_ && now - last_ < std::chrono::milliseconds(100))) return;
  const double share =
      total > 0 ? std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0) : 0;
  const auto filled = static_cast<int>(share * kBarWidth);
  fmt::print(stderr, "{}[{:#<{}}{:.<{}}] {:3.0f} % {}", kClearLine, "", filled, "",
             kBarWidth - filled, 100 * share, text);
  std::fflush(stderr);
  drawn_ = true;
  last_ = now;
}

}  // namespace fovea::cli
