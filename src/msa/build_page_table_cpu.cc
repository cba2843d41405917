#include <algorithm>

#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "src/msa/build_page_table_impl.h"

// One read of the map per page, page_size entries apart: memory latency decides, which the
// processor hides by itself as no read depends on another. Requests are shared out among the
// threads.
namespace fovea::internal {

size_t build_page_table_cpu_workspace(const BuildPageTableProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<int32_t>(problem.max_requests + 1);
  return cutter.used_bytes();
}

void build_page_table_cpu(const BuildPageTableProblem& problem, const Device& device,
                          const BuildPageTableTensors& tensors, Workspace workspace) {
  const PageTableSource source = page_table_source(problem, tensors);
  const auto table = access<int32_t, 2>(tensors.page_table);
  const auto packed = access<int32_t, 1>(tensors.kv_indices);
  const auto indptr = access<int32_t, 1>(tensors.kv_page_indptr);
  const int64_t requests = table.shape[0];
  auto* before = WorkspaceCutter(workspace).take<int32_t>(problem.max_requests + 1);
  before[0] = 0;
  for (int64_t r = 0; r < requests; ++r) {
    // At most R * max_pages, which fits kv_indices; without it the sums may wrap and are not used.
    const auto count = static_cast<uint32_t>(source.page_count(r));
    before[r + 1] = static_cast<int32_t>(static_cast<uint32_t>(before[r]) + count);
  }
  const ThreadScope threads(device.num_threads);
  ParallelFor(requests, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t count = source.page_count(r);
      int32_t* row = table.row(r);
      for (int64_t p = 0; p < count; ++p) row[p] = source.page(r, p);
      std::fill(row + count, row + table.shape[1], 0);
      if (packed) std::copy(row, row + count, packed.data + before[r]);
    }
  });
  if (!packed) return;
  std::copy(before, before + requests + 1, indptr.data);
  std::fill(packed.data + before[requests], packed.data + packed.shape[0], 0);
}

}  // namespace fovea::internal
