#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/workspace.h"
#include "src/kda/kda_prefill_impl.h"
#include "src/kda/kda_state.h"

/// What the kernels of a prefill need to know of its sequences; the first launch writes it.
namespace fovea::internal::cuda {

/// Rows that are computed together.
inline constexpr int kTileRows = 16;
/// More sequences than these run in their own order: ranking compares each with each.
inline constexpr int64_t kMaxRanked = 8192;

struct SequenceTable {
  int64_t* offsets = nullptr;      // [N+1], cut to [0, T] and never falling
  int32_t* tile_begin = nullptr;   // [N+1], tiles of earlier sequences
  int64_t* chunk_begin = nullptr;  // [N+1], entries of chunk_states of earlier sequences
  int32_t* order = nullptr;        // [N], the longest sequence first
  int32_t* snapshots = nullptr;    // [N], snapshots of a sequence
  int32_t* refused =
      nullptr;  // [1], with `check`: not 0 when there is a fault, and nothing may be written

  SequenceTable() = default;
  SequenceTable(WorkspaceCutter& cutter, int64_t max_sequences)
      : offsets(cutter.take<int64_t>(max_sequences + 1)),
        tile_begin(cutter.take<int32_t>(max_sequences + 1)),
        chunk_begin(cutter.take<int64_t>(max_sequences + 1)),
        order(cutter.take<int32_t>(max_sequences)),
        snapshots(cutter.take<int32_t>(max_sequences)),
        refused(cutter.take<int32_t>(1)) {}

  __device__ bool is_refused() const { return refused != nullptr && *refused != 0; }
};

struct SnapshotList {
  const int32_t* sequence = nullptr;
  const int32_t* position = nullptr;
  const int32_t* slot = nullptr;
  int64_t count = 0;
};

struct SequenceParams {
  SequenceTable table;
  PackedOffsets offsets;
  SnapshotList snapshots;
  int64_t interval;  // of snapshots and chunk_states
};

/// The contents that `check` judges; lists may be null.
struct CheckParams {
  PackedOffsets offsets;
  const int32_t* in_slot;
  const int32_t* out_slot;
  int64_t num_entries;  // of the slot lists
  int64_t slots;        // of the pool
  SnapshotList snapshots;
  int64_t interval;
  bool out_slots_are_read;  // they may repeat
  int32_t* refused;
  int32_t* report;  // may be null
};

/// Chunks of `interval` rows (16, 32 or 64), the last one perhaps shorter.
__device__ inline int64_t chunks_of(int64_t length, int64_t interval) {
  return divide_small(length + interval - 1, static_cast<uint32_t>(interval)).quotient;
}

inline constexpr int kSequenceThreads = 256;

/// Offsets cut and raised, prefix sums of tiles and chunk_states, the order, counted snapshots; one
/// block.
static __global__ void __launch_bounds__(kSequenceThreads, 1)
    fill_sequences(const __grid_constant__ SequenceParams params) {
  __shared__ int64_t sums[kWarpThreads + 1];
  const SequenceTable& table = params.table;
  const int64_t count = params.offsets.sequences;
  const int thread = threadIdx.x;
  // Running maximum, which a sum over the block's threads would not give: every thread walks one
  // piece, then adds what the pieces before it reached.
  const int64_t piece = (count + kSequenceThreads) / kSequenceThreads;
  const int64_t begin = min(thread * piece, count + 1);
  const int64_t end = min(begin + piece, count + 1);
  int64_t largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    largest = max(largest, params.offsets.clamped(i));
    table.offsets[i] = largest;
  }
  __shared__ int64_t reached[kSequenceThreads];
  reached[thread] = largest;
  __syncthreads();
  int64_t before = 0;
  for (int other = 0; other < thread; ++other) before = max(before, reached[other]);
  for (int64_t i = begin; i < end; ++i) table.offsets[i] = max(table.offsets[i], before);
  for (int64_t n = thread; n < count; n += kSequenceThreads) table.snapshots[n] = 0;
  __syncthreads();
  const auto length = [&](int64_t n) { return table.offsets[n + 1] - table.offsets[n]; };
  block_scan(
      count, sums, [&](int64_t n) { return (length(n) + kTileRows - 1) / kTileRows; },
      [&](int64_t n, int64_t first, int64_t upto) {
        if (n == 0) table.tile_begin[0] = 0;
        table.tile_begin[n + 1] = static_cast<int32_t>(upto);
      });
  block_scan(
      count, sums, [&](int64_t n) { return chunks_of(length(n), params.interval); },
      [&](int64_t n, int64_t first, int64_t upto) {
        if (n == 0) table.chunk_begin[0] = 0;
        table.chunk_begin[n + 1] = upto;
      });
  for (int64_t n = thread; n < count; n += kSequenceThreads) {
    if (count > kMaxRanked) {
      table.order[n] = static_cast<int32_t>(n);
      continue;
    }
    const int64_t own = length(n);
    int64_t rank = 0;
    for (int64_t other = 0; other < count; ++other) {
      const int64_t theirs = length(other);
      rank += theirs > own || (theirs == own && other < n);
    }
    table.order[rank] = static_cast<int32_t>(n);
  }
  for (int64_t m = thread; m < params.snapshots.count; m += kSequenceThreads) {
    const int32_t n = params.snapshots.sequence[m];
    if (n >= 0 && n < count) atomicAdd(&table.snapshots[n], 1);
  }
}

