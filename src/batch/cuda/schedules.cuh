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
  uint16_t* reached;   // [reached_size], may be null: what the next part can reach, by the same
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

// Entries of SplitWork::reached are costs in 16 bits.
inline constexpr int64_t kMaxReached = 1 << 16;

/// The same by the block, where the cost of all rows is small enough for a table: a link of the
/// chain is one access of shared memory. What a part can reach, blocks and overhead, decides what
/// the next one can: the table has that, and starts[p].split until it is known what else it means.
__device__ inline void look_up_parts(const CostBefore& cost_before, int64_t rows, int64_t parts,
                                     const SplitWork& work) {
  constexpr auto kOverhead = static_cast<int32_t>(kSplitOverheadBlocks);
  const auto total = static_cast<int32_t>(cost_before(rows));
  const auto num_parts = static_cast<int32_t>(parts);
  const int32_t step = min((total - 1) / num_parts + 1 + kOverhead, total);
  // The cost before the part behind one that can reach `reach`, in or at the end of a row that
  // begins at cost `before`.
  const auto spent_after = [](int32_t reach, int32_t before) {
    return reach - before > kOverhead ? reach - kOverhead : before;
  };
  // Two threads a row: there are rather half as many rows as threads than as many.
  for (int64_t i = threadIdx.x; i < 2 * rows; i += blockDim.x) {
    const int64_t row = i / 2;
    const auto begin = static_cast<int32_t>(cost_before(row));
    const auto end = static_cast<int32_t>(cost_before(row + 1));
    for (int32_t reach = begin + static_cast<int32_t>(i % 2); reach < end; reach += 2) {
      work.reached[reach] = static_cast<uint16_t>(min(spent_after(reach, begin) + step, total));
    }
  }
  if (threadIdx.x == 0) work.reached[total] = static_cast<uint16_t>(total);
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t reach = static_cast<uint32_t>(step);
    for (int64_t p = 0; p < parts; ++p) {
      work.starts[p].split = static_cast<int32_t>(reach);
      reach = work.reached[reach];
    }
  }
  __syncthreads();
  for (int64_t p = threadIdx.x; p <= parts; p += blockDim.x) {
    const int32_t reach = p > 0 ? work.starts[p - 1].split : 0;
    const int64_t row = count_up_to(cost_before, rows + 1, int64_t{reach}) - 1;
    work.starts[p].row = static_cast<int32_t>(row);
    work.starts[p].block = spent_after(reach, static_cast<int32_t>(cost_before(row)));
  }
  __syncthreads();
  __shared__ int32_t sums[kWarpThreads + 1];
  const auto begin_of = [&](int64_t p) {
    return static_cast<int32_t>(cost_before(work.starts[p].row));
  };
  block_scan<int32_t>(
      parts + 1, sums, [&](int64_t p) { return work.starts[p].block > begin_of(p) ? 1 : 0; },
      [&](int64_t p, int32_t before, int32_t upto) {
        // Parts inside one row follow each other.
        const auto spent = [&](int64_t i) { return work.starts[i].block; };
        work.starts[p].cuts = upto;
        work.starts[p].split =
            upto == before
                ? 0
                : static_cast<int32_t>(p + 1 - count_up_to(spent, parts + 1, begin_of(p)));
      });
  for (int64_t p = threadIdx.x; p <= parts; p += blockDim.x) work.starts[p].block -= begin_of(p);
}

/// Every thread of the block calls it; what it writes is visible to the block only behind a
/// barrier.
__device__ inline void write_split_schedule(const CostBefore& cost_before, int64_t rows,
                                            const SplitScheduleOut& out, const SplitWork& work) {
  const int64_t total = cost_before(rows);
  if (total < work.reached_size) {
    look_up_parts(cost_before, rows, out.parts, work);
  } else if (threadIdx.x < kWarpThreads) {
    const int64_t budget = (total + out.parts - 1) / out.parts + kSplitOverheadBlocks;
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
