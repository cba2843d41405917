#pragma once

#include "src/core/cuda/bulk_copy.cuh"
#include "src/core/cuda/cluster.cuh"
#include "src/index/cuda/topk_cut.cuh"
#include "src/index/cuda/topk_select_sm90/config.h"
#include "src/index/topk_select_transform.h"

// One block or a cluster of blocks a row. Every block keeps its part of the row in shared memory,
// so that the row is read once, whatever its values are. All threads of all blocks do:
//
//   copy the part in
//   count its values in a histogram; every block adds up a share of the bins of all and sends the
//     sums to all: the bin where the best end; again within this one while it has too many entries
//   mark what is better than the bin and what is in it; send the number of the former and the keys
//     of the latter to all
//   find which of those are among the best; write the selected entries of the part
namespace fovea::internal::topk_sm90 {

using namespace topk;

struct SharedMemory {
  alignas(16) uint32_t bins[kBins];    // of the part
  alignas(16) uint32_t shares[kBins];  // from each block, its counts of this block's share of bins
  alignas(16) uint32_t totals[kBins];  // of the row
  alignas(16) uint32_t range_bins[kRangeBins];  // zero
  // Of the row's entries in the range, in order of position.
  uint32_t keys[kRangeEntries];
  uint32_t selected[kRangeEntries / cuda::kWarpThreads];  // a bit each
  uint32_t in_range[kMaxBlocks];                          // entries of the blocks' parts
  uint32_t better[kMaxBlocks];
  CutShared cut;
  cuda::Mbarrier full;  // the part has come
  cuda::Inbox shares_came, totals_came, counts_came, range_came;
  alignas(16) float values[4];  // of the part: as many as the launch has room for
};

/// A row's groups that the block holds. A thread has neighbouring ones.
struct Part {
  uint32_t first, count;  // groups
  uint32_t of_thread;     // groups at most

  __device__ Part(uint32_t num_groups, uint32_t rank, uint32_t num_blocks, uint32_t num_threads) {
    const uint32_t share = (num_groups + num_blocks - 1) / num_blocks;
    first = min(rank * share, num_groups);
    count = min(share, num_groups - first);
    of_thread = (count + num_threads - 1) / num_threads;
  }
};

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

/// Keys from `low` to `high`, the ends of a row's best: `need` of the `entries` in it are among
/// them, with all above. Of NaN both are 0.
struct Range {
  uint32_t low, high;
  uint32_t need, entries;

  __device__ bool of_nan() const { return high == 0; }
};

/// The bins of the first histogram: NaN; then numbers in steps of 1/32 of a power of two from 2^-16
/// to 2^16, on both sides of zero.
struct FirstBins {
  static constexpr int kShift = 18, kMiddle = kBins / 2;
  static constexpr uint32_t kFirst = (127 - 16) << 5;  // of the magnitudes in steps of kShift bits
  static constexpr uint32_t kSteps = kMiddle - 1;

  /// Of a number.
  __device__ static uint32_t of(float value) {
    const float magnitude = fminf(fmaxf(fabsf(value), __uint_as_float(kFirst << kShift)),
                                  __uint_as_float((kFirst + kSteps - 1) << kShift));
    const uint32_t step = (__float_as_uint(magnitude) >> kShift) - kFirst;
    const auto flip = static_cast<uint32_t>(static_cast<int32_t>(__float_as_uint(value + 0.0f)) >>
                                            31);  // -0 is +0
    return kMiddle + (step ^ flip);
  }
  __device__ static Range range(uint32_t bin, uint32_t need, uint32_t entries) {
    if (bin == 0) return {0, 0, need, entries};
    const bool negative = bin < kMiddle;
    const uint32_t step = negative ? kMiddle - 1 - bin : bin - kMiddle;
    const uint32_t least = step > 0 ? (kFirst + step) << kShift : negative ? 1 : 0;
    const uint32_t most = step < kSteps - 1 ? ((kFirst + step + 1) << kShift) - 1 : 0x7F800000;
    return negative ? Range{0x7FFFFFFF - most, 0x7FFFFFFF - least, need, entries}
                    : Range{0x80000000 + least, 0x80000000 + most, need, entries};
  }
};

/// A finished histogram, for find_bin.
struct FinishedBins {
  const uint32_t* bins;

