#pragma once

#include <cstdint>
#include <limits>

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

/// Where a part begins.
struct SplitStart {
  int32_t row, block;
  int32_t split;  // pieces of `row` in the parts before
  int32_t cuts;   // how many parts up to this one begin inside a row
};

/// Scratch of a split schedule.
struct SplitWork {
  SplitStart* starts;  // [parts+1]
  uint32_t* reached;   // [reached_size], may be null: where a part ends, by what it could reach
  int64_t reached_size;
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

/// Fills starts [parts+1], by one warp. Where a part begins depends on how full the one before it
/// became, so the parts are a chain: the lanes hold the costs before 32 rows, and a part that ends
/// among those takes a vote.
__device__ inline void walk_parts(const CostBefore& cost_before, int64_t rows, int64_t parts,
                                  int64_t budget, SplitStart* starts) {
  const int64_t lane = threadIdx.x % kWarpThreads;
  const auto before_lane = [&](int64_t first_row) {
    return first_row + lane <= rows ? cost_before(first_row + lane)
                                    : std::numeric_limits<int64_t>::max();
  };
  int64_t row = 0, first_row = 0;
  int64_t before = 0, spent = 0;  // cost before `row`, and with the blocks of it that are taken
  int32_t split = 0, cuts = 0;
  int64_t own = before_lane(0);
  for (int64_t p = 0;; ++p) {
    if (lane == 0) {
      starts[p] = {static_cast<int32_t>(row), static_cast<int32_t>(spent - before), split, cuts};
    }
    if (p == parts) break;
    // Whole rows: up to the last whose cost fits.
    const int64_t reach = spent + budget;
    uint32_t fitting = __ballot_sync(0xFFFFFFFF, own <= reach);
    while (fitting == 0xFFFFFFFF) {
      first_row += kWarpThreads - 1;
      own = before_lane(first_row);
      fitting = __ballot_sync(0xFFFFFFFF, own <= reach);
    }
    const int64_t end = first_row + __popc(fitting) - 1;
    before = cost_before(end);
    const bool inside = end < rows && reach - before > kSplitOverheadBlocks;
    split = !inside ? 0 : end == row ? split + 1 : 1;
    cuts += inside ? 1 : 0;
    spent = inside ? reach - kSplitOverheadBlocks : before;
    row = end;
  }
}

// An entry of SplitWork::reached: the cost before the next part, which is inside of a row or not,
// and that row.
inline constexpr int64_t kMaxReached = 1 << 16;
inline constexpr int64_t kMaxReachedRows = 1 << 15;
inline constexpr uint32_t kInsideRow = uint32_t{1} << 31;

/// The same by the block, where the cost of all rows is small enough for a table: a link of the
/// chain is one access of shared memory.
__device__ inline void look_up_parts(const CostBefore& cost_before, int64_t rows, int64_t parts,
                                     int64_t budget, const SplitWork& work) {
  constexpr auto kOverhead = static_cast<int32_t>(kSplitOverheadBlocks);
  const auto total = static_cast<int32_t>(cost_before(rows));
  const auto num_rows = static_cast<int32_t>(rows);
  for (int32_t row = threadIdx.x; row <= num_rows; row += blockDim.x) {
    const auto begin = static_cast<int32_t>(cost_before(row));
    const int32_t end = row < num_rows ? static_cast<int32_t>(cost_before(row + 1)) : total + 1;
    const uint32_t high = static_cast<uint32_t>(row) << 16;
    for (int32_t reach = begin; reach < end; ++reach) {
      const bool inside = reach - begin > kOverhead;
      work.reached[reach] = inside ? kInsideRow | high | static_cast<uint32_t>(reach - kOverhead)
                                   : high | static_cast<uint32_t>(begin);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto step = static_cast<uint32_t>(budget < total ? budget : total);
    int32_t row = 0, split = 0, cuts = 0;
    uint32_t spent = 0;
    for (int64_t p = 0;; ++p) {
      work.starts[p] = {row, static_cast<int32_t>(spent), split, cuts};
      if (p == parts) break;
      const uint32_t next = work.reached[min(spent + step, static_cast<uint32_t>(total))];
      spent = next & 0xFFFF;
      const auto next_row = static_cast<int32_t>((next & ~kInsideRow) >> 16);
      const bool inside = next >= kInsideRow;
      split = !inside ? 0 : next_row == row ? split + 1 : 1;
      cuts += inside ? 1 : 0;
      row = next_row;
    }
  }
  __syncthreads();
  for (int64_t p = threadIdx.x; p <= parts; p += blockDim.x) {
    work.starts[p].block -= static_cast<int32_t>(cost_before(work.starts[p].row));
  }
}

/// Every thread of the block calls it; what it writes is visible to the block only behind a
/// barrier.
__device__ inline void write_split_schedule(const CostBefore& cost_before, int64_t rows,
                                            const SplitScheduleOut& out, const SplitWork& work) {
  const int64_t total = cost_before(rows);
  const int64_t budget = (total + out.parts - 1) / out.parts + kSplitOverheadBlocks;
  if (total < work.reached_size && rows < kMaxReachedRows) {
    look_up_parts(cost_before, rows, out.parts, budget, work);
  } else if (threadIdx.x < kWarpThreads) {
    walk_parts(cost_before, rows, out.parts, budget, work.starts);
  }
  __syncthreads();
  for (int64_t p = threadIdx.x; p < out.parts; p += blockDim.x) {
    const SplitStart start = work.starts[p];
    const SplitStart next = work.starts[p + 1];
    SplitPart part{};
    part.first_row = start.row;
    part.last_row = static_cast<int32_t>(rows - 1);
    part.first_block = start.block;
    part.first_split = start.split;
    part.first_is_split = start.split > 0 ? 1 : 0;
    if (next.block > 0) {
      part.last_row = next.row;
      part.end_block = next.block;
      part.last_is_split = 1;
      if (next.row == start.row) part.first_is_split = 1;
    } else if (next.row > start.row) {
      part.last_row = next.row - 1;
      part.end_block = static_cast<int32_t>(cost_before(next.row) - cost_before(next.row - 1) -
                                            kSplitOverheadBlocks);
      part.last_is_split = part.last_row == start.row ? part.first_is_split : 0;
    }
    int32_t* const to = out.schedule + p * out.stride;
    to[0] = part.first_row;
    to[1] = part.last_row;
    to[2] = part.first_block;
    to[3] = part.end_block;
    to[4] = part.first_split;
    to[5] = part.first_is_split;
    to[6] = part.last_is_split;
    to[7] = 0;
  }
  // A row has one piece more than there are cuts in it.
  const auto first_row = [&](int64_t p) { return work.starts[p].row; };
  for (int64_t r = threadIdx.x; r <= rows; r += blockDim.x) {
    const int64_t before = count_up_to(first_row, out.parts, static_cast<int32_t>(r - 1));
    out.indptr[r] = static_cast<int32_t>(r) + (before > 0 ? work.starts[before - 1].cuts : 0);
  }
}

}  // namespace fovea::internal::cuda
