#include <algorithm>
#include <cstdint>
#include <limits>

#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/core/workspace.h"
#include "src/index/topk_select_impl.h"
#include "src/index/topk_select_transform.h"

// One block a row. Where rows are few and long, blocks of a launch before collect what the one
// block selects from.
//
// Usual rows are read once: a sample of the row gives a threshold that a few more than K entries
// reach, one pass keeps the positions of those, a radix selection among them finds the K best, and
// a bitmap of the row puts these in order. Rows for which that cannot work (K too large, more
// columns than the bitmap has bits, too many entries at the threshold, a misleading sample) are
// walked again: to count what lies above and on a plateau that the sample saw, or, where there is
// none, in three histograms of all keys, to the exact K-th key; then once more in order of
// position. All give the same integers; which one runs decides nothing but the time.
namespace fovea::internal {
namespace {

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr uint32_t kMaxSample = 4096;
// Candidates beyond K that there is room for. The threshold aims at 4.5 standard deviations of the
// sample above K; up to 256K columns there is as much room again.
constexpr int64_t kSlack = 4096;
constexpr int64_t kMaxSampledTopk = 4096;
constexpr int kGroups = 4;  // of four logits, of one thread at a time, so that loads overlap
constexpr uint32_t kMinusInfinityKey = 0x007FFFFF;

/// Of one launch, in dynamic shared memory, in this order.
struct ScratchSizes {
  uint32_t capacity;      // candidates; 0: none are collected
  uint32_t bitmap_words;  // columns / 32 of the longest row that has candidates

  /// Whether candidates of the row can be collected.
  __device__ bool allow(uint32_t len, uint32_t topk) const {
    return topk <= capacity && (len + 31) / 32 <= bitmap_words;
  }
};

/// Where a word of the bitmap stands: the gaps keep threads that walk neighbouring stretches of it
/// out of one another's bank.
FOVEA_HOST_DEVICE uint32_t bitmap_place(uint32_t word) { return word + word / 32; }

size_t shared_bytes(const ScratchSizes& sizes) {
  return sizeof(uint32_t) *
         (size_t{kBins} + 2 * size_t{sizes.capacity} + bitmap_place(sizes.bitmap_words));
}

struct Scratch {
  uint32_t* bins;       // [kBins], zero between uses
  uint32_t* keys;       // [capacity]
  uint32_t* positions;  // [capacity]
  uint32_t* bitmap;     // [bitmap_place(bitmap_words)]
};

/// Fixed part of a block's shared memory.
struct Shared {
  uint32_t sums[cuda::kWarpThreads + 1];
  uint32_t bin, need, entries;  // what find_cut hands round
  uint32_t candidates;
  uint32_t largest_key;
  uint32_t better, equal;
};

/// What the blocks of a row hand to the one that selects, in the workspace.
struct Parts {
  uint32_t count;        // of a row
  uint32_t capacity;     // positions that each has room for
  uint32_t* thresholds;  // [rows]; 0: nothing was collected
  uint32_t* entries;     // [rows][count], of which the first `capacity` were written
  uint32_t* positions;   // [rows][count][capacity]
};
constexpr uint32_t kMaxParts = cuda::kWarpThreads;

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
__device__ uint32_t block_before(uint32_t own, Shared& shared) {
  constexpr int kWarps = kThreads / cuda::kWarpThreads;
  const int lane = threadIdx.x % cuda::kWarpThreads;
  const int warp = threadIdx.x / cuda::kWarpThreads;
  const WarpSum in_warp(own);
  if (lane == 0) shared.sums[warp] = in_warp.total;
  __syncthreads();
  const WarpSum warps(lane < kWarps ? shared.sums[lane] : 0);
  return __shfl_sync(0xFFFFFFFF, warps.before, warp) + in_warp.before;
}

/// Keys have the order of the logits: NaN lowest, -0 equal to +0 (the sum makes it that).
__device__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  const uint32_t flip = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  return value != value ? 0 : bits ^ flip;
}

/// The inverse, for the keys of numbers.
__device__ float value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

/// The best are the values above [base, base + 2^bits) and `need` of the `entries` in it; 1 <= need
/// <= entries.
struct Cut {
  uint32_t base;
  int bits;
  uint32_t need;
  uint32_t entries;

