#pragma once

#include "src/core/cuda/bulk_copy.cuh"
#include "src/core/cuda/cluster.cuh"
#include "src/index/cuda/topk_cut.cuh"
#include "src/index/cuda/topk_select_sm90/config.h"
#include "src/index/topk_select_transform.h"

// A cluster of blocks a row. Every block keeps its part of the row in shared memory,
// so that the row is read once, whatever its values are.
//
// warps of               do
// every block            copy the part in; cut a sample of the whole row to the same threshold;
//                        mark the entries of the part that reach it, the candidates; show their
//                        number; send them to the first block, in order of position
// the first block        finds the exact cut among them, writes the row
//
// Where a threshold cannot be had or was wrong:
// every block            where the sample ends on a plateau, that; else, or where this was wrong,
//                        histograms of the part's keys, which all blocks add up to the exact cut;
//                        show how many of the part are better and on it; write their piece of the
//                        row
namespace fovea::internal::topk_sm90 {

using namespace topk;

struct SharedMemory {
  // Of the row's candidates, in the first block; 16 bytes a group.
  uint32_t keys[kMaxCandidates];
  uint32_t positions[kMaxCandidates];
  uint32_t bins[kBins];  // zero between uses
  CutShared cut;
  cuda::Mbarrier full;           // the part has come
  uint32_t largest_key;          // of the part's candidates
  uint32_t counts[kMaxBlocks];   // of candidates; then better entries and ties, 16 bits each
  uint32_t largest[kMaxBlocks];  // keys of the blocks' candidates, in the first block
  alignas(16) float values[4];   // of the part: as many as the launch has room for

  // Before there are candidates, or in their place.
  __device__ uint32_t* sample() { return keys; }
  __device__ uint32_t* more_bins() { return keys; }
  __device__ uint32_t* selected() { return positions; }
};
static_assert(kMaxSample <= kMaxCandidates && 2 * kBins <= kMaxCandidates);

/// A row's groups that the block holds: those of a thread in the order in which MarkRanks counts,
/// or in steps in the order in which StepRanks does.
struct Part {
  static constexpr uint32_t kStep = kGroups * kThreads;
  uint32_t first, count;  // groups
  uint32_t of_thread;     // groups at most; few where the part is short, so that no warp is idle
  uint32_t spread;        // the same for a step

  __device__ Part(uint32_t num_groups, uint32_t rank, uint32_t num_blocks) {
    const uint32_t share = (num_groups + num_blocks - 1) / num_blocks;
    first = min(rank * share, num_groups);
    count = min(share, num_groups - first);
    of_thread = (count + kThreads - 1) / kThreads;
    spread = min(uint32_t{kGroups}, of_thread);
  }
  /// Group j < of_thread of this thread, within the part; count or more: there is none.
  __device__ uint32_t local(uint32_t j) const {
    const uint32_t warp = threadIdx.x / cuda::kWarpThreads, lane = threadIdx.x % cuda::kWarpThreads;
    return (warp * of_thread + j) * cuda::kWarpThreads + lane;
  }
  /// Group j of this thread in the step that begins at `base`, within the part; count or more:
  /// there is none.
  __device__ uint32_t local(uint32_t base, int j) const {
    const uint32_t warp = threadIdx.x / cuda::kWarpThreads, lane = threadIdx.x % cuda::kWarpThreads;
    return static_cast<uint32_t>(j) < spread
               ? base + (warp * spread + static_cast<uint32_t>(j)) * cuda::kWarpThreads + lane
               : count;
  }
};

constexpr int kQuads = static_cast<int>(kBlockGroups / 4 / kThreads);

/// Starts to copy the part, by one thread; NaN in place of what is outside of the window, which is
/// not read.
__device__ inline void copy_part(const Row& row, const Part& part, SharedMemory& shared) {
  const uint32_t begin = max(part.first, row.before > 0 ? 1u : 0u);
  const uint32_t end = min(part.first + part.count, (row.before + row.len) / 4);
  const uint32_t whole = end > begin ? end - begin : 0;  // groups inside of the window
  cuda::mbarrier_arrive_expecting(shared.full, static_cast<int>(16 * whole));
  if (whole > 0) {
    cuda::copy_bulk(&shared.values[4 * (begin - part.first)], row.groups + uint64_t{begin} * 4,
                    static_cast<int>(16 * whole), shared.full, cuda::cache_policy_once());
  }
  // The row's first group and its last one.
  for (uint32_t g : {0u, row.num_groups() - 1}) {
    if (g < part.first || g >= part.first + part.count || (g >= begin && g < end)) continue;
    for (int i = 0; i < 4; ++i) {
      const uint32_t pos = row.position(g, i);
      shared.values[4 * (g - part.first) + i] =
          pos < row.len ? row.at(pos) : __uint_as_float(0x7FC00000);
    }
  }
}

/// Marks this thread's entries of the part that reach the threshold, or all; raises `largest` to
/// their values. What is outside of the window is NaN and reaches nothing.
__device__ inline void mark_candidates(const Row& row, const Part& part, bool all,
                                       uint32_t threshold, const float* values,
                                       uint32_t (&marks)[kQuads], float& largest) {
  const float least = value_of(threshold);
  uint64_t reaching = 0;
  // Instructions come from cold memory, too: few of them.
#pragma unroll 2
  for (uint32_t j = 0; j < part.of_thread; ++j) {
    const uint32_t local = part.local(j);
    if (local >= part.count) break;
    const float4 group = reinterpret_cast<const float4*>(values)[local];
    const float entries[4] = {group.x, group.y, group.z, group.w};
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (entries[i] >= least) own |= 1u << i;
      largest = fmaxf(largest, entries[i]);
    }
    if (all) {
      own = 0;
      for (int i = 0; i < 4; ++i) own |= (row.position(part.first + local, i) < row.len) << i;
    }
    reaching |= uint64_t{own} << (4 * j);
  }
#pragma unroll
  for (int q = 0; q < kQuads; ++q) marks[q] = static_cast<uint32_t>(reaching >> (16 * q)) & 0xFFFF;
}

