#pragma once

#include <cstdint>

#include "fovea/metadata.h"
#include "src/core/cuda/scan.cuh"

/// The two work schedules, written by one block from the cumulative work of the rows.
namespace fovea::internal::cuda {

inline constexpr int kScheduleThreads = 512;

struct PagedScheduleOut {
  int32_t* schedule;  // [workers+1, 2]
  int64_t stride;     // of axis 0
  int64_t workers;
};

/// `segments_before` [groups+1]: 256-token segments of the groups before each one.
__device__ inline void write_paged_schedule(const int64_t* segments_before, int64_t groups,
                                            const PagedScheduleOut& out) {
  const int64_t total = segments_before[groups];
  const int64_t quotient = total / out.workers;
  const int64_t first_longer = out.workers - total % out.workers;
  for (int64_t i = threadIdx.x; i <= out.workers; i += blockDim.x) {
    int64_t group = 0, segment = 0;
    if (i == out.workers) {
      group = groups;
    } else if (total > 0) {
      const int64_t start = i * quotient + (i > first_longer ? i - first_longer : 0);
      // start < total: the last group that begins at or before it and is not empty holds it.
      group = count_up_to([&](int64_t g) { return segments_before[g]; }, groups + 1, start) - 1;
      segment = start - segments_before[group];
    }
    out.schedule[i * out.stride] = static_cast<int32_t>(group);
    out.schedule[i * out.stride + 1] = static_cast<int32_t>(segment);
  }
}

struct SplitScheduleOut {
  int32_t* schedule;  // [parts, 8]
  int64_t stride;     // of axis 0
  int32_t* indptr;    // [rows+1]
  int64_t parts;
};

/// Blocks and overhead of the rows before row r: the array for the live rows; behind them stands
/// padding, one block each.
struct CostBefore {
  const int64_t* values;  // [live_rows + 1]
  int64_t live_rows;

  __device__ int64_t operator()(int64_t row) const {
    if (row <= live_rows) return values[row];
    return values[live_rows] + (row - live_rows) * (1 + kSplitOverheadBlocks);
  }
};

__device__ inline void write_split_schedule(const CostBefore& cost_before, int64_t rows,
                                            const SplitScheduleOut& out) {
  const auto blocks = [&](int64_t row) {
    return cost_before(row + 1) - cost_before(row) - kSplitOverheadBlocks;
  };
  const auto line = [&](int64_t part) { return out.schedule + part * out.stride; };
  if (threadIdx.x == 0) {
    // Where a part begins depends on how full the one before it became.
    const int64_t full_budget =
        (cost_before(rows) + out.parts - 1) / out.parts + kSplitOverheadBlocks;
    int64_t row = 0, block = 0;
    int32_t split = 0;  // pieces of `row` so far
    for (int64_t p = 0; p < out.parts; ++p) {
      SplitPart part{};
      part.first_row = static_cast<int32_t>(row);
      part.last_row = static_cast<int32_t>(rows - 1);
      part.first_block = static_cast<int32_t>(block);
      part.first_split = split;
      part.first_is_split = split > 0 ? 1 : 0;
      // Whole rows: up to the last whose cost fits.
      const int64_t reach = cost_before(row) + block + full_budget;
      const int64_t end = count_up_to(cost_before, rows + 1, reach) - 1;
      int64_t budget = full_budget;
      if (end > row) {
        budget -= cost_before(end) - cost_before(row) - block;
        part.last_row = static_cast<int32_t>(end - 1);
        part.end_block = static_cast<int32_t>(blocks(end - 1));
        part.last_is_split = end - 1 == row && split > 0 ? 1 : 0;
        row = end;
        block = 0;
        split = 0;
      }
      if (row < rows && budget > kSplitOverheadBlocks) {
        block += budget - kSplitOverheadBlocks;
        ++split;
        part.last_row = static_cast<int32_t>(row);
        part.end_block = static_cast<int32_t>(block);
        part.last_is_split = 1;
        if (part.first_row == part.last_row) part.first_is_split = 1;
      }
      int32_t* const to = line(p);
      to[0] = part.first_row;
      to[1] = part.last_row;
      to[2] = part.first_block;
      to[3] = part.end_block;
      to[4] = part.first_split;
      to[5] = part.first_is_split;
      to[6] = part.last_is_split;
      to[7] = 0;
    }
  }
  __syncthreads();
  for (int64_t r = threadIdx.x; r <= rows; r += blockDim.x) {
    int64_t pieces = 0;  // of the rows before r
    for (int64_t p = 0; p < out.parts && r > 0; ++p) {
      const int64_t first = line(p)[0];
      const int64_t last = line(p)[1] < r - 1 ? line(p)[1] : r - 1;
      if (last >= first) pieces += last - first + 1;
    }
    out.indptr[r] = static_cast<int32_t>(pieces);
  }
}

}  // namespace fovea::internal::cuda
