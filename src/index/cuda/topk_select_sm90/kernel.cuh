#pragma once

#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/cluster.cuh"
#include "src/index/cuda/topk_cut.cuh"
#include "src/index/cuda/topk_select_sm90/config.h"
#include "src/index/topk_select_transform.h"

// A cluster of blocks a row. Every block keeps its part of the row in shared memory, so that the
// row is read once, whatever its values are.
//
// warps of               do
// every block            copy the part in; show their share of the sample to all blocks
// every block            the same cut of the whole sample, to a threshold; keep the candidates of
//                        the part that reach it, in order of position; show their number
// the first block        fetches the candidates, finds the exact cut among them, writes the row
//
// Where a threshold cannot be had or was wrong:
// every block            histograms of the part's keys, which all blocks add up to the exact cut;
//                        show how many of the part are better and on it; write their piece of the
//                        row
namespace fovea::internal::topk_sm90 {

using namespace topk;

struct SharedMemory {
  float values[4 * kBlockGroups];
  uint2 candidates[kMaxCandidates];  // key, position
  uint32_t sample[kMaxSample];
  uint32_t bins[kBins];  // zero between uses
  CutShared cut;
  uint32_t largest_key;
  uint32_t counts[kMaxBlocks];  // of candidates; then better entries and ties, 16 bits each
  uint32_t begins[kMaxBlocks];  // of the blocks' candidates

  // In place of the values.
  __device__ uint32_t* positions() { return reinterpret_cast<uint32_t*>(values); }
  __device__ uint32_t* selected() { return positions() + kMaxCandidates; }
  // In place of the candidates.
  __device__ uint32_t* more_bins() { return reinterpret_cast<uint32_t*>(candidates); }
};

/// A row's groups that the block holds, in the order in which StepRanks counts.
struct Part {
  static constexpr uint32_t kStep = kGroups * kThreads;
  uint32_t first, count;  // groups
  uint32_t spread;        // groups of a thread in a step, so that a short part keeps all warps busy

  __device__ Part(uint32_t num_groups, uint32_t rank, uint32_t num_blocks) {
    const uint32_t share = (num_groups + num_blocks - 1) / num_blocks;
    first = min(rank * share, num_groups);
    count = min(share, num_groups - first);
    spread = min(uint32_t{kGroups}, (count + kThreads - 1) / kThreads);
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

/// Starts to copy the part; NaN in place of what is outside of the window, which is not read.
__device__ inline void copy_part(const Row& row, const Part& part, float* values) {
  for (uint32_t base = 0; base < part.count; base += Part::kStep) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const uint32_t local = part.local(base, j);
      if (local >= part.count) continue;
      const uint32_t g = part.first + local;
      if (4 * g >= row.before && 4 * g + 4 <= row.before + row.len) {
        cuda::copy_async<16>(&values[4 * local], row.groups + uint64_t{g} * 4, true);
        continue;
      }
      for (int i = 0; i < 4; ++i) {
        const uint32_t pos = row.position(g, i);
        values[4 * local + i] = pos < row.len ? row.at(pos) : __uint_as_float(0x7FC00000);
      }
    }
  }
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
    // A pair of bins of one block for each thread.
    static_assert(kShare / 2 * kBlocks == kThreads);
    const uint32_t pair = threadIdx.x % (kShare / 2) * 2;
    const uint2 both = cuda::load_from_cluster(
        reinterpret_cast<const uint2*>(&bins[rank * kShare + pair]), threadIdx.x / (kShare / 2));
    if (both.x > 0) atomicAdd(&sums[pair], both.x);
    if (both.y > 0) atomicAdd(&sums[pair + 1], both.y);
    __syncthreads();
#pragma unroll
    for (uint32_t i = threadIdx.x; i < kBins; i += kThreads) {
      cuda::store_to_cluster(&totals[rank * kShare + i % kShare], i / kShare, sums[i % kShare]);
    }
    sync_cluster();
    if (threadIdx.x < kShare) sums[threadIdx.x] = 0;
  }
  template <int kCount>
  __device__ void take(int top, uint32_t (&counts)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      counts[i] = totals[top - i];
      bins[top - i] = 0;
    }
  }
};

