#pragma once

#include "src/core/cuda/bulk_copy.cuh"
#include "src/index/cuda/topk_cut.cuh"
#include "src/index/cuda/topk_select_sm90/config.h"
#include "src/index/topk_select_transform.h"

// Rows of which each is one block's; a block has several in turn. Every warp has units of the row
// brought to places of its own in shared memory by bulk copies, two at a time, also of the next row
// while one is selected from. Of a row all threads do:
//
//   cut a sample of it: a threshold that K entries and a few more are expected to reach
//   keep keys and positions of what reaches it in each unit, and count them in bins above it
//   find the bin where the best end and the best in it; mark all of them in a bitmap and write it
//
// Where the sample ends on a plateau of equal keys, the units mark that in the bitmap and what is
// above it is kept: the first ones of the plateau make up for what is missing. Where the threshold
// was the wrong one, the row is read again, in three histograms of its keys and in order. The
// integers are the same.
namespace fovea::internal::topk_sm90 {

using namespace topk;

struct StreamSizes {
  uint32_t capacity;   // candidates
  uint32_t bin_words;  // of the candidates' bins and the bitmap, which share a place
  uint32_t blocks;     // block b has rows b, b + blocks, ...
};

struct StreamMemory {
  CutShared cut;
  cuda::Mbarrier full[kMaxWarps][kSlots];
  TopkWindow windows[2];  // of this row and the next
  uint32_t candidates, largest_key;
  uint32_t enough;               // whether a plateau has as many entries as are needed
  alignas(16) uint32_t bins[4];  // [bin_words], zero between uses; entries; ring

  __device__ uint2* entries(const StreamSizes& sizes) {
    return reinterpret_cast<uint2*>(bins + sizes.bin_words);
  }
  __device__ float* ring(const StreamSizes& sizes) {
    return reinterpret_cast<float*>(bins + sizes.bin_words + 2 * sizes.capacity);
  }
};

/// The groups of a window that are all inside of it.
struct WholeGroups {
  uint32_t begin, count;

  __device__ explicit WholeGroups(const Row& row) : begin(row.before > 0 ? 1 : 0), count(0) {
    const uint32_t end = (row.before + row.len) / 4;
    if (end > begin) count = end - begin;
  }
};

/// A sample of a row: runs of eight neighbouring entries, one in each of equal parts.
struct StreamSample {
  static constexpr uint32_t kRunBits = 9;
  static constexpr uint32_t kSize = 8 << kRunBits;
  uint32_t rank;  // of its best, that a few more than K entries of the row reach

  __device__ StreamSample(uint32_t len, uint32_t topk) {
    const float share = static_cast<float>(kSize) / static_cast<float>(len);
    const float expected = static_cast<float>(topk) * share;
    rank = min(max(static_cast<uint32_t>(expected + 4.5f * sqrtf(expected) + 4.0f), 1u), kSize);
  }
  /// The first of the two groups of a run, of `groups`, at a place that no period of the row
  /// follows.
  __device__ static uint32_t group(uint32_t run, uint32_t groups) {
    uint32_t mixed = run * 0x9E3779B1u;
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77u;
    const uint64_t place = uint64_t{run} << 16 | mixed >> 16;
    return static_cast<uint32_t>(place * (groups / 2) >> (16 + kRunBits)) * 2;
  }
  /// The lowest number in or above a cut of the sample; 0 where NaN is in it or it is not sure that
  /// there is room for the row's entries that reach it.
  __device__ uint32_t threshold(const Cut& cut, uint32_t len, uint32_t capacity) const {
    const auto reaching = static_cast<float>(rank - cut.need + cut.entries);
    const float room =
        static_cast<float>(capacity) * static_cast<float>(kSize) / static_cast<float>(len);
    if (cut.base == 0 || reaching + 3.3f * sqrtf(reaching) > room) return 0;
    return max(cut.base, kMinusInfinityKey);
  }
};

/// What a number has to reach to be a candidate, 0: no number will do, and how wide the bins of the
/// candidates are.
struct Threshold {
  uint32_t key;
  int shift;
  bool plateau;  // the candidates are what is above a key, of which the row has many
  float level;   // the value of that key