/// The mask of the thread's entries of a step for which is(value, position) holds.
template <class Is>
__device__ uint32_t mask_of(const Row& row, const Part& part, uint32_t base, const float* values,
                            Is is) {
  uint32_t mask = 0;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const uint32_t local = part.local(base, j);
    if (local >= part.count) continue;
    const float4 group = reinterpret_cast<const float4*>(values)[local];
    const float entries[4] = {group.x, group.y, group.z, group.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (is(entries[i], row.position(part.first + local, i))) mask |= 1u << (4 * j + i);
    }
  }
  return mask;
}

/// Calls use(key) for the keys of this thread's share of the part.
template <class Use>
__device__ void each_key(const Row& row, const Part& part, const float* values, Use& use) {
#pragma unroll 1
  for (uint32_t base = 0; base < part.count; base += Part::kStep) {
    mask_of(row, part, base, values, [&](float value, uint32_t pos) {
      if (pos < row.len) use(key_of(value));
      return false;
    });
  }
}

/// Shows `count` of this block to all others, and those of the others to this one, behind the next
/// barrier of the cluster.
template <int kBlocks>
__device__ void show_count(uint32_t count, uint32_t rank, SharedMemory& shared) {
  if (threadIdx.x < kBlocks) cuda::store_to_cluster(&shared.counts[rank], threadIdx.x, count);
}

__device__ inline void sync_cluster() {
  cuda::cluster_arrive();
  cuda::cluster_wait();
}

/// A histogram of the cluster: every block counts, adds up its share of the bins of all blocks and
/// shows the sums to all.
template <int kBlocks>
struct ClusterBins {
  static constexpr uint32_t kShare = kBins / kBlocks;
  uint32_t* bins;        // of this block; zero between uses
  uint32_t* sums;        // [kShare], zero between uses
  uint32_t* totals;      // [kBins]
  uint32_t rank;         // of this block
  uint32_t last, times;  // equal keys come in runs: one addition for each

