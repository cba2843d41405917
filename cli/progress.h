#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fovea::cli {

/// One line on stderr that is rewritten in place; silent unless stderr is a terminal.
class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar();  ///< Clears the line.
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// `done` of `total`, with a text behind the bar. Redraws at most ten times a second.
  void update(int64_t done, int64_t total, const std::string& text);

 private:
  bool is_terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace fovea::cli