  __device__ uint32_t bin(uint32_t other) const {
    return min((other - key) >> shift, static_cast<uint32_t>(kBins - 1));
  }
  __device__ bool is_level(float value) const {
    return value == level || (value != value && level != level);
  }
};

template <int kThreads, class Meanwhile>
__device__ Threshold sample_row(const Row& row, uint32_t topk, const StreamSizes& sizes,
                                StreamMemory& memory, Meanwhile meanwhile) {
  const StreamSample sample(row.len, topk);
  const WholeGroups whole(row);
  BlockBins coarse{memory.bins};
  auto* const keys = reinterpret_cast<uint4*>(memory.entries(sizes));
  uint32_t largest = 0;
  constexpr int kOwn = static_cast<int>(StreamSample::kSize) / 4 / kThreads;
  float4 values[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t at = threadIdx.x + static_cast<uint32_t>(i) * kThreads;
    const uint32_t g = whole.begin + StreamSample::group(at / 2, whole.count) + at % 2;
    values[i] = *reinterpret_cast<const float4*>(row.groups + uint64_t{g} * 4);
  }
  meanwhile();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint4 own = make_uint4(key_of(values[i].x), key_of(values[i].y), key_of(values[i].z),
                                 key_of(values[i].w));
    keys[threadIdx.x + i * kThreads] = own;
    for (const uint32_t key : {own.x, own.y, own.z, own.w}) {
      coarse.add(ValueBins::of(key));
      largest = max(largest, key);
    }
  }
  largest = __reduce_max_sync(0xFFFFFFFF, largest);
  if (threadIdx.x % cuda::kWarpThreads == 0) atomicMax(&memory.largest_key, largest);
  coarse.finish();
  largest = memory.largest_key;
  find_bin<kThreads>(sample.rank, coarse, memory.cut);
  const Cut bin = ValueBins::cut(memory.cut.bin, memory.cut.need, memory.cut.entries);
  Threshold threshold{sample.threshold(bin, row.len, sizes.capacity), 0, false, 0};
  if (threshold.key == 0) {
    const Cut all{0, 32, sample.rank, StreamSample::kSize};
    const Cut narrow = find_cut<kThreads>(bin.bits < 32 ? bin : all, 3, 0, BlockBins{memory.bins},
                                          memory.cut, [&](auto use) {
#pragma unroll 1
                                            for (int i = 0; i < kOwn; ++i) {
                                              const uint4 own = keys[threadIdx.x + i * kThreads];
                                              use(own.x), use(own.y), use(own.z), use(own.w);
                                            }
                                          });
    threshold.key = sample.threshold(narrow, row.len, sizes.capacity);
    if (threshold.key == 0 && narrow.bits == 0) {
      threshold.plateau = true;
      threshold.level = narrow.base > 0 ? value_of(narrow.base) : __uint_as_float(0x7FC00000);
      threshold.key = max(narrow.base + 1, kMinusInfinityKey);
    }
  }
  threshold.shift = max(bits_of(max(largest, threshold.key) - threshold.key) - kDigitBits, 0);
  if (threadIdx.x == 0) memory.largest_key = 0;
  return threshold;
}

/// Whether the block reads the row chunk by chunk.
__device__ inline bool streams(const TopkWindow& window, const StreamSizes& sizes) {
  return window.len > sizes.capacity;
}

/// The units of a row that a warp reads, one after another: every (number of warps)-th. A lane has
/// neighbouring groups.
template <int kThreads, int kLaneGroups>
struct Units {
  static constexpr uint32_t kWarps = kThreads / cuda::kWarpThreads;
  static constexpr uint32_t kGroups = kLaneGroups * cuda::kWarpThreads;  // of a unit
  const float* groups;
  uint32_t begin, end;  // groups that are copied