  __device__ bool whole() const { return need == entries; }
};

/// Narrows the range by up to `max_digits` digits, or until it is whole. each(f) calls f(value) for
/// the values of this thread. Every thread of the block calls it.
template <int kThreads, class Each>
__device__ Cut find_cut(Cut cut, int max_digits, uint32_t* bins, Shared& shared, Each each) {
  constexpr int kPerThread = kBins / kThreads;
  for (int digit = 0; digit < max_digits && cut.bits > 0 && !cut.whole(); ++digit) {
    const int shift = cut.bits > kDigitBits ? cut.bits - kDigitBits : 0;
    each([&](uint32_t value) {
      const uint32_t above = value - cut.base;
      if (value >= cut.base && above >> (cut.bits - 1) <= 1) atomicAdd(&bins[above >> shift], 1u);
    });
    __syncthreads();
    const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kPerThread;
    uint32_t counts[kPerThread];
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      counts[i] = bins[top - i];
      bins[top - i] = 0;
      own += counts[i];
    }
    uint32_t before = block_before<kThreads>(own, shared);
    if (before < cut.need && cut.need <= before + own) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (before < cut.need && cut.need <= before + counts[i]) {
          shared.bin = static_cast<uint32_t>(top - i);
          shared.need = cut.need - before;
          shared.entries = counts[i];
        }
        before += counts[i];
      }
    }
    __syncthreads();
    cut.base += shared.bin << shift;
    cut.bits = shift;
    cut.need = shared.need;
    cut.entries = shared.entries;
  }
  return cut;
}

__device__ int bits_of(uint32_t value) { return 32 - __clz(static_cast<int>(value)); }

/// A sample of a row longer than it. Its `rank` best end where a few more than K entries of the row
/// are expected to.
template <int kThreads>
struct Sample {
  static constexpr int kPerThread = kMaxSample / kThreads;
  uint32_t keys[kPerThread];
  uint32_t size;
  uint32_t rank;