  __device__ ClusterBins(uint32_t* own, uint32_t* more, uint32_t block_rank)
      : bins(own), sums(more), totals(more + kBins), rank(block_rank), last(kBins), times(0) {}
  __device__ void add(uint32_t bin) {
    if (bin != last) flush(bin);
    ++times;
  }
  __device__ void flush(uint32_t next) {
    if (times > 0) atomicAdd(&bins[last], times);
    last = next;
    times = 0;
  }
  __device__ void finish() {
    flush(kBins);
    sync_cluster();
    // Pairs of bins of one block for each thread.
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < kBins / 2; i += kThreads) {
      const uint32_t pair = i % (kShare / 2) * 2;
      const uint2 both = cuda::load_from_cluster(
          reinterpret_cast<const uint2*>(&bins[rank * kShare + pair]), i / (kShare / 2));
      if (both.x > 0) atomicAdd(&sums[pair], both.x);
      if (both.y > 0) atomicAdd(&sums[pair + 1], both.y);
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = threadIdx.x; i < kBins; i += kThreads) {
      cuda::store_to_cluster(&totals[rank * kShare + i % kShare], i / kShare, sums[i % kShare]);
    }
    sync_cluster();
    for (uint32_t i = threadIdx.x; i < kShare; i += kThreads) sums[i] = 0;
  }
  __device__ void take(int top, uint32_t (&counts)[kTaken]) {
#pragma unroll
    for (int i = 0; i < kTaken; ++i) {
      counts[i] = totals[top - i];
      bins[top - i] = 0;
    }
  }
};

/// Writes the best of row t from its candidates, in order of position; `cut` is a range of keys
/// that begins at or below all of them. Keys and positions are at multiples of 16 bytes, and may be
/// read up to a multiple of four.
__device__ inline void select_candidates(const TopkRows& rows, int64_t t, const Cut& cut,
                                         const uint32_t* keys, const uint32_t* positions,
                                         uint32_t* bins, CutShared& shared) {
  static_assert(kMaxCandidates <= 4 * 4 * kThreads, "a mask has four groups");
  const uint32_t lane = threadIdx.x % cuda::kWarpThreads;
  const uint32_t warp = threadIdx.x / cuda::kWarpThreads;
  const uint32_t count = cut.entries;
  const uint32_t groups = (count + 4 * kThreads - 1) / (4 * kThreads);
  const auto entry = [&](uint32_t j, uint32_t i) {
    return 4 * ((warp * groups + j) * cuda::kWarpThreads + lane) + i;
  };
  const auto each_candidate = [&](auto use) {
#pragma unroll 1
    for (uint32_t j = 0; j < groups; ++j) {
      const uint32_t first = entry(j, 0);
      if (first >= count) break;
      const uint4 all = *reinterpret_cast<const uint4*>(&keys[first]);
      const uint32_t own[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        if (first + i < count) use(j, i, own[i]);
      }
    }
  };
  // Candidates are in order of position: their places do for positions.
  const Entry last = find_last<kThreads>(cut, count, bins, shared, [&](auto use) {
    each_candidate([&](uint32_t j, uint32_t i, uint32_t key) { use(key, entry(j, i)); });
  });
  uint32_t marks[1] = {0};
  each_candidate([&](uint32_t j, uint32_t i, uint32_t key) {
    if (Entry{key, entry(j, i)}.reaches(last)) marks[0] |= 1u << (4 * j + i);
  });
  const auto ranks = MarkRanks<1>::of<kThreads>(marks, shared.sums);
  int32_t* const out = rows.out(t);
  ranks.emit(0, groups, [&](uint32_t to, uint32_t j, int i) {
    const uint32_t pos = positions[entry(j, static_cast<uint32_t>(i))];
    out[to] = rows.index(t, static_cast<int32_t>(pos));
  });
}