  __device__ explicit Units(const Row& row) : groups(row.groups) {
    const WholeGroups whole(row);
    begin = whole.begin;
    end = whole.begin + whole.count;
  }
  /// Where the warp's slot is.
  __device__ static float* slot(uint32_t slot, const StreamSizes& sizes, StreamMemory& memory) {
    return memory.ring(sizes) + (threadIdx.x / cuda::kWarpThreads * kSlots + slot) * (4 * kGroups);
  }
  /// Asks for the unit of groups from `first` on, if the row has it, by one lane.
  __device__ void ask(uint32_t first, uint32_t at, const StreamSizes& sizes,
                      StreamMemory& memory) const {
    if (first >= end) return;
    const uint32_t from = max(first, begin);
    const int bytes = static_cast<int>(16 * (min(first + kGroups, end) - from));
    cuda::Mbarrier& full = memory.full[threadIdx.x / cuda::kWarpThreads][at];
    cuda::mbarrier_arrive_expecting(full, bytes);
    cuda::copy_bulk(slot(at, sizes, memory) + 4 * (from - first), groups + uint64_t{from} * 4,
                    bytes, full, cuda::cache_policy_once());
  }
  /// A bit for each entry of a lane that has been copied, of the groups from `first` on.
  __device__ uint32_t copied(uint32_t first) const {
    const auto upto = [&](uint32_t limit) {
      const uint32_t own = min(max(limit, first) - first, static_cast<uint32_t>(kLaneGroups));
      return own < 8 ? (1u << (4 * own)) - 1 : ~0u;
    };
    return upto(end) & ~upto(begin);
  }
  /// The `j`-th group that a lane looks at, and the bits of all in their places: lanes begin with
  /// different ones, so that they are in different banks.
  __device__ static uint32_t group(uint32_t lane, int j) {
    return (turned(lane) + static_cast<uint32_t>(j)) % kLaneGroups;
  }
  __device__ static uint32_t in_place(uint32_t lane, uint32_t bits) {
    if constexpr (kLaneGroups == 8) {
      return __funnelshift_l(bits, bits, 4 * turned(lane));
    } else {
      const uint32_t twice = bits << (4 * turned(lane));
      return (twice | twice >> (4 * kLaneGroups)) & ((1u << (4 * kLaneGroups)) - 1);
    }
  }

 private:
  __device__ static uint32_t turned(uint32_t lane) {
    static_assert(kLaneGroups == 4 || kLaneGroups == 8);
    return kLaneGroups == 8 ? lane % 8 : lane / 2 % 4;
  }
};

/// Asks for the first units of a row that each warp reads, into its slots, of which it has read
/// `turn` so far.
template <int kThreads, int kLaneGroups>
__device__ void ask_row(const TopkRows& rows, int64_t t, const TopkWindow& window, uint32_t turn,
                        const StreamSizes& sizes, StreamMemory& memory) {
  if (threadIdx.x % cuda::kWarpThreads != 0 || !streams(window, sizes)) return;
  using RowUnits = Units<kThreads, kLaneGroups>;
  const RowUnits units(Row(rows.logits(t, window), window.len));
  uint32_t first = threadIdx.x / cuda::kWarpThreads * RowUnits::kGroups;
#pragma unroll
  for (uint32_t i = 0; i < kSlots; ++i, first += RowUnits::kWarps * RowUnits::kGroups) {
    units.ask(first, (turn + i) % kSlots, sizes, memory);
  }
}

/// What of the row stands beside its whole groups: calls use(value, position) in a few threads.
template <class Use>
__device__ void each_beside(const Row& row, Use use) {
  const WholeGroups whole(row);
  const uint32_t first = row.before > 0 ? 4 - row.before : 0;
  const uint32_t i = threadIdx.x;
  const uint32_t pos = i < 3 ? i : first + 4 * whole.count + i - 3;
  if (i < 6 && (i < 3 ? pos < first : pos < row.len)) use(row.at(pos), pos);
}

