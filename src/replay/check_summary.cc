#include "src/replay/check_summary.h"

#include <cmath>
#include <cstdio>
#include <set>

namespace fovea {
namespace internal {

bool is_worse(double value, double worst) { return !std::isnan(worst) && !(value <= worst); }

std::string error_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

void summarize_check(std::span<const CheckedRow> rows, CheckSummary* summary) {
  constexpr size_t kMaxFailures = 32;
  std::set<int64_t> requests;
  for (const auto& [row, verdict] : rows) {
    requests.insert(row.request);
    ++summary->rows;
    ++(row.decode ? summary->rows_decode : summary->rows_prefill);
    summary->rows_selecting += verdict.selecting ? 1 : 0;
    summary->mismatches += verdict.failures.empty() ? 0 : 1;
    const auto raise = [](double value, double* worst) {
      if (is_worse(value, *worst)) *worst = value;
    };
    summary->rows_requantised += verdict.requantised ? 1 : 0;
    raise(verdict.worst_rms, &summary->worst);
    raise(verdict.worst_lse, &summary->worst_lse);
    raise(verdict.selection_slack, &summary->selection_slack);
    for (const CheckFailure& failure : verdict.failures) {
      if (summary->failures.size() < kMaxFailures) summary->failures.push_back(failure);
    }
  }
  summary->requests = static_cast<int64_t>(requests.size());
}

}  // namespace internal

std::string CheckFailure::message() const {
  return "request " + std::to_string(request) + ", position " + std::to_string(position) +
         ", layer " + std::to_string(layer) + " (" + layer_kind + "), " + op + ": " + kind + ": " +
         detail;
}

}  // namespace fovea