/// The usual row, whose candidates reach `threshold` or are all: false where they are too few or
/// too many.
template <int kBlocks>
__device__ bool select_sampled(const TopkRows& rows, int64_t t, const Row& row, const Part& part,
                               uint32_t topk, uint32_t capacity, uint32_t threshold, uint32_t rank,
                               SharedMemory& shared) {
  float most = -INFINITY;
  const bool all = row.len <= capacity;
  uint32_t marks[kQuads];
  mark_candidates(row, part, all, threshold, shared.values, marks, most);
  const uint32_t largest = __reduce_max_sync(0xFFFFFFFF, key_of(most));
  if (threadIdx.x % cuda::kWarpThreads == 0) atomicMax(&shared.largest_key, largest);
  const auto ranks = MarkRanks<kQuads>::of<kThreads>(marks, shared.cut.sums);
  uint32_t count = ranks.total, first = 0, largest_key = shared.largest_key;
  if constexpr (kBlocks > 1) {
    show_count<kBlocks>(ranks.total, rank, shared);
    if (threadIdx.x == 0) cuda::store_to_cluster(&shared.largest[rank], 0, largest_key);
    sync_cluster();
    count = 0;
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) {
      if (r == rank) first = count;
      count += shared.counts[r];
    }
  }
  if (count < topk || count > capacity) return false;
  ranks.emit(first, part.of_thread, [&](uint32_t to, uint32_t j, int i) {
    const uint32_t local = part.local(j);
    const uint32_t key = key_of(shared.values[4 * local + i]);
    const uint32_t pos = row.position(part.first + local, i);
    if constexpr (kBlocks > 1) {
      cuda::store_to_cluster(&shared.keys[to], 0, key);
      cuda::store_to_cluster(&shared.positions[to], 0, pos);
    } else {
      shared.keys[to] = key;
      shared.positions[to] = pos;
    }
  });
  if constexpr (kBlocks > 1) {
    sync_cluster();
    if (rank != 0) return true;
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) largest_key = max(largest_key, shared.largest[r]);
  } else {
    __syncthreads();
  }
  select_candidates(rows, t, {threshold, bits_of(largest_key - threshold), topk, count},
                    shared.keys, shared.positions, shared.bins, shared.cut);
  return true;
}

/// The ranks of a step's entries that are better than the cut or on it.
__device__ inline StepRanks rank_keys(const Row& row, const Part& part, uint32_t base,
                                      const Cut& cut, SharedMemory& shared) {
  const uint32_t better = mask_of(row, part, base, shared.values, [&](float value, uint32_t pos) {
    return pos < row.len && key_of(value) > cut.base;
  });
  const uint32_t ties = mask_of(row, part, base, shared.values, [&](float value, uint32_t pos) {
    return pos < row.len && key_of(value) == cut.base;
  });
  return StepRanks::of<kThreads>(better, ties, shared.cut);
}

static_assert(4 * kBlockGroups < 1 << 16, "the entries of a part are counted in 16 bits");

/// Any row: the exact cut, by three histograms of all keys unless `guess`, a key, is where the best
/// end; then every block writes what the row has of its part.
template <int kBlocks>
__device__ void select_from_all(const TopkRows& rows, int64_t t, const Row& row, const Part& part,
                                uint32_t topk, Cut guess, uint32_t rank, SharedMemory& shared) {
  Cut cut = guess;
  uint32_t better_first, ties_first, better, ties;
  while (true) {
    if (cut.bits > 0) {
      for (uint32_t i = threadIdx.x; i < 2 * kBins; i += kThreads) shared.more_bins()[i] = 0;
      __syncthreads();
      const ClusterBins<kBlocks> bins(shared.bins, shared.more_bins(), rank);
      cut = find_cut<kThreads>(cut, 3, 0, bins, shared.cut, [&](auto use) {
              each_key(row, part, shared.values, use);
            }).at_key();
    }
    better = ties = 0;
#pragma unroll 1
    for (uint32_t base = 0; base < part.count; base += Part::kStep) {
      const StepRanks ranks = rank_keys(row, part, base, cut, shared);
      better += ranks.better_total;
      ties += ranks.ties_total;
    }
    show_count<kBlocks>(better | ties << 16, rank, shared);
    sync_cluster();
    better_first = ties_first = 0;
    uint32_t all_better = 0, all_ties = 0;
#pragma unroll 1
    for (uint32_t r = 0; r < kBlocks; ++r) {
      if (r == rank) better_first = all_better, ties_first = all_ties;
      all_better += shared.counts[r] & 0xFFFF;
      all_ties += shared.counts[r] >> 16;
    }
    cut.need = topk - all_better;
    if (all_better <= topk && topk <= all_better + all_ties) break;
    cut = {0, 32, topk, row.len};
  }
  const uint32_t begin = better_first + min(ties_first, cut.need);
  const uint32_t end = better_first + better + min(ties_first + ties, cut.need);
  uint32_t* const selected = shared.selected();
#pragma unroll 1
  for (uint32_t base = 0; base < part.count; base += Part::kStep) {
    const StepRanks ranks = rank_keys(row, part, base, cut, shared);
    ranks.emit(better_first, ties_first, cut.need, [&](uint32_t to, int j, int i) {
      selected[to - begin] = row.position(part.first + part.local(base, j), i);
    });
    better_first += ranks.better_total;
    ties_first += ranks.ties_total;
  }
  __syncthreads();
  int32_t* const out = rows.out(t) + begin;
  for (uint32_t i = threadIdx.x; i < end - begin; i += kThreads) {
    out[i] = rows.index(t, static_cast<int32_t>(selected[i]));
  }
}

