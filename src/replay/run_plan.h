#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "src/replay/scheduler.h"
#include "src/replay/workload.h"

/// What a run will do, found by a dry run of the scheduler: the real run forms the same steps.
namespace fovea::internal {

/// One row to be recomputed.
struct CheckRow {
  int64_t request = 0;
  int64_t position = 0;
  int64_t layer = 0;  ///< Index into the simulated layers.
  bool decode = false;

  friend bool operator<(const CheckRow& a, const CheckRow& b) {
    return std::tie(a.request, a.position, a.layer) < std::tie(b.request, b.position, b.layer);
  }
};

/// A fault to be made in step `step`, on purpose.
struct Fault {
  int64_t step = -1;  ///< -1: none.
  std::string kind;   ///< One of ModelSpec::injections.
  int64_t request = 0;
  int64_t page = 0;  ///< Of the request; what it means beside "page" is the family's.
};

/// A fault that the rows of an entry could take.
struct FaultCandidate {
  int rank = 0;  ///< The first one with the highest rank is made.
  int64_t page = 0;
  int64_t position = 0;     ///< A row that it hits: is always checked.
  int64_t layer_index = 0;  ///< There.
};

struct RunPlan {
  int64_t num_steps = 0;
  int64_t num_rows = 0;
  int64_t max_step_rows = 0;
  int64_t max_step_requests = 0;
  std::vector<CheckRow> check_rows;  ///< Sorted, distinct in (request, position).
  Fault fault;
};

struct RunPlanOptions {
  int64_t check_rows = 0;
  int64_t selecting_length = 0;  ///< Rows longer than this select.
  int64_t num_layers = 0;
  uint64_t seed = 0;
  std::string inject;  ///< Kind of the fault to be made; empty: none.
  std::function<std::optional<FaultCandidate>(const StepEntry&)> find_fault;  ///< With `inject`.
};

/// Runs `scheduler` to its end without computing anything.
///
/// Rows to check are drawn from the rows that a request computes for the first time and that stay,
/// by a seeded reservoir for each of four strata: prefill and decode, selecting and not. Selecting
/// rows get four fifths of the places, each kind half; what a stratum cannot fill goes to the
/// others. In a stratum every request has about the same chance, however long it is. Layers take
/// turns.
///
/// Throws Error(kInvalidArgument) when `inject` finds no step that it could hit.
RunPlan plan_run(const RunPlanOptions& options, const Workload& workload, Scheduler* scheduler);

/// Which rows of a step count: those that stay and are computed for the first time.
class RowFilter {
 public:
  /// Keeps references.
  RowFilter(const RunPlan& plan, const std::vector<int64_t>& digest_from)
      : plan_(plan), digest_from_(digest_from) {}

  bool enters_digest(const StepEntry& entry, int64_t position) const {
    return is_kept(entry, position) && position >= digest_from_[static_cast<size_t>(entry.request)];
  }

  /// The row of the plan that is to be checked there, or null.
  const CheckRow* sampled(const StepEntry& entry, int64_t position, int64_t layer_index) const;

 private:
  static bool is_kept(const StepEntry& entry, int64_t position) {
    return position >= entry.first_new && position < entry.kept_end;
  }

  const RunPlan& plan_;
  const std::vector<int64_t>& digest_from_;
};

}  // namespace fovea::internal