  // One entry from each of `size` equal parts, at a place in its part that no period of the row
  // follows. Each costs a memory access of its own: no more than the room for candidates asks for.
  __device__ Sample(const Row& row, uint32_t topk) {
    const int size_bits = row.len <= 1 << 16 ? 10 : row.len <= 1 << 17 ? 11 : 12;
    size = 1u << size_bits;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t part = threadIdx.x + static_cast<uint32_t>(i) * kThreads;
      if (part >= size) break;
      uint32_t mixed = part * 0x9E3779B1u;
      mixed = (mixed ^ mixed >> 15) * 0x85EBCA77u;
      const uint64_t place = uint64_t{part} << 16 | mixed >> 16;
      keys[i] = key_of(row.at(static_cast<uint32_t>(place * row.len >> (16 + size_bits))));
    }
    const float share = static_cast<float>(size) / static_cast<float>(row.len);
    const float expected = static_cast<float>(topk) * share;
    // Half of the slack at most: as many entries more than expected have room.
    const float most = static_cast<float>(topk + static_cast<uint32_t>(kSlack / 2)) * share;
    const float aim = fminf(expected + 4.5f * sqrtf(expected) + 4.0f, most);
    rank = min(max(static_cast<uint32_t>(aim), 1u), size);
  }

  /// All of it.
  __device__ Cut cut() const { return {0, 32, rank, size}; }

  __device__ Cut narrow(const Cut& cut, int digits, uint32_t* bins, Shared& shared) const {
    return find_cut<kThreads>(cut, digits, bins, shared, [&](auto use) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (threadIdx.x + static_cast<uint32_t>(i) * kThreads < size) use(keys[i]);
      }
    });
  }

  /// The lowest number in or above a cut; 0 where NaN is in it or the row is likely to have more
  /// than `capacity` entries that reach it.
  __device__ uint32_t threshold(const Cut& cut, const Row& row, uint32_t capacity) const {
    const uint64_t reaching = rank - cut.need + cut.entries;
    if (cut.base == 0 || reaching * row.len > uint64_t{capacity} * size) return 0;
    return max(cut.base, kMinusInfinityKey);  // what lies between NaN and -infinity is no number
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

/// Collects the positions that reach `threshold`, a number, in no order, from the share of `part`
/// among `parts` blocks; returns how many there are, of which `capacity` are written.
template <int kThreads>
__device__ uint32_t collect(const Row& row, uint32_t threshold, uint32_t* positions,
                            uint32_t capacity, uint32_t part, uint32_t parts, Shared& shared) {
  constexpr uint32_t kStep = kGroups * kThreads;
  const float least = value_of(threshold);
  const uint32_t num_groups = row.num_groups();
  const int lane = threadIdx.x % cuda::kWarpThreads;
  float next[kGroups][4];
  row.load(part * kStep + threadIdx.x, kThreads, next);
  for (uint32_t first = part * kStep + threadIdx.x - lane; first < num_groups;
       first += parts * kStep) {
    float values[kGroups][4];
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[j][i] = next[j][i];
    }
    row.load(first + lane + parts * kStep, kThreads, next);
    uint32_t reaching = 0;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (values[j][i] >= least) reaching |= 1u << (4 * j + i);
      }
    }
    if (!__any_sync(0xFFFFFFFF, reaching != 0)) continue;
    const auto own = static_cast<uint32_t>(__popc(reaching));
    const WarpSum sum(own);
    uint32_t begin = 0;
    if (lane == 0) begin = atomicAdd(&shared.candidates, sum.total);
    uint32_t to = __shfl_sync(0xFFFFFFFF, begin, 0) + sum.before;
    for (; reaching != 0 && to < capacity; reaching &= reaching - 1, ++to) {
      const int bit = __ffs(static_cast<int>(reaching)) - 1;
      positions[to] = row.position(first + bit / 4 * kThreads + lane, bit % 4);
    }
  }
  __syncthreads();
  return shared.candidates;
}

/// Narrows `cut`, of all keys of the row, to `key` if the K-th best has it; otherwise leaves it.
template <int kThreads>
__device__ void try_plateau(const Row& row, uint32_t key, uint32_t topk, Cut& cut, Shared& shared) {
  if (threadIdx.x == 0) shared.better = shared.equal = 0;
  __syncthreads();
  uint32_t better = 0, equal = 0;
  each_key<kThreads>(row, [&](uint32_t other) {
    better += other > key;
    equal += other == key;
  });
  better = __reduce_add_sync(0xFFFFFFFF, better);
  equal = __reduce_add_sync(0xFFFFFFFF, equal);
  if (threadIdx.x % cuda::kWarpThreads == 0) {
    atomicAdd(&shared.better, better);
    atomicAdd(&shared.equal, equal);
  }
  __syncthreads();
  if (shared.better < topk && topk - shared.better <= shared.equal) {
    cut = {key, 0, topk - shared.better, shared.equal};
  }
}