__device__ inline void mark(uint32_t element, StreamMemory& memory) {
  atomicOr(&memory.bins[bitmap_place(element / 32)], 1u << (element % 32));
}

/// Keeps what reaches the threshold and counts it in bins; on a plateau it marks the entries of its
/// level instead. Returns how many reach it, of which sizes.capacity at most are kept. `turn`:
/// units that the warp has read so far; next(): behind its last one.
template <int kThreads, int kLaneGroups, class Next>
__device__ uint32_t collect_units(const Row& row, const Threshold& threshold,
                                  const StreamSizes& sizes, uint32_t& turn, StreamMemory& memory,
                                  Next next) {
  using RowUnits = Units<kThreads, kLaneGroups>;
  const uint32_t lane = threadIdx.x % cuda::kWarpThreads;
  const uint32_t warp = threadIdx.x / cuda::kWarpThreads;
  const RowUnits units(row);
  const float least = value_of(threshold.key);
  uint2* const entries = memory.entries(sizes);
  const auto keep = [&](uint2* entry, float value, uint32_t pos) {
    const uint32_t key = key_of(value);
    *entry = make_uint2(key, pos);
    if (!threshold.plateau) atomicAdd(&memory.bins[threshold.bin(key)], 1u);
  };
  if (threshold.key != 0) {
    each_beside(row, [&](float value, uint32_t pos) {
      if (!(value >= least)) return;
      const uint32_t to = atomicAdd(&memory.candidates, 1u);
      if (to < sizes.capacity) keep(entries + to, value, pos);
    });
  }
  uint32_t drained = 0;
#pragma unroll 1
  for (uint32_t first = warp * RowUnits::kGroups; first < units.end;
       first += RowUnits::kWarps * RowUnits::kGroups) {
    const uint32_t at = turn % kSlots;
    const float* const own = RowUnits::slot(at, sizes, memory) + 4 * kLaneGroups * lane;
    const uint32_t own_first = first + kLaneGroups * lane;
    cuda::mbarrier_wait(memory.full[warp][at], turn / kSlots);
    ++turn;
    if (threshold.key == 0) {  // those that were asked for have to come
      __syncwarp();
      if (++drained == kSlots) break;
      continue;
    }
    const bool at_end = first < units.begin || first + RowUnits::kGroups > units.end;
    const auto mask_of = [&](auto matches) {
      uint32_t mask = 0;
#pragma unroll
      for (int j = 0; j < kLaneGroups; ++j) {
        const float4 group = *reinterpret_cast<const float4*>(own + 4 * RowUnits::group(lane, j));
        if (matches(group.x)) mask |= 1u << (4 * j);
        if (matches(group.y)) mask |= 2u << (4 * j);
        if (matches(group.z)) mask |= 4u << (4 * j);
        if (matches(group.w)) mask |= 8u << (4 * j);
      }
      mask = RowUnits::in_place(lane, mask);
      return at_end ? mask & units.copied(own_first) : mask;
    };
    uint32_t reaching = mask_of([&](float value) { return value >= least; });
    if (threshold.plateau && own_first < units.end) {
      const uint32_t level = mask_of([&](float value) { return threshold.is_level(value); });
      uint32_t* const word = &memory.bins[bitmap_place(own_first / 8)];
      if constexpr (kLaneGroups == 8) {
        *word = level;
      } else {
        reinterpret_cast<uint16_t*>(word)[own_first / 4 % 2] = static_cast<uint16_t>(level);
      }
    }
    const auto own_count = static_cast<uint32_t>(__popc(reaching));
    const WarpSum sum(own_count);
    if (sum.total > 0) {
      uint32_t to = 0;
      if (lane == 0) to = atomicAdd(&memory.candidates, sum.total);
      to = __shfl_sync(0xFFFFFFFF, to, 0) + sum.before;
      // More than there is room for are not looked at.
      if (to + own_count > sizes.capacity) reaching = 0;
      uint2* entry = entries + to;
#pragma unroll 1
      for (; reaching != 0; reaching &= reaching - 1) {
        const auto bit = static_cast<uint32_t>(__ffs(static_cast<int>(reaching))) - 1;
        keep(entry++, own[bit], 4 * own_first - row.before + bit);
      }
    }
    __syncwarp();
    if (lane == 0) {
      units.ask(first + kSlots * RowUnits::kWarps * RowUnits::kGroups, at, sizes, memory);
    }
  }
  next();
  __syncthreads();
  return memory.candidates;
}