  __device__ void take(int top, uint32_t (&counts)[kTaken]) const {
    const uint4 all = *reinterpret_cast<const uint4*>(&bins[top - (kTaken - 1)]);
    counts[0] = all.w, counts[1] = all.z, counts[2] = all.y, counts[3] = all.x;
  }
};

template <int kThreads>
__device__ void zero_bins(uint32_t* bins) {
  static_assert(kBins / 4 <= kThreads);
  if (threadIdx.x < kBins / 4) reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

__device__ inline void zero_range_bins(uint32_t* bins) {
  if (threadIdx.x < kRangeBins / 4) {
    reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
}

/// Calls use(group, values) for this thread's share of the part's groups.
template <int kThreads, class Use>
__device__ void each_group(const Part& part, const SharedMemory& shared, Use use) {
  // Instructions come from cold memory, too: few of them.
#pragma unroll 2
  for (uint32_t g = threadIdx.x; g < part.count; g += kThreads) {
    const float4 group = reinterpret_cast<const float4*>(shared.values)[g];
    const float values[4] = {group.x, group.y, group.z, group.w};
    use(g, values);
  }
}

template <int kThreads>
__device__ void count_numbers(const Row& row, const Part& part, SharedMemory& shared) {
  each_group<kThreads>(part, shared, [&](uint32_t g, const float(&values)[4]) {
    const float sum = values[0] + values[1] + values[2] + values[3];
    if (sum == sum) {
#pragma unroll
      for (int i = 0; i < 4; ++i) atomicAdd(&shared.bins[FirstBins::of(values[i])], 1u);
      return;
    }
    // NaN, in or beside the window, or infinities.
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const float value = shared.values[4 * g + static_cast<uint32_t>(i)];
      if (row.position(part.first + g, i) >= row.len) continue;
      atomicAdd(&shared.bins[value == value ? FirstBins::of(value) : 0], 1u);
    }
  });
}

template <int kThreads>
__device__ void count_range(const Part& part, const Range& range, int shift, SharedMemory& shared) {
  each_group<kThreads>(part, shared, [&](uint32_t, const float(&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t above = key_of(values[i]) - range.low;
      if (above <= range.high - range.low) atomicAdd(&shared.bins[above >> shift], 1u);
    }
  });
}

/// The histogram of the row from those of the parts. Once each thread has counted its share, every
/// thread calls it.
template <int kBlocks, int kThreads>
__device__ const uint32_t* sum_bins(uint32_t rank, int round, SharedMemory& shared) {
  __syncthreads();
  if constexpr (kBlocks == 1) return shared.bins;
  constexpr uint32_t kShare = kBins / kBlocks / 4;  // of a block, in fours
  const auto* const bins = reinterpret_cast<const uint4*>(shared.bins);
  auto* const shares = reinterpret_cast<uint4*>(shared.shares);
  auto* const totals = reinterpret_cast<uint4*>(shared.totals);
  if (threadIdx.x == 0) {
    cuda::expect(shared.shares_came, 4 * kBins);
    cuda::expect(shared.totals_came, 4 * kBins);
  }
  if (threadIdx.x < kBins / 4) {
    cuda::send(bins[threadIdx.x], &shares[rank * kShare + threadIdx.x % kShare], shared.shares_came,
               threadIdx.x / kShare);
  }
  if (threadIdx.x < kShare) {
    cuda::wait_for_inbox(shared.shares_came, round);
    uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) {
      const uint4 one = shares[r * kShare + threadIdx.x];
      sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
#pragma unroll 4
    for (uint32_t r = 0; r < kBlocks; ++r) {
      cuda::send(sum, &totals[rank * kShare + threadIdx.x], shared.totals_came, r);
    }
  }
  cuda::wait_for_inbox(shared.totals_came, round);
  return shared.totals;
}

/// The range where the best end, of one key or no more than kRangeEntries entries; how many each
/// part has in it is on its way to shared.in_range.
template <int kBlocks, int kThreads>
__device__ Range find_range(const Row& row, const Part& part, uint32_t topk, uint32_t rank,
                            SharedMemory& shared) {
  count_numbers<kThreads>(row, part, shared);
  Range range{0, 0, topk, row.len};
  int shift = 0;
#pragma unroll 1
  for (int round = 0;; ++round) {
    const uint32_t* const totals = sum_bins<kBlocks, kThreads>(rank, round, shared);
    find_bin<kThreads>(range.need, FinishedBins{totals}, shared.cut);
    const uint32_t bin = shared.cut.bin;
    if (round == 0) {
      range = FirstBins::range(bin, shared.cut.need, shared.cut.entries);
    } else {
      const uint32_t low = range.low + (bin << shift);
      range = {low, min(range.high, low + ((1u << shift) - 1)), shared.cut.need,
               shared.cut.entries};
    }
    if (range.entries <= kRangeEntries || range.low == range.high) {
      if constexpr (kBlocks > 1) {
        if (threadIdx.x == 0) cuda::expect(shared.counts_came, 4 * kBlocks);
        if (threadIdx.x < kBlocks) {
          cuda::send(shared.bins[bin], &shared.in_range[rank], shared.counts_came, threadIdx.x);
        }
      }
      return range;
    }
    shift = max(bits_of(range.high - range.low) - kDigitBits, 0);
    zero_bins<kThreads>(shared.bins);
    __syncthreads();
    count_range<kThreads>(part, range, shift, shared);
  }
}

/// A bit for each entry of this thread: bit 4 * group + entry.
struct Marks {
  uint32_t better, in_range;
};

/// Calls use(group, values) for the groups of this thread.
template <class Use>
__device__ void each_own_group(const Part& part, const SharedMemory& shared, Use use) {
  const uint32_t first = threadIdx.x * part.of_thread;
  // Lanes begin with different groups: they are in different banks then.
  uint32_t j = threadIdx.x % 8 * part.of_thread / 8;
#pragma unroll 2
  for (uint32_t step = 0; step < part.of_thread; ++step) {
    if (first + j < part.count) {
      const float4 group = reinterpret_cast<const float4*>(shared.values)[first + j];
      const float values[4] = {group.x, group.y, group.z, group.w};
      use(j, values);
    }
    j = j + 1 < part.of_thread ? j + 1 : 0;
  }
}

__device__ inline Marks mark_entries(const Row& row, const Part& part, const Range& range,
                                     const SharedMemory& shared) {
  uint32_t better = 0, reaching = 0;
  if (range.of_nan()) {
    each_own_group(part, shared, [&](uint32_t j, const float(&values)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pos = row.position(part.first + threadIdx.x * part.of_thread + j, i);
        if (values[i] == values[i]) better |= 1u << (4 * j + i);
        if (pos < row.len) reaching |= 1u << (4 * j + i);
      }
    });
  } else {
    const float low = value_of(range.low), high = value_of(range.high);
    each_own_group(part, shared, [&](uint32_t j, const float(&values)[4]) {
      uint32_t above = 0, upto = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (values[i] > high) above |= 1u << i;
        if (values[i] >= low) upto |= 1u << i;
      }
      better |= above << (4 * j);
      reaching |= upto << (4 * j);
    });
  }
  return {better, reaching & ~better};
}