// A fault and its entry as one number: the smallest is the one to report.
__device__ inline unsigned long long finding(KdaFault fault, int64_t entry) {
  return static_cast<unsigned long long>(fault) << 32 | static_cast<uint32_t>(entry);
}

/// Judges the contents as find_fault() of the host does, writes the report and whether the call is
/// refused; one block.
static __global__ void __launch_bounds__(kSequenceThreads, 1)
    check_contents(const __grid_constant__ CheckParams params) {
  __shared__ unsigned long long first;
  constexpr unsigned long long kNothing = ~0ull;
  if (threadIdx.x == 0) first = kNothing;
  __syncthreads();
  const PackedOffsets& offsets = params.offsets;
  const SnapshotList& snapshots = params.snapshots;
  const auto report = [&](KdaFault fault, int64_t entry) {
    atomicMin(&first, finding(fault, entry));
  };
  if (offsets.data != nullptr) {
    for (int64_t i = threadIdx.x; i <= offsets.sequences; i += kSequenceThreads) {
      const int64_t value = offsets.raw(i);
      const int64_t previous = i == 0 ? 0 : offsets.raw(i - 1);
      if (value < previous || value < 0 || value > offsets.extent) report(KdaFault::kOffsets, i);
    }
  }
  for (int64_t n = threadIdx.x; n < params.num_entries; n += kSequenceThreads) {
    if (params.in_slot != nullptr && params.in_slot[n] >= params.slots) {
      report(KdaFault::kInSlot, n);
    }
    if (params.out_slot == nullptr) continue;
    const int32_t slot = params.out_slot[n];
    if (slot >= params.slots) report(KdaFault::kOutSlot, n);
    if (slot < 0 || slot >= params.slots || params.out_slots_are_read) continue;
    for (int64_t earlier = 0; earlier < n; ++earlier) {
      if (params.out_slot[earlier] == slot) report(KdaFault::kDuplicateOutSlot, n);
    }
  }
  for (int64_t m = threadIdx.x; m < snapshots.count; m += kSequenceThreads) {
    const int32_t slot = snapshots.slot[m];
    if (slot < 0) continue;
    const int32_t n = snapshots.sequence[m];
    if (n < 0 || n >= offsets.sequences) {
      report(KdaFault::kSnapshotSequence, m);
      continue;
    }
    if (!snapshot_is_legal(snapshots.position[m], offsets.raw(n + 1) - offsets.raw(n),
                           params.interval)) {
      report(KdaFault::kSnapshotPosition, m);
    }
    bool taken = slot >= params.slots;
    for (int64_t i = 0; i < params.num_entries && !taken; ++i) {
      taken = (params.in_slot != nullptr && params.in_slot[i] == slot) ||
              (params.out_slot != nullptr && params.out_slot[i] == slot);
    }
    for (int64_t earlier = 0; earlier < m && !taken; ++earlier) {
      taken = snapshots.slot[earlier] == slot;
    }
    if (taken) report(KdaFault::kSnapshotSlot, m);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool found = first != kNothing;
  *params.refused = found;
  if (params.report == nullptr) return;
  params.report[0] = found ? static_cast<int32_t>(first >> 32) : 0;
  params.report[1] = found ? static_cast<int32_t>(first & 0xFFFFFFFF) : -1;
}

/// The check of an operator whose rows have one slot each.
inline void launch_slot_check(const char* op, const ConstTensorView& slot, int64_t rows,
                              int64_t slots, int32_t* refused, int32_t* report, Stream stream,
                              bool slots_are_read = false) {
  CheckParams params{};
  params.out_slot = static_cast<const int32_t*>(slot.data);
  params.num_entries = rows;
  params.slots = slots;
  params.out_slots_are_read = slots_are_read;
  params.refused = refused;
  params.report = report;
  launch(op, check_contents, {dim3(1), dim3(kSequenceThreads)}, stream, params);
}

}  // namespace fovea::internal::cuda