/// Leaves the first `need` marks of a plateau's level and adds `count` entries above it; false:
/// there are not as many.
template <int kThreads>
__device__ bool mark_plateau(uint32_t count, uint32_t need, const Threshold& threshold,
                             const Row& row, const StreamSizes& sizes, StreamMemory& memory) {
  each_beside(row, [&](float value, uint32_t pos) {
    if (threshold.is_level(value)) mark(pos + row.before, memory);
  });
  if (threadIdx.x == 0) memory.enough = need == 0;
  __syncthreads();
  const uint32_t words = (row.before + row.len + 31) / 32;
  const uint32_t share = (words + kThreads - 1) / kThreads;
  const uint32_t begin = min(threadIdx.x * share, words);
  const uint32_t end = min(begin + share, words);
  uint32_t own = 0;
#pragma unroll 1
  for (uint32_t word = begin; word < end; ++word) {
    own += static_cast<uint32_t>(__popc(memory.bins[bitmap_place(word)]));
  }
  uint32_t before = block_before<kThreads>(own, memory.cut);
  if (before < need && need <= before + own) memory.enough = 1;
#pragma unroll 1
  for (uint32_t word = begin; word < end; ++word) {
    uint32_t& at = memory.bins[bitmap_place(word)];
    uint32_t left = at;
    before += static_cast<uint32_t>(__popc(left));
    if (before <= need) continue;
    uint32_t past = min(before - need, 32u);  // of the word's last ones
    past = min(past, static_cast<uint32_t>(__popc(left)));
#pragma unroll 1
    for (; past > 0; --past) left ^= 0x80000000u >> __clz(static_cast<int>(left));
    at = left;
  }
  __syncthreads();
  if (memory.enough == 0) return false;
  const uint2* const entries = memory.entries(sizes);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) mark(entries[i].y + row.before, memory);
  __syncthreads();
  return true;
}

/// Marks the best of the entries in the bitmap, which is zero and where the bins are.
template <int kThreads>
__device__ void mark_best(uint32_t count, const Threshold& threshold, const Row& row, uint32_t topk,
                          bool counted, const StreamSizes& sizes, StreamMemory& memory) {
  const uint2* const entries = memory.entries(sizes);
  const auto each = [&](auto use) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) use(entries[i].x, entries[i].y);
  };
  uint32_t bin = 0;
  Cut cut{0, 32, topk, count};
  if (counted) {
    find_bin<kThreads>(topk, BlockBins{memory.bins}, memory.cut);
    bin = memory.cut.bin;
    cut = {threshold.key + (bin << threshold.shift), bin == kBins - 1 ? 32 : threshold.shift,
           memory.cut.need, memory.cut.entries};
  }
  if (!counted || (!cut.whole() && cut.entries > kListed)) {
    const Entry last = find_last<kThreads>(cut, row.len, memory.bins, memory.cut, each);
    each([&](uint32_t key, uint32_t pos) {
      if (Entry{key, pos}.reaches(last)) mark(pos + row.before, memory);
    });
    __syncthreads();
    if (threadIdx.x == 0) memory.cut.listed = 0;
    return;
  }
  each([&](uint32_t key, uint32_t pos) {
    const uint32_t own = threshold.bin(key);
    if (own > bin || (own == bin && cut.whole())) {
      mark(pos + row.before, memory);
    } else if (own == bin) {
      memory.cut.list[atomicAdd(&memory.cut.listed, 1u)] = {key, pos};
    }
  });
  __syncthreads();
  if (cut.whole()) return;
  if (threadIdx.x < cut.entries) {
    const Entry own = memory.cut.list[threadIdx.x];
    uint32_t reaching = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < cut.entries; ++i) reaching += memory.cut.list[i].reaches(own);
    if (reaching <= cut.need) mark(own.pos + row.before, memory);
  }
  if (threadIdx.x == 0) memory.cut.listed = 0;
  __syncthreads();
}