/// Puts the best K of the candidates into scratch.positions, ascending. Their keys are in place.
template <int kThreads>
__device__ void select_candidates(uint32_t count, uint32_t least_key, uint32_t largest_key,
                                  const Row& row, uint32_t topk, const Scratch& scratch,
                                  Shared& shared) {
  const auto each_candidate = [&](auto use) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) use(scratch.keys[i]);
  };
  const Cut cut = find_cut<kThreads>({least_key, bits_of(largest_key - least_key), topk, count}, 3,
                                     scratch.bins, shared, each_candidate);
  // Of equal keys the lower positions are the better ones.
  uint32_t least_place = 0;
  if (!cut.whole()) {
    const auto each_place = [&](auto use) {
      for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
        if (scratch.keys[i] == cut.base) use(row.len - 1 - scratch.positions[i]);
      }
    };
    least_place = find_cut<kThreads>({0, bits_of(row.len - 1), cut.need, cut.entries}, 3,
                                     scratch.bins, shared, each_place)
                      .base;
  }
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t pos = scratch.positions[i];
    if (scratch.keys[i] > cut.base ||
        (scratch.keys[i] == cut.base && row.len - 1 - pos >= least_place)) {
      atomicOr(&scratch.bitmap[bitmap_place(pos / 32)], 1u << (pos % 32));
    }
  }
  __syncthreads();
  // Each thread takes neighbouring words.
  const uint32_t words = (row.len + 31) / 32;
  const uint32_t share = (words + kThreads - 1) / kThreads;
  const uint32_t begin = min(threadIdx.x * share, words);
  const uint32_t end = min(begin + share, words);
  uint32_t own = 0;
  for (uint32_t word = begin; word < end; ++word) {
    own += static_cast<uint32_t>(__popc(scratch.bitmap[bitmap_place(word)]));
  }
  uint32_t rank = block_before<kThreads>(own, shared);
  for (uint32_t word = begin; word < end; ++word) {
    for (uint32_t set = scratch.bitmap[bitmap_place(word)]; set != 0; set &= set - 1) {
      scratch.positions[rank++] = word * 32 + static_cast<uint32_t>(__ffs(set)) - 1;
    }
  }
  __syncthreads();
}

/// Brings together what the parts of row t collected; returns how many entries that is, of which
/// `capacity` are written.
template <int kThreads>
__device__ uint32_t gather_parts(const Parts& parts, int64_t t, uint32_t* positions,
                                 Shared& shared) {
  const uint32_t lane = threadIdx.x % cuda::kWarpThreads;
  const WarpSum sum(lane < parts.count ? parts.entries[t * parts.count + lane] : 0);
  if (threadIdx.x < cuda::kWarpThreads) shared.sums[lane] = sum.before;
  __syncthreads();
  const uint32_t* const from = parts.positions + t * parts.count * parts.capacity;
  for (uint32_t i = threadIdx.x; i < min(sum.total, parts.capacity); i += kThreads) {
    uint32_t part = 0;  // the last one that begins at or before i
#pragma unroll
    for (uint32_t step = kMaxParts / 2; step > 0; step /= 2) {
      if (shared.sums[part + step] <= i) part += step;
    }
    positions[i] = from[uint64_t{part} * parts.capacity + i - shared.sums[part]];
  }
  __syncthreads();
  return sum.total;
}

/// The usual row: the result in scratch.positions, ascending. False: it has to be found otherwise,
/// from `cut`, which is a cut of all keys of the row.
template <int kThreads, bool kParts>
__device__ bool select_sampled(const Row& row, uint32_t topk, const ScratchSizes& sizes,
                               const Scratch& scratch, const Parts& parts, int64_t t,
                               Shared& shared, Cut& cut) {
  const uint32_t words = (row.len + 31) / 32;
  if (!sizes.allow(row.len, topk)) return false;
  for (uint32_t i = threadIdx.x; i < bitmap_place(words); i += kThreads) scratch.bitmap[i] = 0;
  if (threadIdx.x == 0) shared.candidates = shared.largest_key = 0;
  uint32_t count = row.len;
  uint32_t threshold = 0;
  if (row.len <= sizes.capacity) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) scratch.positions[i] = i;
    __syncthreads();
  } else {
    if constexpr (kParts) {
      threshold = parts.thresholds[t];
      if (threshold != 0) count = gather_parts<kThreads>(parts, t, scratch.positions, shared);
    }
    if (threshold == 0) {
      const Sample<kThreads> sample(row, topk);
      row.prefetch(threadIdx.x * 32);
      Cut reaching = sample.narrow(sample.cut(), 2, scratch.bins, shared);
      threshold = sample.threshold(reaching, row, sizes.capacity);
      if (threshold == 0) {
        reaching = sample.narrow(reaching, 1, scratch.bins, shared);
        if (reaching.bits == 0) try_plateau<kThreads>(row, reaching.base, topk, cut, shared);
        return false;
      }
      count = collect<kThreads>(row, threshold, scratch.positions, sizes.capacity, 0, 1, shared);
    }
    if (count < topk || count > sizes.capacity) return false;
  }
  uint32_t largest = 0;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t key = key_of(row.at(scratch.positions[i]));
    scratch.keys[i] = key;
    largest = max(largest, key);
  }
  largest = __reduce_max_sync(0xFFFFFFFF, largest);
  if (threadIdx.x % cuda::kWarpThreads == 0) atomicMax(&shared.largest_key, largest);
  __syncthreads();
  select_candidates<kThreads>(count, threshold, shared.largest_key, row, topk, scratch, shared);
  return true;
}

