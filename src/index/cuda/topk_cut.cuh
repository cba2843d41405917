#pragma once

#include <cstdint>

#include "src/core/access.h"
#include "src/core/cuda/scan.cuh"
#include "src/core/cuda/vector_io.cuh"

/// The steps of selecting the K best of a row, for kernels of which one block or a cluster has a
/// row: its values in groups, their keys, where the best end, and the ranks of those in order.
namespace fovea::internal::topk {

inline constexpr int kDigitBits = 11;
inline constexpr int kBins = 1 << kDigitBits;
inline constexpr uint32_t kMaxSample = 4096;
// Candidates beyond K that there is room for. The threshold aims at 4.5 standard deviations of the
// sample above K; up to 256K columns there is as much room again.
inline constexpr int64_t kSlack = 4096;
inline constexpr int64_t kMaxSampledTopk = 4096;
// Of four logits, of one thread at a time, so that loads overlap.
inline constexpr int kGroups = 4;
// Entries in a range that are compared with one another rather than counted again.
inline constexpr uint32_t kListed = 32;
inline constexpr uint32_t kMinusInfinityKey = 0x007FFFFF;

/// An entry of a row. Equal keys have their order from their positions, the lower one first.
struct Entry {
  uint32_t key, pos;

  /// Whether it is `last` or better.
  __device__ bool reaches(const Entry& last) const {
    return key > last.key || (key == last.key && pos <= last.pos);
  }
};

/// What the steps need of a block's shared memory.
struct CutShared {
  uint32_t sums[cuda::kWarpThreads + 1];
  uint32_t bin, need, entries;  // what find_bin hands round
  uint32_t listed;              // zero before find_last
  Entry list[kListed];
  Entry last;
};

/// A window of logits in groups of four, of which the first starts at a multiple of 16 bytes at or
/// before the window.
struct Row {
  const float* groups;
  uint32_t before;  // elements of the first group that precede the window
  uint32_t len;

  __device__ Row(const float* logits, int64_t length)
      : before(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(logits) / sizeof(float) % 4)),
        len(static_cast<uint32_t>(length)) {
    groups = logits - before;
  }
  __device__ uint32_t num_groups() const { return (before + len + 3) / 4; }
  __device__ float at(uint32_t pos) const { return groups[uint64_t{before} + pos]; }
  /// Asks for the 128 bytes from element `at`, counted from the first group, before they are used.
  __device__ void prefetch(uint32_t at) const {
    if (at >= before && at < before + len) cuda::prefetch_l2(groups + at);
  }
  /// Position of element i of group g; >= len also for what precedes the window.
  __device__ uint32_t position(uint32_t g, int i) const {
    return 4 * g + static_cast<uint32_t>(i) - before;
  }
  /// Groups g, g + step, ..., NaN in place of what is outside of the window, which is not read.
  __device__ void load(uint32_t g, uint32_t step, float (&to)[kGroups][4]) const {
    const float* const from = groups + uint64_t{g} * 4;
    if (4 * g >= before && 4 * (g + (kGroups - 1) * step) + 4 <= before + len) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const float4 all = *reinterpret_cast<const float4*>(from + j * step * 4);
        to[j][0] = all.x, to[j][1] = all.y, to[j][2] = all.z, to[j][3] = all.w;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool inside = position(g + j * step, i) < len;
        to[j][i] = inside ? from[j * step * 4 + i] : __uint_as_float(0x7FC00000);
      }
    }
  }
};

/// Where a word of a row's bitmap stands: the gaps keep threads that walk neighbouring stretches of
/// it out of one another's bank.
FOVEA_HOST_DEVICE inline uint32_t bitmap_place(uint32_t word) { return word + word / 32; }

/// Sums over the lanes before this one, and over all.
struct WarpSum {
  uint32_t before, total;
  __device__ explicit WarpSum(uint32_t own) {
    uint32_t upto = own;
#pragma unroll
    for (int step = 1; step < cuda::kWarpThreads; step *= 2) {
      const uint32_t other = __shfl_up_sync(0xFFFFFFFF, upto, step);
      if (static_cast<int>(threadIdx.x) % cuda::kWarpThreads >= step) upto += other;
    }
    before = upto - own;
    total = __shfl_sync(0xFFFFFFFF, upto, cuda::kWarpThreads - 1);
  }
};

