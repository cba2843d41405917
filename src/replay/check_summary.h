#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fovea/replay.h"
#include "src/replay/run_plan.h"

/// What checking a row found, whatever the model.
namespace fovea::internal {

inline constexpr double kOutputTolerance = 5e-3;  ///< Relative rms of a head's output.
inline constexpr double kLseTolerance = 1e-3;     ///< Absolute.

struct CheckVerdict {
  bool selecting = false;
  double worst_rms = 0;
  double worst_lse = 0;
  double selection_slack = 0;
  bool requantised = false;  ///< Right for the run's own index codes only.
  std::vector<CheckFailure> failures;
};

struct CheckedRow {
  CheckRow row;
  CheckVerdict verdict;
};

/// Whether an error is worse than the worst so far; NaN is the worst of all.
bool is_worse(double value, double worst);

/// Six significant digits, for messages.
std::string error_text(double value);

/// Adds the rows to a summary.
void summarize_check(std::span<const CheckedRow> rows, CheckSummary* summary);

}  // namespace fovea::internal