/// Counts per group of a 16-bit mask over kGroups groups, a byte each.
__device__ uint32_t group_counts(uint32_t mask) {
  const uint32_t pairs = mask - (mask >> 1 & 0x5555);
  const uint32_t groups = (pairs & 0x3333) + (pairs >> 2 & 0x3333);
  return (groups & 0xF) | (groups & 0xF0) << 4 | (groups & 0xF00) << 8 | (groups & 0xF000) << 12;
}

/// Calls emit(rank, position) for the K best entries of any row, given where they end: what is
/// above the range, and the first `need` in it, which is one key or whole.
template <int kThreads, class Emit>
__device__ void emit_in_order(const Row& row, const Cut& cut, uint32_t topk, Shared& shared,
                              Emit emit) {
  static_assert(kGroups == 4);
  constexpr int kWarps = kThreads / cuda::kWarpThreads;
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
    const WarpSum better_sums(group_counts(better)), ties_sums(group_counts(ties));
    // Both counts of a block's step fit into 16 bits; those of a warp's four steps do not fit into
    // a byte.
    const auto total_of = [](uint32_t bytes) {
      return (bytes & 0xFF) + (bytes >> 8 & 0xFF) + (bytes >> 16 & 0xFF) + (bytes >> 24);
    };
    __syncthreads();  // the sums of the last step were read
    if (lane == 0) {
      shared.sums[warp] = total_of(better_sums.total) | total_of(ties_sums.total) << 16;
    }
    __syncthreads();
    const WarpSum warps(lane < kWarps ? shared.sums[lane] : 0);
    const uint32_t before_warp = __shfl_sync(0xFFFFFFFF, warps.before, static_cast<int>(warp));
    uint32_t better_rank = better_before + (before_warp & 0xFFFF);
    uint32_t tie_rank = ties_before + (before_warp >> 16);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      uint32_t b = better_rank + (better_sums.before >> (8 * j) & 0xFF);
      uint32_t tie = tie_rank + (ties_sums.before >> (8 * j) & 0xFF);
      for (uint32_t left = (better | ties) >> (4 * j) & 0xF; left != 0; left &= left - 1) {
        const int i = __ffs(static_cast<int>(left)) - 1;
        const bool is_tie = (ties >> (4 * j + i) & 1) != 0;
        if (!is_tie || tie < cut.need) {
          emit(b + min(tie, cut.need), row.position(g + j * cuda::kWarpThreads, i));
        }
        ++(is_tie ? tie : b);
      }
      better_rank += better_sums.total >> (8 * j) & 0xFF;
      tie_rank += ties_sums.total >> (8 * j) & 0xFF;
    }
    better_before += warps.total & 0xFFFF;
    ties_before += warps.total >> 16;
    if (better_before + min(ties_before, cut.need) >= topk) return;
  }
}