/// Where the entries of a thread stand among those of the row.
struct Places {
  uint32_t better, in_range;  // entries before
};

/// Sends the number of better entries and, if `listing`, the keys in the range to all blocks;
/// behind it all have come.
template <int kBlocks, int kThreads>
__device__ Places exchange_range(const Part& part, const Range& range, const Marks& marks,
                                 bool listing, uint32_t rank, SharedMemory& shared) {
  const uint32_t lane = threadIdx.x % cuda::kWarpThreads;
  const uint32_t warp = threadIdx.x / cuda::kWarpThreads;
  const WarpSum in_warp(static_cast<uint32_t>(__popc(marks.better)) |
                        static_cast<uint32_t>(__popc(marks.in_range)) << 16);
  if (lane == 0) shared.cut.sums[warp] = in_warp.total;
  __syncthreads();
  const uint32_t sums = lane < kThreads / cuda::kWarpThreads ? shared.cut.sums[lane] : 0;
  const uint32_t before = __reduce_add_sync(0xFFFFFFFF, lane < warp ? sums : 0) + in_warp.before;
  Places places{before & 0xFFFF, before >> 16};
  if constexpr (kBlocks > 1) {
    cuda::wait_for_inbox(shared.counts_came);
    places.in_range += __reduce_add_sync(0xFFFFFFFF, lane < rank ? shared.in_range[lane] : 0);
    if (threadIdx.x == 0) {
      cuda::expect(shared.range_came,
                   4 * (kBlocks + (listing ? static_cast<int>(range.entries) : 0)));
    }
    if (warp == 0) {
      const uint32_t better = __reduce_add_sync(0xFFFFFFFF, sums) & 0xFFFF;
      if (lane < kBlocks) cuda::send(better, &shared.better[rank], shared.range_came, lane);
    }
  }
  if (listing) {
    uint32_t to = places.in_range;
    for (uint32_t left = marks.in_range; left != 0; left &= left - 1, ++to) {
      const auto bit = static_cast<uint32_t>(__ffs(static_cast<int>(left))) - 1;
      const uint32_t key = key_of(shared.values[4 * threadIdx.x * part.of_thread + bit]);
      if constexpr (kBlocks > 1) {
#pragma unroll 4
        for (uint32_t r = 0; r < kBlocks; ++r) {
          cuda::send(key, &shared.keys[to], shared.range_came, r);
        }
      } else {
        shared.keys[to] = key;
      }
    }
  }
  if constexpr (kBlocks > 1) {
    cuda::wait_for_inbox(shared.range_came);
    places.better += __reduce_add_sync(0xFFFFFFFF, lane < rank ? shared.better[lane] : 0);
  } else {
    __syncthreads();
  }
  return places;
}