/// Sum of `own` over the threads of the block before this one. Every thread calls it; shared.sums
/// may be used again after the next barrier.
template <int kThreads>
__device__ uint32_t block_before(uint32_t own, CutShared& shared) {
  const int lane = threadIdx.x % cuda::kWarpThreads;
  const int warp = threadIdx.x / cuda::kWarpThreads;
  const WarpSum in_warp(own);
  if (lane == 0) shared.sums[warp] = in_warp.total;
  __syncthreads();
  return __reduce_add_sync(0xFFFFFFFF, lane < warp ? shared.sums[lane] : 0) + in_warp.before;
}

/// Keys have the order of the logits: NaN lowest, -0 equal to +0 (the sum makes it that).
__device__ inline uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  const uint32_t flip = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  return value != value ? 0 : bits ^ flip;
}

/// The inverse, for the keys of numbers.
__device__ inline float value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

__device__ inline int bits_of(uint32_t value) { return 32 - __clz(static_cast<int>(value)); }

/// The best are the values above [base, base + 2^bits) and `need` of the `entries` in it; 1 <= need
/// <= entries.
struct Cut {
  uint32_t base;
  int bits;
  uint32_t need;
  uint32_t entries;

  __device__ bool whole() const { return need == entries; }
  /// The same with bits = 0: of a whole range of several keys all are better than the key below it.
  __device__ Cut at_key() const { return bits > 0 ? Cut{base - 1, 0, 0, 0} : *this; }
};

/// Neighbouring bins that a thread takes of a histogram.
inline constexpr int kTaken = 4;

/// The histogram of one block: kBins counters in shared memory, zero between uses.
struct BlockBins {
  uint32_t* bins;

  __device__ void add(uint32_t bin) { atomicAdd(&bins[bin], 1u); }
  /// Every thread, behind its last add().
  __device__ void finish() { __syncthreads(); }
  /// Bins `top` and below, and zeroes them; top + 1 is a multiple of kTaken.
  __device__ void take(int top, uint32_t (&counts)[kTaken]) {
    auto* const from = reinterpret_cast<uint4*>(&bins[top - (kTaken - 1)]);
    const uint4 all = *from;
    *from = make_uint4(0, 0, 0, 0);
    counts[0] = all.w, counts[1] = all.z, counts[2] = all.y, counts[3] = all.x;
  }
};

/// The bin that holds the `need`-th entry from the top of a finished histogram, which it leaves
/// zero, in shared.bin; how many of its entries are needed and how many it has, in shared.need and
/// shared.entries. Every thread of the block calls it; behind it, all see the result.
template <int kThreads, class Bins>
__device__ void find_bin(uint32_t need, Bins bins, CutShared& shared) {
  constexpr int kScanning = kBins / kTaken, kScanningWarps = kScanning / cuda::kWarpThreads;
  static_assert(kScanning <= kThreads);
  const int warp = threadIdx.x / cuda::kWarpThreads, lane = threadIdx.x % cuda::kWarpThreads;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kTaken;
  uint32_t counts[kTaken];
  uint32_t own = 0, before = 0;
  if (warp < kScanningWarps) {
    bins.take(top, counts);
#pragma unroll
    for (int i = 0; i < kTaken; ++i) own += counts[i];
    const WarpSum in_warp(own);
    before = in_warp.before;
    if (lane == 0) shared.sums[warp] = in_warp.total;
  }
  __syncthreads();
  if (warp < kScanningWarps) {
    before += __reduce_add_sync(0xFFFFFFFF, lane < warp ? shared.sums[lane] : 0);
    if (before < need && need <= before + own) {
#pragma unroll
      for (int i = 0; i < kTaken; ++i) {
        if (before < need && need <= before + counts[i]) {
          shared.bin = static_cast<uint32_t>(top - i);
          shared.need = need - before;
          shared.entries = counts[i];
        }
        before += counts[i];
      }
    }
  }
  __syncthreads();
}