/// Blocks t * parts.count .. of row t collect its candidates.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    collect_parts(const __grid_constant__ TopkRows rows, uint32_t topk, ScratchSizes sizes,
                  Parts parts) {
  __shared__ Shared shared;
  __shared__ uint32_t bins[kBins];
  const int64_t t = blockIdx.x / parts.count;
  const TopkWindow window = rows.window(t);
  if (window.len <= topk || window.len <= sizes.capacity) return;
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
  if (threadIdx.x == 0) shared.candidates = 0;
  __syncthreads();
  const Row row(rows.logits(t, window), window.len);
  uint32_t threshold = 0;
  if (sizes.allow(row.len, topk)) {
    const Sample<kThreads> sample(row, topk);
    row.prefetch(blockIdx.x % parts.count * (4 * kGroups * kThreads) +
                 threadIdx.x % (kGroups * kThreads / 8) * 32);
    const Cut reaching = sample.narrow(sample.cut(), 2, bins, shared);
    threshold = sample.threshold(reaching, row, sizes.capacity);
  }
  uint32_t entries = 0;
  if (threshold != 0) {
    uint32_t* const positions = parts.positions + int64_t{blockIdx.x} * parts.capacity;
    entries = collect<kThreads>(row, threshold, positions, parts.capacity, blockIdx.x % parts.count,
                                parts.count, shared);
  }
  if (threadIdx.x != 0) return;
  parts.thresholds[t] = threshold;  // the same from every block of the row
  parts.entries[blockIdx.x] = entries;
}

template <int kThreads, int kBlocksPerSm, bool kParts>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    select_rows(const __grid_constant__ TopkRows rows, uint32_t topk, ScratchSizes sizes,
                Parts parts) {
  extern __shared__ uint32_t dynamic[];
  __shared__ Shared shared;
  const Scratch scratch{dynamic, dynamic + kBins, dynamic + kBins + sizes.capacity,
                        dynamic + kBins + 2 * sizes.capacity};
  for (int i = threadIdx.x; i < kBins; i += kThreads) scratch.bins[i] = 0;
  __syncthreads();
  for (int64_t t = blockIdx.x; t < rows.num_rows(); t += gridDim.x) {
    const TopkWindow window = rows.window(t);
    int32_t* const out = rows.out(t);
    if (window.len <= topk) {
      for (uint32_t i = threadIdx.x; i < topk; i += kThreads) {
        out[i] = i < window.len ? rows.index(t, static_cast<int32_t>(i)) : -1;
      }
      continue;
    }
    const Row row(rows.logits(t, window), window.len);
    Cut cut{0, 32, topk, row.len};
    if (select_sampled<kThreads, kParts>(row, topk, sizes, scratch, parts, t, shared, cut)) {
      for (uint32_t i = threadIdx.x; i < topk; i += kThreads) {
        out[i] = rows.index(t, static_cast<int32_t>(scratch.positions[i]));
      }
    } else {
      const auto each = [&](auto use) { each_key<kThreads>(row, use); };
      cut = find_cut<kThreads>(cut, 3, scratch.bins, shared, each);
      // Of a whole range of several keys all are better than the key below it.
      if (cut.bits > 0) cut = {cut.base - 1, 0, 0, 0};
      emit_in_order<kThreads>(row, cut, topk, shared, [&](uint32_t rank, uint32_t pos) {
        out[rank] = rows.index(t, static_cast<int32_t>(pos));
      });
    }
    __syncthreads();  // the next row uses the same scratch
  }
}

ScratchSizes scratch_sizes(const TopkSelectProblem& problem, int64_t width,
                           const cuda::DeviceFacts& facts) {
  ScratchSizes sizes{};
  if (problem.topk > kMaxSampledTopk || problem.topk >= width) return sizes;
  sizes.capacity = static_cast<uint32_t>(std::min(problem.topk + kSlack, width));
  const auto used = static_cast<int64_t>(sizeof(Shared) + shared_bytes(sizes));
  const int64_t room = (facts.max_shared_bytes - used) / int64_t{sizeof(uint32_t)};
  const int64_t words = room * 32 / 33;  // without the gaps
  sizes.bitmap_words = static_cast<uint32_t>(std::clamp<int64_t>(words, 0, (width + 31) / 32));
  return sizes;
}

