#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fovea/replay.h"
#include "src/replay/run_plan.h"

/// What checking a row found, whatever the model.
namespace fovea::internal {

/// Relative rms of a head's output. The result is rounded to bf16 and, by some implementations,
/// each weight for the product with the values (2^-8 of itself at most). Values of different tokens
/// are nearly orthogonal, so that the squares of the errors w_j d_j |v_j| add up as those of the
/// output w_j |v_j| do: the share is the rms of the d_j, 1.7e-3 for many weights and 2^-8 = 3.9e-3
/// at most for one. With 1.7e-3 for the result that is 4.3e-3 at most.
inline constexpr double kOutputTolerance = 5e-3;
inline constexpr double kLseTolerance = 1e-3;  ///< Absolute.

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
