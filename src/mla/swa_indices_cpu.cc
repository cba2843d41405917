#include <algorithm>

#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "src/mla/request_ranges.h"
#include "src/mla/swa_indices_impl.h"

// Rows are shared out; a row walks over its window page by page, with one look into the table for
// each.
namespace fovea::internal {
namespace {

constexpr int64_t kTaskRows = 64;

int32_t fill_row(const WindowTable& table, int64_t request, int64_t p, int64_t width,
                 int32_t* indices) {
  const int64_t first = table.first_token(p);
  int64_t count = 0;
  for (int64_t token = first; token <= p;) {
    const int64_t end = std::min(p + 1, (token / table.page_size + 1) * table.page_size);
    const int32_t slot = table.slot(request, token);
    // Slots of a page follow one another, unless some of them do not fit.
    const bool follows = slot >= 0 && table.slot(request, end - 1) >= 0;
    for (const int64_t start = token; token < end; ++token, ++count) {
      indices[count] =
          follows ? slot + static_cast<int32_t>(token - start) : table.slot(request, token);
    }
  }
  std::fill(indices + count, indices + width, -1);
  return static_cast<int32_t>(count);
}

}  // namespace

size_t swa_indices_cpu_workspace(const SwaIndicesProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<int64_t>(problem.max_requests + 1);
  return cutter.used_bytes();
}

void swa_indices_cpu(const SwaIndicesProblem& problem, const Device& device,
                     const SwaIndicesTensors& tensors, Workspace workspace) {
  const WindowTable table(problem, tensors);
  const auto indices = access<int32_t, 2>(tensors.indices);
  const auto row_len = access<int32_t, 1>(tensors.row_len);
  const int64_t requests = table.kv_len.shape[0];
  auto* const begin_of = WorkspaceCutter(workspace).take<int64_t>(problem.max_requests + 1);
  RequestRanges ranges(static_cast<const int32_t*>(tensors.q_indptr.data), indices.shape[0]);
  for (int64_t r = 0; r < requests; ++r) {
    const RequestRange rows = ranges.next();
    begin_of[r] = rows.begin;
    begin_of[r + 1] = rows.end;
  }
  const ThreadScope threads(device.num_threads);
  ParallelFor(indices.shape[0], kTaskRows, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      // The last request that begins at or before the row: those without rows are passed over.
      const int64_t r =
          requests == 0 ? -1 : std::upper_bound(begin_of, begin_of + requests, t) - begin_of - 1;
      const bool owned = r >= 0 && t < begin_of[r + 1];
      const int64_t p =
          owned ? table.position(r, t - begin_of[r], begin_of[r + 1] - begin_of[r], t) : -1;
      row_len(t) = fill_row(table, r, p, problem.width, indices.row(t));
    }
  });
}

}  // namespace fovea::internal