template <int kThreads, int kBlocksPerSm, bool kParts>
void launch_rows(const TopkRows& rows, const TopkSelectProblem& problem, const ScratchSizes& sizes,
                 const Parts& parts, Stream stream) {
  const int64_t blocks = std::min<int64_t>(rows.num_rows(), std::numeric_limits<int32_t>::max());
  cuda::launch("topk_select", select_rows<kThreads, kBlocksPerSm, kParts>,
               {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), shared_bytes(sizes)}, stream,
               rows, static_cast<uint32_t>(problem.topk), sizes, parts);
}

constexpr int kPartThreads = 512;
// Below this width, or with fewer blocks a row, a second launch costs more than it gains.
constexpr int64_t kMinSplitWidth = 262144;
constexpr int64_t kMinParts = 4;

/// Parts of `rows` rows in all are at most the multiprocessors.
Parts cut_parts(WorkspaceCutter& cutter, const ScratchSizes& sizes, int64_t rows, int64_t width,
                const cuda::DeviceFacts& facts) {
  Parts parts{};
  parts.capacity = sizes.capacity;
  parts.thresholds = cutter.take<uint32_t>(facts.num_sms);
  parts.entries = cutter.take<uint32_t>(facts.num_sms);
  parts.positions = cutter.take<uint32_t>(facts.num_sms * int64_t{sizes.capacity});
  const int64_t steps = (width + 4 * kGroups * kPartThreads - 1) / (4 * kGroups * kPartThreads);
  if (rows > 0) {
    parts.count =
        static_cast<uint32_t>(std::min({facts.num_sms / rows, steps, int64_t{kMaxParts}}));
  }
  return parts;
}

bool splits(const ScratchSizes& sizes, int64_t width) {
  return sizes.capacity != 0 && width >= kMinSplitWidth;
}

}  // namespace

size_t topk_select_cuda_workspace(const TopkSelectProblem& problem, const Device& device) {
  const cuda::DeviceFacts& facts = cuda::device_facts(device.ordinal);
  const ScratchSizes sizes = scratch_sizes(problem, problem.max_width, facts);
  WorkspaceCutter cutter({});
  if (splits(sizes, problem.max_width)) cut_parts(cutter, sizes, 0, problem.max_width, facts);
  return cutter.used_bytes();
}

void topk_select_cuda_portable(const TopkSelectProblem& problem, const Device& device,
                               const TopkSelectTensors& tensors, Workspace workspace,
                               Stream stream) {
  if (problem.topk == 0) return;
  const cuda::DeviceScope scope(device.ordinal);
  const cuda::DeviceFacts& facts = cuda::device_facts(device.ordinal);
  const TopkRows rows(problem, tensors);
  const ScratchSizes sizes = scratch_sizes(problem, rows.width(), facts);
  const int64_t num_rows = rows.num_rows();
  // Operators that select from what they keep no workspace for get one block a row.
  WorkspaceCutter cutter(workspace);
  const Parts parts = cut_parts(cutter, sizes, num_rows, rows.width(), facts);
  if (num_rows <= facts.num_sms / kMinParts && splits(sizes, rows.width()) &&
      workspace.bytes >= cutter.used_bytes()) {
    cuda::launch("topk_select", collect_parts<kPartThreads>,
                 {dim3(static_cast<unsigned>(num_rows * parts.count)), dim3(kPartThreads)}, stream,
                 rows, static_cast<uint32_t>(problem.topk), sizes, parts);
    launch_rows<1024, 1, true>(rows, problem, sizes, parts, stream);
  } else if (num_rows <= facts.num_sms) {
    // A block alone on its multiprocessor is as wide as it can be.
    launch_rows<1024, 1, false>(rows, problem, sizes, {}, stream);
  } else {
    // Of several, one streams while another selects.
    launch_rows<512, 2, false>(rows, problem, sizes, {}, stream);
  }
}

}  // namespace fovea::internal