/// The threshold of the row's candidates, the same in every block; 0: there is none. `own` is this
/// thread's entry of the sample.
template <int kBlocks>
__device__ uint32_t sampled_threshold(const SampleShape& sample, float own, const Row& row,
                                      uint32_t capacity, uint32_t rank, SharedMemory& shared) {
  const uint32_t share = sample.size / kBlocks;
  if (threadIdx.x < share) {
    const uint32_t key = key_of(own);
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) {
      cuda::store_to_cluster(&shared.sample[rank * share + threadIdx.x], r, key);
    }
  }
  sync_cluster();
  const auto narrow = [&](const Cut& cut) {
    return find_cut<kThreads>(cut, 1, BlockBins{shared.bins}, shared.cut, [&](auto use) {
      for (uint32_t i = threadIdx.x; i < sample.size; i += kThreads) use(shared.sample[i]);
    });
  };
  // The first digit does where it lets no more through than there is ample room for.
  Cut cut = narrow(sample.cut());
  if (sample.threshold(cut, row.len, capacity / 4 * 3) == 0) cut = narrow(cut);
  return sample.threshold(cut, row.len, capacity);
}

/// Keeps the entries that reach the threshold, or all; returns how many there are, of which
/// `capacity` are kept.
__device__ inline uint32_t keep_candidates(const Row& row, const Part& part, bool all,
                                           uint32_t threshold, uint32_t capacity,
                                           SharedMemory& shared) {
  const float least = value_of(threshold);
  uint32_t kept = 0;
  for (uint32_t base = 0; base < part.count; base += Part::kStep) {
    // What is outside of the window is NaN and reaches nothing.
    const uint32_t marks = all ? mask_of(row, part, base, shared.values,
                                         [&](float, uint32_t pos) { return pos < row.len; })
                               : mask_of(row, part, base, shared.values,
                                         [&](float value, uint32_t) { return value >= least; });
    const MarkRanks ranks = MarkRanks::of<kThreads>(marks, shared.cut);
    ranks.emit(kept, [&](uint32_t to, int j, int i) {
      if (to >= capacity) return;
      const uint32_t local = part.local(base, j);
      shared.candidates[to] =
          make_uint2(key_of(shared.values[4 * local + i]), row.position(part.first + local, i));
    });
    kept += ranks.total;
  }
  return kept;
}

/// The first block: the best K of the `count` candidates of all blocks, which it has the counts of.
template <int kBlocks>
__device__ void select_candidates(const TopkRows& rows, int64_t t, uint32_t topk, uint32_t count,
                                  uint32_t threshold, SharedMemory& shared) {
  constexpr int kSteps = static_cast<int>(kMaxCandidates / 4 / kThreads);
  const uint32_t lane = threadIdx.x % cuda::kWarpThreads;
  const uint32_t warp = threadIdx.x / cuda::kWarpThreads;
  const uint32_t spread = count > 4 * kThreads ? kSteps : 1;
  if (warp == 0) {
    const WarpSum sum(lane < kBlocks ? shared.counts[lane] : 0);
    if (lane < kBlocks) shared.begins[lane] = sum.before;
    if (lane == 0) shared.largest_key = 0;
  }
  __syncthreads();
  uint32_t keys[kSteps][4];
  uint32_t largest = 0;
  const auto entry = [&](int j, int i) {
    return 4 * ((warp * spread + static_cast<uint32_t>(j)) * cuda::kWarpThreads + lane) +
           static_cast<uint32_t>(i);
  };
  const auto inside = [&](int j, int i) {
    return static_cast<uint32_t>(j) < spread && entry(j, i) < count;
  };
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keys[j][i] = 0;
      if (!inside(j, i)) continue;
      uint32_t from = 0;  // the last block whose candidates begin at or before the entry
#pragma unroll
      for (uint32_t step = kBlocks / 2; step > 0; step /= 2) {
        if (shared.begins[from + step] <= entry(j, i)) from += step;
      }
      const uint2 candidate =
          cuda::load_from_cluster(&shared.candidates[entry(j, i) - shared.begins[from]], from);
      keys[j][i] = candidate.x;
      shared.positions()[entry(j, i)] = candidate.y;
      largest = max(largest, candidate.x);
    }
  }
  __syncwarp();
  cuda::cluster_arrive();  // the other blocks may end
  largest = __reduce_max_sync(0xFFFFFFFF, largest);
  if (lane == 0) atomicMax(&shared.largest_key, largest);
  __syncthreads();
  const Cut cut =
      find_cut<kThreads>({threshold, bits_of(shared.largest_key - threshold), topk, count}, 3,
                         BlockBins{shared.bins}, shared.cut,
                         [&](auto use) {
#pragma unroll
                           for (int j = 0; j < kSteps; ++j) {
#pragma unroll
                             for (int i = 0; i < 4; ++i) {
                               if (inside(j, i)) use(keys[j][i]);
                             }
                           }
                         })
          .at_key();
  uint32_t better = 0, ties = 0;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (inside(j, i) && keys[j][i] > cut.base) better |= 1u << (4 * j + i);
      if (inside(j, i) && keys[j][i] == cut.base) ties |= 1u << (4 * j + i);
    }
  }
  // Candidates are in order of position, so that the first ties are the better ones.
  const StepRanks ranks = StepRanks::of<kThreads>(better, ties, shared.cut);
  ranks.emit(0, 0, cut.need, [&](uint32_t to, int j, int i) {
    shared.selected()[to] = shared.positions()[entry(j, i)];
  });
  __syncthreads();
  int32_t* const out = rows.out(t);
  for (uint32_t i = threadIdx.x; i < topk; i += kThreads) {
    out[i] = rows.index(t, static_cast<int32_t>(shared.selected()[i]));
  }
  cuda::cluster_wait();
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