/// Narrows the range by up to `max_digits` digits, or until it is whole or has no more than `few`
/// entries. each(f) calls f(value) for the values of this thread. Every thread of the block calls
/// it.
template <int kThreads, class Bins, class Each>
__device__ Cut find_cut(Cut cut, int max_digits, uint32_t few, Bins bins, CutShared& shared,
                        Each each) {
#pragma unroll 1
  for (int digit = 0; digit < max_digits && cut.bits > 0 && !cut.whole() && cut.entries > few;
       ++digit) {
    const int shift = cut.bits > kDigitBits ? cut.bits - kDigitBits : 0;
    each([&](uint32_t value) {
      const uint32_t above = value - cut.base;
      if (value >= cut.base && above >> (cut.bits - 1) <= 1) bins.add(above >> shift);
    });
    bins.finish();
    find_bin<kThreads>(cut.need, bins, shared);
    cut.base += shared.bin << shift;
    cut.bits = shift;
    cut.need = shared.need;
    cut.entries = shared.entries;
  }
  return cut;
}

/// The last of the best among candidates of a row of `len` entries, given a range of keys where
/// they end. each(f) calls f(key, position) for the candidates of this thread, all of which are in
/// the range or above it. Once for a row, by every thread of the block.
template <int kThreads, class Each>
__device__ Entry find_last(Cut cut, uint32_t len, uint32_t* bins, CutShared& shared, Each each) {
  cut = find_cut<kThreads>(cut, 3, kListed, BlockBins{bins}, shared,
                           [&](auto use) { each([&](uint32_t key, uint32_t) { use(key); }); });
  if (cut.whole()) return {cut.base, ~0u};
  if (cut.entries > kListed) {  // of one key
    const Cut place = find_cut<kThreads>({0, bits_of(len - 1), cut.need, cut.entries}, 3, 0,
                                         BlockBins{bins}, shared, [&](auto use) {
                                           each([&](uint32_t key, uint32_t pos) {
                                             if (key == cut.base) use(len - 1 - pos);
                                           });
                                         });
    return {cut.base, len - 1 - place.base};
  }
  const uint32_t widest = cut.bits < 32 ? (1u << cut.bits) - 1 : ~0u;
  each([&](uint32_t key, uint32_t pos) {
    if (key >= cut.base && key - cut.base <= widest) {
      shared.list[atomicAdd(&shared.listed, 1u)] = {key, pos};
    }
  });
  __syncthreads();
  if (threadIdx.x < cut.entries) {
    const Entry own = shared.list[threadIdx.x];
    uint32_t reaching = 0;
#pragma unroll 2
    for (uint32_t i = 0; i < cut.entries; ++i) reaching += shared.list[i].reaches(own);
    if (reaching == cut.need) shared.last = own;
  }
  __syncthreads();
  return shared.last;
}

/// A sample of a row longer than it: one entry from each of `size` equal parts. Its `rank` best end
/// where a few more than K entries of the row are expected to.
struct SampleShape {
  int size_bits;
  uint32_t size;
  uint32_t rank;

  // Each entry costs a memory access of its own: no more than the room for candidates asks for.
  __device__ SampleShape(uint32_t len, uint32_t topk)
      : size_bits(len <= 1 << 16   ? 10
                  : len <= 1 << 17 ? 11
                                   : 12),
        size(1u << size_bits) {
    const float share = static_cast<float>(size) / static_cast<float>(len);
    const float expected = static_cast<float>(topk) * share;
    // Half of the slack at most: as many entries more than expected have room.
    const float most = static_cast<float>(topk + static_cast<uint32_t>(kSlack / 2)) * share;
    const float aim = fminf(expected + 4.5f * sqrtf(expected) + 4.0f, most);
    rank = min(max(static_cast<uint32_t>(aim), 1u), size);
  }

  /// The position taken from a part: at a place in it that no period of the row follows.
  __device__ uint32_t position(uint32_t part, uint32_t len) const {
    uint32_t mixed = part * 0x9E3779B1u;
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77u;
    const uint64_t place = uint64_t{part} << 16 | mixed >> 16;
    return static_cast<uint32_t>(place * len >> (16 + size_bits));
  }

  /// All of it.
  __device__ Cut cut() const { return {0, 32, rank, size}; }

  /// The lowest number in or above a cut; 0 where NaN is in it or the row is likely to have more
  /// than `capacity` entries that reach it.
  __device__ uint32_t threshold(const Cut& cut, uint32_t len, uint32_t capacity) const {
    const uint64_t reaching = rank - cut.need + cut.entries;
    if (cut.base == 0 || reaching * len > uint64_t{capacity} * size) return 0;
    return max(cut.base, kMinusInfinityKey);  // what lies between NaN and -infinity is no number
  }
};

