#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "src/replay/row_inputs.h"
#include "src/replay/scheduler.h"

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

/// In step `step`, page `page` of `request` is read from a wrong place (`inject = page`).
struct PageFault {
  int64_t step = -1;  ///< -1: none.
  int64_t request = 0;
  int64_t page = 0;
};

struct RunPlan {
  int64_t num_steps = 0;
  int64_t num_rows = 0;
  int64_t max_step_rows = 0;
  int64_t max_step_requests = 0;
  std::vector<CheckRow> check_rows;  ///< Sorted, distinct in (request, position).
  PageFault page_fault;
};

struct RunPlanOptions {
  int64_t check_rows = 0;
  int64_t topk = 0;
  int64_t page_size = 0;
  std::vector<int64_t> layers;  ///< Model layer ids, those of the target first.
  uint64_t seed = 0;
  bool inject_page = false;
};

/// Runs `scheduler` to its end without computing anything.
///
/// Rows to check are drawn from the rows that a request computes for the first time and that stay,
/// by a seeded reservoir for each of four strata: prefill and decode, longer than topk and not.
/// Long rows get four fifths of the places, each kind half; what a stratum cannot fill goes to the
/// others. In a stratum every request has about the same chance, however long it is. Layers take
/// turns.
///
/// Throws Error(kInvalidArgument) when inject_page finds no step whose request has a page to
/// corrupt.
RunPlan plan_run(const RunPlanOptions& options, const RowInputs& inputs, Scheduler* scheduler);

}  // namespace fovea::internal