/// shared.selected for the entries of the range, from their keys.
template <int kThreads>
__device__ void select_listed(const Range& range, SharedMemory& shared) {
  constexpr int kOwn = kRangeEntries / kThreads;
  const uint32_t lane = threadIdx.x % cuda::kWarpThreads;
  const int bits = bits_of(range.high - range.low);
  const int shift = max(bits - kRangeDigitBits, 0);
  uint32_t keys[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t own = threadIdx.x + static_cast<uint32_t>(i) * kThreads;
    if (own >= range.entries) continue;
    keys[i] = shared.keys[own];
    atomicAdd(&shared.range_bins[(keys[i] - range.low) >> shift], 1u);
  }
  __syncthreads();
  // Every warp finds the bin where the best end; lanes have eight bins each, from the top.
  static_assert(kRangeBins == 8 * cuda::kWarpThreads);
  const auto* const from =
      reinterpret_cast<const uint4*>(&shared.range_bins[8 * (cuda::kWarpThreads - 1 - lane)]);
  const uint4 upper = from[1], lower = from[0];
  const uint32_t counts[8] = {upper.w, upper.z, upper.y, upper.x,
                              lower.w, lower.z, lower.y, lower.x};
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += counts[i];
  uint32_t before = WarpSum(sum).before;
  uint32_t found = 0, need = 0, entries = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (before < range.need && range.need <= before + counts[i]) {
      found = 8 * (cuda::kWarpThreads - lane) - 1 - static_cast<uint32_t>(i);
      need = range.need - before;
      entries = counts[i];
    }
    before += counts[i];
  }
  const int from_lane = __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFF, entries != 0))) - 1;
  found = __shfl_sync(0xFFFFFFFF, found, from_lane);
  need = __shfl_sync(0xFFFFFFFF, need, from_lane);
  entries = __shfl_sync(0xFFFFFFFF, entries, from_lane);
  Entry last{range.low + (found << shift), ~0u};
  const auto is_in_bin = [&](uint32_t key) { return (key - range.low) >> shift == found; };
  if (need < entries && entries <= kListed) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t own = threadIdx.x + static_cast<uint32_t>(i) * kThreads;
      if (own < range.entries && is_in_bin(keys[i])) {
        shared.cut.list[atomicAdd(&shared.cut.listed, 1u)] = {keys[i], own};
      }
    }
    __syncthreads();
  } else if (need < entries) {
    zero_bins<kThreads>(shared.bins);
    __syncthreads();
    last = find_last<kThreads>(
        {last.key, shift, need, entries}, range.entries, shared.bins, shared.cut, [&](auto use) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            const uint32_t own = threadIdx.x + static_cast<uint32_t>(i) * kThreads;
            if (own < range.entries && keys[i] >= last.key) {
              use(keys[i], own);
            }
          }
        });
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t own = threadIdx.x + static_cast<uint32_t>(i) * kThreads;
    bool selected = false;
    if (own < range.entries) {
      selected = Entry{keys[i], own}.reaches(last);
      if (need < entries && entries <= kListed && is_in_bin(keys[i])) {
        uint32_t reaching = 0;  // with this entry
#pragma unroll 1
        for (uint32_t k = 0; k < entries; ++k) {
          reaching += shared.cut.list[k].reaches({keys[i], own});
        }
        selected = reaching <= need;
      }
    }
    const uint32_t word = __ballot_sync(0xFFFFFFFF, selected);
    if (lane == 0) shared.selected[own / cuda::kWarpThreads] = word;
  }
  __syncthreads();
}

/// Which entries of the range are among the best: by their bits if they are listed, else the first
/// ones. Every thread of a warp makes and asks it.
struct Selection {
  const uint32_t* bits;  // null: not listed
  uint32_t need;
  uint32_t word, words_before;  // of the lane