/// Bins of the histogram that are 1/32 of a value wide from 2^-16 to 2^16, on both sides of zero.
struct ValueBins {
  static constexpr int kShift = 18, kHalf = kBins / 2;
  static constexpr int kFirst = (127 - 16) << 5;  // of the magnitudes in steps of kShift bits

  __device__ static uint32_t of(uint32_t key) {
    const int step = static_cast<int>(key >> kShift) - (1 << (31 - kShift));
    const int flip = step >> 31;
    const int bin = min(max((step ^ flip) - kFirst, 0), kHalf - 1);
    return static_cast<uint32_t>(kHalf + (bin ^ flip));
  }
  /// The range of a bin; 32 bits where it is no power of two: at zero and beyond the outer bins,
  /// the lowest of which begins at 0 and has NaN.
  __device__ static Cut cut(uint32_t bin, uint32_t need, uint32_t entries) {
    const int above = static_cast<int>(bin) - kHalf;
    const int flip = above >> 31;
    const int from_zero = above ^ flip;
    if (bin == 0 || above == 0) return {above == 0 ? 0x80000000u : 0, 32, need, entries};
    const int step = (from_zero + kFirst) ^ flip;
    return {static_cast<uint32_t>(step + (1 << (31 - kShift))) << kShift,
            from_zero > 0 && from_zero < kHalf - 1 ? kShift : 32, need, entries};
  }
};

/// What a number has to reach to be a candidate of the row, from its sample; 0: no number will do,
/// and `narrow` is where the sample has its end. `keys` has room for the sample. Every thread of
/// the block calls it.
template <int kThreads>
__device__ uint32_t sampled_threshold(const Row& row, const SampleShape& sample, uint32_t capacity,
                                      uint32_t* bins, uint32_t* keys, CutShared& shared,
                                      Cut& narrow) {
  constexpr int kAtOnce = kThreads < 1024 ? 4 : 2;  // loads that overlap
  BlockBins coarse{bins};
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < sample.size; first += kAtOnce * kThreads) {
    float values[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t part = min(first + i * kThreads, sample.size - 1);
      values[i] = row.at(sample.position(part, row.len));
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i * kThreads >= sample.size) continue;
      const uint32_t key = key_of(values[i]);
      keys[first + i * kThreads] = key;
      coarse.add(ValueBins::of(key));
    }
  }
  coarse.finish();
  find_bin<kThreads>(sample.rank, coarse, shared);
  // These bins do where they let no more through than there is ample room for.
  const Cut bin = ValueBins::cut(shared.bin, shared.need, shared.entries);
  const uint32_t threshold = sample.threshold(bin, row.len, capacity / 4 * 3);
  if (threshold != 0) return threshold;
  narrow = find_cut<kThreads>(
      bin.bits < 32 ? bin : sample.cut(), 3, 0, BlockBins{bins}, shared, [&](auto use) {
#pragma unroll 1
        for (uint32_t part = threadIdx.x; part < sample.size; part += kThreads) use(keys[part]);
      });
  return sample.threshold(narrow, row.len, capacity);
}

/// Counts per group of a 16-bit mask over kGroups groups, a byte each.
__device__ inline uint32_t group_counts(uint32_t mask) {
  static_assert(kGroups == 4);
  const uint32_t pairs = mask - (mask >> 1 & 0x5555);
  const uint32_t groups = (pairs & 0x3333) + (pairs >> 2 & 0x3333);
  return (groups & 0xF) | (groups & 0xF0) << 4 | (groups & 0xF00) << 8 | (groups & 0xF000) << 12;
}

/// Their sum, which a byte may not hold.
__device__ inline uint32_t byte_sum(uint32_t bytes) {
  return (bytes & 0xFF) + (bytes >> 8 & 0xFF) + (bytes >> 16 & 0xFF) + (bytes >> 24);
}

/// Ranks of two masks, of better entries and of ties, over a block whose threads hold kGroups
/// groups each, in the order of warp, group, lane, entry.
struct StepRanks {
  uint32_t better, ties;
  WarpSum better_sums, ties_sums;       // a byte for each group
  uint32_t better_before, ties_before;  // this warp
  uint32_t better_total, ties_total;    // of the block

