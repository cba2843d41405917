#pragma once

#include <cstdint>

#include "src/core/cuda/mbarrier.cuh"

/// Copies of whole panels (wgmma.cuh) from global memory that one thread starts and hardware makes
/// (compute capability 9.0).
namespace fovea::internal::cuda {

/// Where rows of 128 bytes lie in global memory, `rows` side by side in each of `pages`. A
/// parameter of a kernel, as __grid_constant__.
struct alignas(64) PanelMap {
  uint64_t words[16];
};

/// For copies of `box_rows` rows, at most 256. `data` and `page_stride_bytes` are multiples of 16.
/// Throws Error(kDevice) that names the operator.
PanelMap make_panel_map(const char* op, const void* data, int64_t rows, int64_t pages,
                        int64_t page_stride_bytes, int box_rows);

/// Starts to bring the map itself.
__device__ inline void prefetch_map(const PanelMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Copies box_rows rows from row `row` of page `page` on to a panel, or from a multiple of 8 rows
/// of one on, zeros past the last row of the page, and counts their bytes at `full`, which expects
/// them (mbarrier_arrive_expecting). What read that place before must be behind a barrier of the
/// block.
__device__ inline void copy_panel(void* to, const PanelMap& map, int row, int page,
                                  Mbarrier& full) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(0), "r"(row), "r"(page), "r"(shared_address(&full))
      : "memory");
}

}  // namespace fovea::internal::cuda