/// Puts the positions in the bitmap in order; leaves it zero.
template <int kThreads>
__device__ void write_bitmap(const TopkRows& rows, int64_t t, const Row& row, uint32_t topk,
                             const StreamSizes& sizes, StreamMemory& memory) {
  const uint32_t words = (row.before + row.len + 31) / 32;
  const uint32_t share = (words + kThreads - 1) / kThreads;
  const uint32_t begin = min(threadIdx.x * share, words);
  const uint32_t end = min(begin + share, words);
  uint32_t own = 0;
#pragma unroll 2
  for (uint32_t word = begin; word < end; ++word) {
    own += static_cast<uint32_t>(__popc(memory.bins[bitmap_place(word)]));
  }
  uint32_t rank = block_before<kThreads>(own, memory.cut);
  auto* const positions = reinterpret_cast<uint32_t*>(memory.entries(sizes));
#pragma unroll 1
  for (uint32_t word = begin; word < end; ++word) {
    uint32_t& at = memory.bins[bitmap_place(word)];
    for (uint32_t set = at; set != 0; set &= set - 1) {
      positions[rank++] =
          word * 32 + static_cast<uint32_t>(__ffs(static_cast<int>(set))) - 1 - row.before;
    }
    at = 0;
  }
  __syncthreads();
  int32_t* const out = rows.out(t);
#pragma unroll 2
  for (uint32_t i = threadIdx.x; i < topk; i += kThreads) {
    out[i] = rows.index(t, static_cast<int32_t>(positions[i]));
  }
}

template <int kThreads>
__device__ void zero_words(const StreamSizes& sizes, StreamMemory& memory) {
  for (uint32_t i = threadIdx.x; i < sizes.bin_words / 4; i += kThreads) {
    reinterpret_cast<uint4*>(memory.bins)[i] = make_uint4(0, 0, 0, 0);
  }
}

/// Asks for the lines of a row's sample.
template <int kThreads>
__device__ void prefetch_sample(const TopkRows& rows, int64_t t, const TopkWindow& window,
                                const StreamSizes& sizes) {
  if (!streams(window, sizes) || rows.columns(t) == nullptr) return;
  const Row row(rows.columns(t) + window.start, window.len);
  const WholeGroups whole(row);
  for (uint32_t run = threadIdx.x; run < 1u << StreamSample::kRunBits; run += kThreads) {
    const uint32_t g = whole.begin + StreamSample::group(run, whole.count);
    cuda::prefetch_l2(row.groups + uint64_t{g} * 4);
  }
}

