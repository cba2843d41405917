#include <algorithm>

#include "src/batch/paged_schedule_impl.h"
#include "src/core/access.h"

namespace fovea::internal {

// Each worker on its own: its first segment by the formula, then a search through the groups.
void paged_schedule_ref(const PagedScheduleProblem& problem, const Device&,
                        const PagedScheduleTensors& tensors, Workspace) {
  const auto row_len = access<const int32_t, 1>(tensors.row_len);
  const auto schedule = access<int32_t, 2>(tensors.schedule);
  const int64_t n = problem.rows_per_group;
  const int64_t groups = row_len.shape[0] / n;
  const auto segments = [&](int64_t g) { return schedule_segments(row_len(g * n + n - 1)); };
  int64_t total = 0;
  for (int64_t g = 0; g < groups; ++g) total += segments(g);
  const int64_t quotient = total / problem.workers;
  const int64_t remainder = total % problem.workers;
  for (int64_t i = 0; i < problem.workers; ++i) {
    const int64_t start = i * quotient + std::max<int64_t>(0, i - (problem.workers - remainder));
    int64_t group = 0;
    int64_t before = 0;  // segments of the groups before `group`
    while (total > 0 && before + segments(group) <= start) before += segments(group++);
    schedule(i, 0) = static_cast<int32_t>(group);
    schedule(i, 1) = static_cast<int32_t>(total > 0 ? start - before : 0);
  }
  schedule(problem.workers, 0) = static_cast<int32_t>(groups);
  schedule(problem.workers, 1) = 0;
}

}  // namespace fovea::internal
