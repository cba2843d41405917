#pragma once

#include <algorithm>

#include "fovea/build_page_table.h"
#include "src/core/access.h"

/// The implementations of build_page_table.
namespace fovea::internal {

size_t build_page_table_cpu_workspace(const BuildPageTableProblem& problem, const Device& device);
void build_page_table_cpu(const BuildPageTableProblem& problem, const Device& device,
                          const BuildPageTableTensors& tensors, Workspace workspace);
void build_page_table_ref(const BuildPageTableProblem& problem, const Device& device,
                          const BuildPageTableTensors& tensors, Workspace workspace);

void build_page_table_cuda_portable(const BuildPageTableProblem& problem, const Device& device,
                                    const BuildPageTableTensors& tensors, Workspace workspace,
                                    Stream stream);

/// The map and the lengths, as every implementation reads them.
struct PageTableSource {
  Accessor<const int32_t, 2> req_to_token;
  Accessor<const int32_t, 1> pool_row, kv_len;
  int64_t page_size, delta, max_pages;

  /// Pages of request r.
  FOVEA_HOST_DEVICE int64_t page_count(int64_t r) const {
    const int64_t row = pool_row(r);
    if (kv_len(r) <= 0 || row < 0 || row >= req_to_token.shape[0]) return 0;
    int64_t tokens = kv_len(r) + delta;
    if (tokens > req_to_token.shape[1]) tokens = req_to_token.shape[1];
    if (tokens <= 0) return 0;
    const int64_t pages = (tokens + page_size - 1) / page_size;
    return pages < max_pages ? pages : max_pages;
  }

  /// Page p < page_count(r) of request r.
  FOVEA_HOST_DEVICE int32_t page(int64_t r, int64_t p) const {
    const int32_t slot = req_to_token(pool_row(r), p * page_size);
    return slot < 0 ? -1 : static_cast<int32_t>(slot / page_size);
  }
};

inline PageTableSource page_table_source(const BuildPageTableProblem& problem,
                                         const BuildPageTableTensors& tensors) {
  return {access<const int32_t, 2>(tensors.req_to_token),
          access<const int32_t, 1>(tensors.pool_row),
          access<const int32_t, 1>(tensors.kv_len),
          problem.page_size,
          problem.delta,
          tensors.page_table.shape[1]};
}

}  // namespace fovea::internal
