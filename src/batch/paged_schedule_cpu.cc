#include <algorithm>

#include "src/batch/paged_schedule_impl.h"
#include "src/core/access.h"

namespace fovea::internal {

// Worker starts ascend, so that one walk over the groups serves all of them: O(groups + workers).
void paged_schedule_cpu(const PagedScheduleProblem& problem, const Device&,
                        const PagedScheduleTensors& tensors, Workspace) {
  const auto row_len = access<const int32_t, 1>(tensors.row_len);
  const auto schedule = access<int32_t, 2>(tensors.schedule);
  const int64_t n = problem.rows_per_group;
  const int64_t groups = row_len.shape[0] / n;
  const auto segments = [&](int64_t g) { return schedule_segments(row_len(g * n + n - 1)); };
  int64_t total = 0;
  for (int64_t g = 0; g < groups; ++g) total += segments(g);
  const int64_t quotient = total / problem.workers;
  const int64_t first_longer = problem.workers - total % problem.workers;
  int64_t group = 0;
  int64_t before = 0;
  for (int64_t i = 0; i < problem.workers; ++i) {
    const int64_t start = i * quotient + std::max<int64_t>(0, i - first_longer);
    // start < total, so that the walk ends inside the groups.
    while (total > 0) {
      const int64_t after = before + segments(group);
      if (after > start) break;
      before = after;
      ++group;
    }
    schedule(i, 0) = static_cast<int32_t>(group);
    schedule(i, 1) = static_cast<int32_t>(start - before);
  }
  schedule(problem.workers, 0) = static_cast<int32_t>(groups);
  schedule(problem.workers, 1) = 0;
}

}  // namespace fovea::internal
