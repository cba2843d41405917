#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/export.h"
#include "fovea/swa_indices.h"
#include "src/core/access.h"
#include "src/core/implementation_list.h"

/// The implementations of build_swa_indices, and what they compute for one column.
namespace fovea::internal {

void swa_indices_ref(const SwaIndicesProblem& problem, const Device& device,
                     const SwaIndicesTensors& tensors, Workspace workspace);
size_t swa_indices_cpu_workspace(const SwaIndicesProblem& problem, const Device& device);
void swa_indices_cpu(const SwaIndicesProblem& problem, const Device& device,
                     const SwaIndicesTensors& tensors, Workspace workspace);
size_t swa_indices_cuda_workspace(const SwaIndicesProblem& problem, const Device& device);
void swa_indices_cuda_portable(const SwaIndicesProblem& problem, const Device& device,
                               const SwaIndicesTensors& tensors, Workspace workspace,
                               Stream stream);

/// The tables of a call.
struct WindowTable {
  int64_t window;
  int64_t page_size;
  int64_t pages;  ///< -1: unknown
  WindowStorage storage;
  Accessor<const int32_t, 1> kv_len;
  Accessor<const int32_t, 2> page_table;
  Accessor<const uint8_t, 1> row_valid;  ///< May be absent.

  WindowTable() = default;
  WindowTable(const SwaIndicesProblem& problem, const SwaIndicesTensors& tensors)
      : window(problem.window),
        page_size(problem.page_size),
        pages(problem.pages),
        storage(problem.storage),
        kv_len(access<const int32_t, 1>(tensors.kv_len)),
        page_table(access<const int32_t, 2>(tensors.page_table)),
        row_valid(access<const uint8_t, 1>(tensors.row_valid)) {}

  /// The position of row i of the n rows of a request, the t-th of the call; -1: padding.
  FOVEA_HOST_DEVICE int64_t position(int64_t request, int64_t i, int64_t n, int64_t t) const {
    const int64_t p = kv_len(request) - n + i;
    return p < 0 || (row_valid && row_valid(t) == 0) ? -1 : p;
  }

  FOVEA_HOST_DEVICE int64_t first_token(int64_t p) const { return p < window ? 0 : p - window + 1; }

  /// -1: nowhere.
  FOVEA_HOST_DEVICE int32_t slot(int64_t request, int64_t token) const {
    const int64_t column = storage == WindowStorage::kRing ? 0 : token / page_size;
    if (column >= page_table.shape[1]) return -1;
    const int64_t page = page_table(request, column);
    if (page < 0 || (pages >= 0 && page >= pages)) return -1;
    const int64_t index = page * page_size + token % page_size;
    return index > 0x7FFFFFFF ? -1 : static_cast<int32_t>(index);
  }
};

}  // namespace fovea::internal