  /// Every thread of the block calls it.
  template <int kThreads>
  __device__ static StepRanks of(uint32_t better, uint32_t ties, CutShared& shared) {
    constexpr int kWarps = kThreads / cuda::kWarpThreads;
    const uint32_t lane = threadIdx.x % cuda::kWarpThreads;
    const uint32_t warp = threadIdx.x / cuda::kWarpThreads;
    StepRanks ranks{better, ties, WarpSum(group_counts(better)), WarpSum(group_counts(ties)), 0, 0,
                    0,      0};
    __syncthreads();  // the sums of the step before were read
    if (lane == 0) {
      // Both counts of a block fit into 16 bits.
      shared.sums[warp] = byte_sum(ranks.better_sums.total) | byte_sum(ranks.ties_sums.total) << 16;
    }
    __syncthreads();
    const WarpSum warps(lane < kWarps ? shared.sums[lane] : 0);
    const uint32_t before = __shfl_sync(0xFFFFFFFF, warps.before, static_cast<int>(warp));
    ranks.better_before = before & 0xFFFF;
    ranks.ties_before = before >> 16;
    ranks.better_total = warps.total & 0xFFFF;
    ranks.ties_total = warps.total >> 16;
    return ranks;
  }

  /// Calls emit(rank, group, entry) for the better entries and the first `need` of the ties, with
  /// `better_first` and `ties_first` of them before the block.
  template <class Emit>
  __device__ void emit(uint32_t better_first, uint32_t ties_first, uint32_t need, Emit emit) const {
    uint32_t better_rank = better_first + better_before;
    uint32_t tie_rank = ties_first + ties_before;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      uint32_t b = better_rank + (better_sums.before >> (8 * j) & 0xFF);
      uint32_t tie = tie_rank + (ties_sums.before >> (8 * j) & 0xFF);
      for (uint32_t left = (better | ties) >> (4 * j) & 0xF; left != 0; left &= left - 1) {
        const int i = __ffs(static_cast<int>(left)) - 1;
        const bool is_tie = (ties >> (4 * j + i) & 1) != 0;
        if (!is_tie || tie < need) emit(b + min(tie, need), j, i);
        ++(is_tie ? tie : b);
      }
      better_rank += better_sums.total >> (8 * j) & 0xFF;
      tie_rank += ties_sums.total >> (8 * j) & 0xFF;
    }
  }
};

/// Calls use(key) for the keys of this thread's share of the row.
template <int kThreads, class Use>
__device__ void each_key(const Row& row, Use use) {
  const uint32_t num_groups = row.num_groups();
  for (uint32_t first = threadIdx.x; first < num_groups; first += kGroups * kThreads) {
    float values[kGroups][4];
    row.load(first, kThreads, values);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row.position(first + j * kThreads, i) < row.len) use(key_of(values[j][i]));
      }
    }
  }
}

/// Calls emit(rank, position) for the K best entries of any row, given where they end: what is
/// above the range, and the first `need` in it, which is one key or whole.
template <int kThreads, class Emit>
__device__ void emit_in_order(const Row& row, const Cut& cut, uint32_t topk, CutShared& shared,
                              Emit emit) {
  const uint32_t num_groups = row.num_groups();
  const uint32_t lane = threadIdx.x % cuda::kWarpThreads;
  const uint32_t warp = threadIdx.x / cuda::kWarpThreads;
  uint32_t better_before = 0, ties_before = 0;
  // A warp takes neighbouring groups: position is in the order of warp, step, lane.
  for (uint32_t first = 0; first < num_groups; first += kGroups * kThreads) {
    const uint32_t g = first + warp * kGroups * cuda::kWarpThreads + lane;
    float values[kGroups][4];
    row.load(g, cuda::kWarpThreads, values);
    uint32_t better = 0, ties = 0;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t key = key_of(values[j][i]);
        const bool inside = row.position(g + j * cuda::kWarpThreads, i) < row.len;
        if (inside && key > cut.base) better |= 1u << (4 * j + i);
        if (inside && key == cut.base) ties |= 1u << (4 * j + i);
      }
    }
    const StepRanks ranks = StepRanks::of<kThreads>(better, ties, shared);
    ranks.emit(better_before, ties_before, cut.need, [&](uint32_t rank, int j, int i) {
      emit(rank, row.position(g + j * cuda::kWarpThreads, i));
    });
    better_before += ranks.better_total;
    ties_before += ranks.ties_total;
    if (better_before + min(ties_before, cut.need) >= topk) return;
  }
}

}  // namespace fovea::internal::topk