  __device__ Selection(const uint32_t* selected, uint32_t range_need)
      : bits(selected), need(range_need), word(0), words_before(0) {
    static_assert(kRangeEntries == cuda::kWarpThreads * cuda::kWarpThreads);
    if (bits == nullptr) return;
    word = bits[threadIdx.x % cuda::kWarpThreads];
    words_before = WarpSum(static_cast<uint32_t>(__popc(word))).before;
  }
  /// How many before `entry` are selected.
  __device__ uint32_t before(uint32_t entry) const {
    if (bits == nullptr) return min(entry, need);
    const uint32_t at = min(entry / cuda::kWarpThreads, cuda::kWarpThreads - 1u);
    const uint32_t own_word = __shfl_sync(0xFFFFFFFF, word, static_cast<int>(at));
    const uint32_t own_before = __shfl_sync(0xFFFFFFFF, words_before, static_cast<int>(at));
    const uint32_t within = entry - at * cuda::kWarpThreads;  // 32 behind the last of all
    return own_before +
           static_cast<uint32_t>(__popc(within < 32 ? own_word & ((1u << within) - 1) : own_word));
  }
  /// By any thread.
  __device__ bool has(uint32_t entry) const {
    return bits != nullptr ? (bits[entry / 32] >> entry % 32 & 1) != 0 : entry < need;
  }
};

/// Writes the selected ones of a thread's marked entries, of which bit 0 has position `first`.
__device__ inline void write_marked(const TopkRows& rows, int64_t t, const Marks& marks,
                                    const Places& places, const Selection& selection,
                                    uint32_t first) {
  int32_t* out = rows.out(t) + places.better + selection.before(places.in_range);
  uint32_t entry = places.in_range;
#pragma unroll 1
  for (uint32_t left = marks.better | marks.in_range; left != 0; left &= left - 1) {
    const auto bit = static_cast<uint32_t>(__ffs(static_cast<int>(left))) - 1;
    if ((marks.in_range >> bit & 1) != 0 && !selection.has(entry++)) continue;
    *out++ = rows.index(t, static_cast<int32_t>(first + bit));
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

template <int kBlocks, int kThreads>
__device__ void select_row(const TopkRows& rows, uint32_t topk, SharedMemory& shared) {
  const int64_t t = blockIdx.x / kBlocks;
  const uint32_t rank = kBlocks > 1 ? cuda::cluster_rank() : 0;
  if (threadIdx.x == 0) {
    cuda::mbarrier_init(shared.full, 1);
    if constexpr (kBlocks > 1) {
      for (cuda::Inbox* inbox :
           {&shared.shares_came, &shared.totals_came, &shared.counts_came, &shared.range_came}) {
        cuda::init_inbox(*inbox);
      }
    }
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
  if constexpr (kBlocks > 1) cuda::cluster_arrive_relaxed();
  const Row row(rows.logits(t, window), window.len);
  const Part part(row.num_groups(), rank, kBlocks, kThreads);
  if (threadIdx.x == 0) {
    copy_part(row, part, shared);
    shared.cut.listed = 0;
  }
  zero_bins<kThreads>(shared.bins);
  zero_range_bins(shared.range_bins);
  __syncthreads();
  cuda::mbarrier_wait(shared.full, 0);
  if constexpr (kBlocks > 1) cuda::cluster_wait();  // all blocks have started
  const Range range = find_range<kBlocks, kThreads>(row, part, topk, rank, shared);
  const Marks marks = mark_entries(row, part, range, shared);
  const bool listing = range.low < range.high && range.need < range.entries;
  const Places places =
      exchange_range<kBlocks, kThreads>(part, range, marks, listing, rank, shared);
  if (listing) select_listed<kThreads>(range, shared);
  write_marked(rows, t, marks, places, Selection(listing ? shared.selected : nullptr, range.need),
               4 * (part.first + threadIdx.x * part.of_thread) - row.before);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FOVEA_TOPK_CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#define FOVEA_TOPK_SM90_ONLY(...) __VA_ARGS__
#else
#define FOVEA_TOPK_CLUSTER_OF(blocks)
#define FOVEA_TOPK_SM90_ONLY(...)
#endif

template <int kBlocks, int kThreads>
__global__ void FOVEA_TOPK_CLUSTER_OF(kBlocks) __launch_bounds__(kThreads, 1)
    select_rows(const __grid_constant__ TopkRows rows, uint32_t topk) {
  extern __shared__ __align__(16) uint8_t memory[];
  FOVEA_TOPK_SM90_ONLY(
      select_row<kBlocks, kThreads>(rows, topk, *reinterpret_cast<SharedMemory*>(memory)));
}

#undef FOVEA_TOPK_CLUSTER_OF
#undef FOVEA_TOPK_SM90_ONLY

}  // namespace fovea::internal::topk_sm90