/// The block's columns come while the length of the row does, by one thread.
__device__ inline void prefetch_columns(const TopkRows& rows, int64_t t, uint32_t rank,
                                        uint32_t num_blocks) {
  const float* const columns = rows.columns(t);
  if (columns == nullptr) return;
  const auto at = [&](int64_t column) {  // of 16 bytes, not before and not behind the row
    return (reinterpret_cast<uintptr_t>(columns + column) + (rank == 0 ? 15 : 0)) / 16 * 16;
  };
  const uintptr_t begin = at(rows.width() * rank / num_blocks);
  const uintptr_t end =
      reinterpret_cast<uintptr_t>(columns + rows.width() * (rank + 1) / num_blocks) / 16 * 16;
  if (begin < end) {
    cuda::prefetch_bulk(reinterpret_cast<const void*>(begin), static_cast<int>(end - begin));
  }
}

template <int kBlocks>
__device__ void select_row(const TopkRows& rows, uint32_t topk, uint32_t capacity,
                           SharedMemory& shared) {
  const int64_t t = blockIdx.x / kBlocks;
  const uint32_t rank = kBlocks > 1 ? cuda::cluster_rank() : 0;
  if (threadIdx.x == 0) {
    cuda::mbarrier_init(shared.full, 1);
    cuda::show_barriers_to_copies();
    prefetch_columns(rows, t, rank, kBlocks);
  }
  const TopkWindow window = rows.window(t);
  if (window.len <= topk) {
    int32_t* const out = rows.out(t);
    for (uint32_t i = rank * kThreads + threadIdx.x; i < topk; i += kBlocks * kThreads) {
      out[i] = i < window.len ? rows.index(t, static_cast<int32_t>(i)) : -1;
    }
    return;
  }
  if constexpr (kBlocks > 1) cuda::cluster_arrive();
  const Row row(rows.logits(t, window), window.len);
  const Part part(row.num_groups(), rank, kBlocks);
  if (threadIdx.x == 0) {
    copy_part(row, part, shared);
    shared.largest_key = shared.cut.listed = 0;
  }
  for (int i = threadIdx.x; i < kBins; i += kThreads) shared.bins[i] = 0;
  __syncthreads();
  uint32_t threshold = 0;
  Cut narrow{0, 32, 0, 0};
  if (row.len > capacity) {
    threshold = sampled_threshold<kThreads>(row, SampleShape(row.len, topk), capacity, shared.bins,
                                            shared.sample(), shared.cut, narrow);
  }
  cuda::mbarrier_wait(shared.full, 0);
  if constexpr (kBlocks > 1) cuda::cluster_wait();  // all blocks have started
  if ((row.len <= capacity || threshold != 0) &&
      select_sampled<kBlocks>(rows, t, row, part, topk, capacity, threshold, rank, shared)) {
    return;
  }
  const bool plateau = threshold == 0 && narrow.bits == 0;
  select_from_all<kBlocks>(rows, t, row, part, topk, plateau ? narrow : Cut{0, 32, topk, row.len},
                           rank, shared);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FOVEA_TOPK_CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#define FOVEA_TOPK_SM90_ONLY(...) __VA_ARGS__
#else
#define FOVEA_TOPK_CLUSTER_OF(blocks)
#define FOVEA_TOPK_SM90_ONLY(...)
#endif

template <int kBlocks>
__global__ void FOVEA_TOPK_CLUSTER_OF(kBlocks) __launch_bounds__(kThreads, 1)
    select_rows(const __grid_constant__ TopkRows rows, uint32_t topk, uint32_t capacity) {
  extern __shared__ __align__(16) uint8_t memory[];
  FOVEA_TOPK_SM90_ONLY(
      select_row<kBlocks>(rows, topk, capacity, *reinterpret_cast<SharedMemory*>(memory)));
}

#undef FOVEA_TOPK_CLUSTER_OF
#undef FOVEA_TOPK_SM90_ONLY

}  // namespace fovea::internal::topk_sm90