template <int kThreads, int kLaneGroups>
__device__ void stream_rows(const TopkRows& rows, uint32_t topk, const StreamSizes& sizes,
                            StreamMemory& memory) {
  constexpr uint32_t kReader = kThreads - cuda::kWarpThreads;  // the thread that reads windows
  const auto row_of = [&](uint32_t k) { return blockIdx.x + int64_t{k} * sizes.blocks; };
  if (threadIdx.x % cuda::kWarpThreads == 0) {
    for (cuda::Mbarrier& full : memory.full[threadIdx.x / cuda::kWarpThreads]) {
      cuda::mbarrier_init(full, 1);
    }
    cuda::show_barriers_to_copies();
  }
  if (threadIdx.x == 0) {
    memory.candidates = memory.largest_key = memory.cut.listed = 0;
  }
  if (threadIdx.x == kReader) {
    memory.windows[0] = rows.window(row_of(0));
    memory.windows[1] = row_of(1) < rows.num_rows() ? rows.window(row_of(1)) : TopkWindow{};
  }
  zero_words<kThreads>(sizes, memory);
  // The first row's sample comes while its length does.
  prefetch_sample<kThreads>(rows, row_of(0), {0, rows.width()}, sizes);
  __syncthreads();
  uint32_t turn = 0;
  bool asked = false;  // for the row's first units
#pragma unroll 1
  for (uint32_t k = 0; row_of(k) < rows.num_rows(); ++k) {
    const int64_t t = row_of(k);
    const TopkWindow window = memory.windows[k % 2];
    const auto read_window = [&] {
      if (threadIdx.x == kReader && row_of(k + 2) < rows.num_rows()) {
        memory.windows[k % 2] = rows.window(row_of(k + 2));
      }
    };
    if (window.len <= topk) {
      int32_t* const out = rows.out(t);
      for (uint32_t i = threadIdx.x; i < topk; i += kThreads) {
        out[i] = i < window.len ? rows.index(t, static_cast<int32_t>(i)) : -1;
      }
      __syncthreads();
      read_window();
      __syncthreads();
      asked = false;
      continue;
    }
    const Row row(rows.logits(t, window), window.len);
    uint32_t count = row.len;
    Threshold threshold{0, 0, false, 0};
    const bool streamed = streams(window, sizes);
    const auto ask_next = [&] {
      asked = row_of(k + 1) < rows.num_rows();
      if (!asked) return;
      const TopkWindow& after = memory.windows[(k + 1) % 2];
      ask_row<kThreads, kLaneGroups>(rows, row_of(k + 1), after, turn, sizes, memory);
      prefetch_sample<kThreads>(rows, row_of(k + 1), after, sizes);
    };
    if (streamed) {
      threshold = sample_row<kThreads>(row, topk, sizes, memory, [&] {
        if (!asked) ask_row<kThreads, kLaneGroups>(rows, t, window, turn, sizes, memory);
      });
      count = collect_units<kThreads, kLaneGroups>(row, threshold, sizes, turn, memory, ask_next);
    } else {
      for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
        memory.entries(sizes)[i] = make_uint2(key_of(row.at(i)), i);
      }
      asked = false;
      __syncthreads();
    }
    read_window();
    bool marked = count <= sizes.capacity && (threshold.plateau ? count <= topk : count >= topk);
    if (marked && threshold.plateau) {
      marked = mark_plateau<kThreads>(count, topk - count, threshold, row, sizes, memory);
    } else if (marked) {
      mark_best<kThreads>(count, threshold, row, topk, streamed, sizes, memory);
    }
    if (marked) {
      write_bitmap<kThreads>(rows, t, row, topk, sizes, memory);
    } else {
      zero_words<kThreads>(sizes, memory);
      __syncthreads();
      const auto each = [&](auto use) { each_key<kThreads>(row, use); };
      const Cut cut = find_cut<kThreads>({0, 32, topk, row.len}, 3, 0, BlockBins{memory.bins},
                                         memory.cut, each);
      emit_in_order<kThreads>(row, cut.at_key(), topk, memory.cut,
                              [&](uint32_t rank, uint32_t pos) {
                                rows.out(t)[rank] = rows.index(t, static_cast<int32_t>(pos));
                              });
    }
    if (threadIdx.x == 0) memory.candidates = 0;
    __syncthreads();  // the next row uses the same memory
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FOVEA_TOPK_SM90_ONLY(...) __VA_ARGS__
#else
#define FOVEA_TOPK_SM90_ONLY(...)
#endif

template <int kThreads, int kLaneGroups, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    select_streams(const __grid_constant__ TopkRows rows, uint32_t topk, StreamSizes sizes) {
  extern __shared__ __align__(16) uint8_t memory[];
  FOVEA_TOPK_SM90_ONLY(stream_rows<kThreads, kLaneGroups>(
      rows, topk, sizes, *reinterpret_cast<StreamMemory*>(memory)));
}

#undef FOVEA_TOPK_SM90_ONLY

}  // namespace fovea::internal::topk_sm90