/// Any row: three histograms of all keys to the exact cut, then every block writes what the row has
/// of its part.
template <int kBlocks>
__device__ void select_from_all(const TopkRows& rows, int64_t t, const Row& row, const Part& part,
                                uint32_t topk, uint32_t rank, SharedMemory& shared) {
  for (uint32_t i = threadIdx.x; i < 2 * kBins; i += kThreads) shared.more_bins()[i] = 0;
  __syncthreads();
  const ClusterBins<kBlocks> bins(shared.bins, shared.more_bins(), rank);
  const Cut all{0, 32, topk, row.len};
  const Cut cut = find_cut<kThreads>(all, 3, bins, shared.cut, [&](auto use) {
                    each_key(row, part, shared.values, use);
                  }).at_key();
  uint32_t better = 0, ties = 0;
  for (uint32_t base = 0; base < part.count; base += Part::kStep) {
    const StepRanks ranks = rank_keys(row, part, base, cut, shared);
    better += ranks.better_total;
    ties += ranks.ties_total;
  }
  show_count<kBlocks>(better | ties << 16, rank, shared);
  sync_cluster();
  uint32_t better_first = 0, ties_first = 0;
  for (uint32_t r = 0; r < rank; ++r) {
    better_first += shared.counts[r] & 0xFFFF;
    ties_first += shared.counts[r] >> 16;
  }
  const uint32_t begin = better_first + min(ties_first, cut.need);
  const uint32_t end = better_first + better + min(ties_first + ties, cut.need);
  // In place of the bins, which no block reads any more.
  uint32_t* const selected = shared.more_bins();
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

template <int kBlocks>
__device__ void select_row(const TopkRows& rows, uint32_t topk, uint32_t capacity,
                           SharedMemory& shared) {
  const int64_t t = blockIdx.x / kBlocks;
  const uint32_t rank = cuda::cluster_rank();
  const TopkWindow window = rows.window(t);
  if (window.len <= topk) {
    int32_t* const out = rows.out(t);
    for (uint32_t i = rank * kThreads + threadIdx.x; i < topk; i += kBlocks * kThreads) {
      out[i] = i < window.len ? rows.index(t, static_cast<int32_t>(i)) : -1;
    }
    return;
  }
  cuda::cluster_arrive();
  const Row row(rows.logits(t, window), window.len);
  const SampleShape sample(row.len, topk);
  const bool all = row.len <= capacity;
  float own = 0;
  if (!all && threadIdx.x < sample.size / kBlocks) {
    own = row.at(sample.position(rank * (sample.size / kBlocks) + threadIdx.x, row.len));
  }
  const Part part(row.num_groups(), rank, kBlocks);
  copy_part(row, part, shared.values);
  for (int i = threadIdx.x; i < kBins; i += kThreads) shared.bins[i] = 0;
  cuda::cluster_wait();  // all blocks have started
  uint32_t threshold = 0;
  if (!all) threshold = sampled_threshold<kBlocks>(sample, own, row, capacity, rank, shared);
  cuda::wait_for_copies();  // a thread reads what it has copied
  if (all || threshold != 0) {
    const uint32_t kept = keep_candidates(row, part, all, threshold, capacity, shared);
    show_count<kBlocks>(kept, rank, shared);
    sync_cluster();
    uint32_t count = 0;
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) count += shared.counts[r];
    if (topk <= count && count <= capacity) {
      if (rank == 0) {
        select_candidates<kBlocks>(rows, t, topk, count, threshold, shared);
      } else {
        sync_cluster();
      }
      return;
    }
  }
  select_from_all<kBlocks>(rows, t, row, part, topk, rank, shared);
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
