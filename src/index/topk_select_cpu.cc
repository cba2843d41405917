#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/index/topk_select_cpu.cc"
#include "src/core/simd.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "src/index/topk_select_impl.h"
#include "src/index/topk_select_sample.h"
#include "src/index/topk_select_transform.h"

// How a row is selected. Logits become int32 keys whose order is the order of the selection. One
// pass over the row collects, in order of position, every entry that reaches a threshold; the
// threshold comes from the keys of a sample, a little below the K-th largest one expected. When the
// collection outgrows its buffer, it is pruned to its K best entries and the threshold rises above
// the worst of them: an equal entry further right cannot win any more. At the end the collection is
// pruned once more. Nothing here trusts the distribution of the values: a useless sample costs
// time, never an entry, and no step takes longer on one value than on another.

#ifndef FOVEA_TOPK_SELECT_CPU_CONSTANTS
#define FOVEA_TOPK_SELECT_CPU_CONSTANTS
namespace fovea::internal {
namespace {

// NaN has the lowest key; no number has it, because the key of -infinity is higher.
constexpr int32_t kNanKey = std::numeric_limits<int32_t>::min();
constexpr int32_t kMinusInfinityKey = static_cast<int32_t>(0x807FFFFFu);

// Columns between two looks at the fill of the buffer.
constexpr int64_t kBlock = 1024;
// Vector stores and padding may go this far past the last entry: four vectors of 16 lanes.
constexpr int64_t kSlack = 64;
// Entries of the collection before it is pruned: more than the sample promises of a usual row, so
// that it is pruned once, and few, because a row of one value fills it before the threshold rises.
int64_t buffer_capacity(const TopkSelectProblem& problem) {
  return std::min(problem.max_width, std::max<int64_t>(3 * problem.topk, 2048));
}

struct TopkScratch {
  int32_t* keys;       // of the collected entries; float bits until a prune turns them into keys
  int32_t* positions;  // of the same entries, ascending
  int32_t* narrowed;   // keys between the bounds of a search

  TopkScratch(WorkspaceCutter& cutter, const TopkSelectProblem& problem) {
    const int64_t count = buffer_capacity(problem) + kBlock + kSlack;
    keys = cutter.take<int32_t>(count);
    positions = cutter.take<int32_t>(count);
    narrowed = cutter.take<int32_t>(count);
  }
};

// kPackedLanes.lanes[bits]: the numbers of the set bits of a byte in rising order, one in each
// byte; the rest is 0.
struct PackedLanes {
  uint64_t lanes[256];
  constexpr PackedLanes() : lanes() {
    for (uint64_t bits = 0; bits < 256; ++bits) {
      int used = 0;
      for (uint64_t lane = 0; lane < 8; ++lane) {
        if ((bits >> lane & 1) != 0) lanes[bits] |= lane << (8 * used++);
      }
    }
  }
};
constexpr PackedLanes kPackedLanes;

// The number whose key this is; for keys that no number has, the nearest one above (-infinity,
// +0), and NaN above the key of +infinity, which no number reaches.
inline float number_of_key(int32_t key) {
  key = std::max(key, kMinusInfinityKey);
  return std::bit_cast<float>(key < 0 ? key ^ 0x7FFFFFFF : key);
}

// The entries above `above`, and the first `equal` entries that are equal to it.
struct TopkCut {
  int32_t above;
  int64_t equal;
};

}  // namespace
}  // namespace fovea::internal
#endif  // FOVEA_TOPK_SELECT_CPU_CONSTANTS

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

using I32 = hn::ScalableTag<int32_t>;

// Moves the lanes of a mask to the front, for several vectors that share the mask. Lanes past
// `count` of the results are unspecified.
struct Packing {
  int64_t count;
#if HWY_TARGET == HWY_AVX2
  // hn::Compress of Highway 1.0.3 copies its table of permutations to the stack in every call.
  hn::Vec<I32> lanes;
  HWY_INLINE Packing(I32 d, hn::Mask<I32> mask) {
    uint8_t bits = 0;
    hn::StoreMaskBits(d, mask, &bits);
    const hn::Rebind<uint8_t, I32> d8;
    const auto* packed = reinterpret_cast<const uint8_t*>(&kPackedLanes.lanes[bits]);
    lanes = hn::PromoteTo(d, hn::LoadU(d8, packed));
    count = std::popcount(bits);
  }
  HWY_INLINE hn::Vec<I32> pack(I32 d, hn::Vec<I32> value) const {
    return hn::TableLookupLanes(value, hn::IndicesFromVec(d, lanes));
  }
#else
  hn::Mask<I32> mask;
  HWY_INLINE Packing(I32 d, hn::Mask<I32> wanted)
      : count(static_cast<int64_t>(hn::CountTrue(d, wanted))), mask(wanted) {}
  HWY_INLINE hn::Vec<I32> pack(I32, hn::Vec<I32> value) const { return hn::Compress(value, mask); }
#endif
};

// Turns the bits of floats into keys, in place: -0 becomes +0, negative numbers are mirrored, NaN
// of any sign is kNanKey. Integer arithmetic, so that subnormal numbers keep their order whatever
// the floating-point mode of the thread.
void to_keys(int32_t* values, int64_t begin, int64_t end) {
  const I32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto sign = hn::Set(d, std::numeric_limits<int32_t>::min());
  const auto magnitude_mask = hn::Set(d, 0x7FFFFFFF);
  const auto infinity = hn::Set(d, 0x7F800000);
  // Up to a vector past the end is converted too: it is slack.
  for (int64_t i = begin; i < end; i += lanes) {
    const auto bits = hn::LoadU(d, values + i);
    const auto folded = hn::IfThenZeroElse(hn::Eq(bits, sign), bits);
    const auto mirrored = hn::Xor(folded, hn::And(hn::BroadcastSignBit(folded), magnitude_mask));
    const auto is_nan = hn::Gt(hn::And(bits, magnitude_mask), infinity);
    hn::StoreU(hn::IfThenElse(is_nan, hn::Set(d, kNanKey), mirrored), d, values + i);
  }
}

// Fills up to a multiple of four vectors with the lowest key and returns that multiple.
int64_t pad_keys(int32_t* keys, int64_t count) {
  const auto step = static_cast<int64_t>(4 * hn::Lanes(I32()));
  const int64_t padded = (count + step - 1) / step * step;
  std::fill(keys + count, keys + padded, kNanKey);
  return padded;
}

// Number of keys >= pivot, which is above kNanKey; `padded` is a multiple of four vectors.
int64_t count_at_least(const int32_t* keys, int64_t padded, int32_t pivot) {
  const I32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto below = hn::Set(d, pivot - 1);
  // Four sums hide the latency of the subtraction; lanes hold minus the count.
  auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  for (int64_t i = 0; i < padded; i += 4 * lanes) {
    const int32_t* from = keys + i;
    sum0 = hn::Add(sum0, hn::VecFromMask(d, hn::Gt(hn::LoadU(d, from), below)));
    sum1 = hn::Add(sum1, hn::VecFromMask(d, hn::Gt(hn::LoadU(d, from + lanes), below)));
    sum2 = hn::Add(sum2, hn::VecFromMask(d, hn::Gt(hn::LoadU(d, from + 2 * lanes), below)));
    sum3 = hn::Add(sum3, hn::VecFromMask(d, hn::Gt(hn::LoadU(d, from + 3 * lanes), below)));
  }
  const auto sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  return -static_cast<int64_t>(hn::GetLane(hn::SumOfLanes(d, sum)));
}

int32_t largest_key(const int32_t* keys, int64_t padded) {
  const I32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto max0 = hn::Set(d, kNanKey), max1 = max0;
  for (int64_t i = 0; i < padded; i += 2 * lanes) {
    max0 = hn::Max(max0, hn::LoadU(d, keys + i));
    max1 = hn::Max(max1, hn::LoadU(d, keys + i + lanes));
  }
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(max0, max1)));
}

// Smallest of `count` > 0 keys, which end anywhere in a vector.
int32_t smallest_key(const int32_t* keys, int64_t count) {
  const I32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto min = hn::Set(d, keys[0]);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) min = hn::Min(min, hn::LoadU(d, keys + i));
  int32_t smallest = hn::GetLane(hn::MinOfLanes(d, min));
  for (; i < count; ++i) smallest = std::min(smallest, keys[i]);
  return smallest;
}

// Copies the keys in [lowest, highest] to `to`, which may be `keys`; returns their number. `lowest`
// is above kNanKey.
int64_t copy_range(const int32_t* keys, int64_t padded, int32_t lowest, int32_t highest,
                   int32_t* to) {
  const I32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto below = hn::Set(d, lowest - 1);
  const auto high = hn::Set(d, highest);
  int64_t count = 0;
  for (int64_t i = 0; i < padded; i += lanes) {
    const auto key = hn::LoadU(d, keys + i);
    const Packing inside(d, hn::AndNot(hn::Gt(key, high), hn::Gt(key, below)));
    hn::StoreU(inside.pack(d, key), d, to + count);
    count += inside.count;
  }
  return count;
}

// The cut that leaves the `topk` largest of `count` > topk keys. Looks at `floor` first, then
// bisects the range of keys above it by counting. Keys outside the range are dropped once they are
// three quarters, or after four steps: then the keys stand in few places, and the bounds of those
// that are left find a plateau at once.
TopkCut find_cut(int32_t* keys, int64_t count, int64_t topk, int32_t floor, int32_t* narrowed) {
  int64_t padded = pad_keys(keys, count);
  // The floor is where the plateaus are, because a sample that meets a plateau returns it.
  const int64_t above_floor = count_at_least(keys, padded, floor + 1);
  if (above_floor <= topk) {
    if (floor == kNanKey || count_at_least(keys, padded, floor) >= topk) {
      return {floor, topk - above_floor};
    }
    // Keys below the floor: the comparison of the collection took subnormal numbers for zeros.
    return find_cut(keys, count, topk, kNanKey, narrowed);
  }
  // count(>= low) > topk >= count(> high) from here on.
  int64_t low = int64_t{floor} + 1;
  int64_t high = largest_key(keys, padded);
  int64_t at_least_low = above_floor;
  int64_t above_high = 0;
  int64_t dropped_above = 0;  // keys above the narrowed array
  const int32_t* searched = keys;
  for (int steps = 0; low < high; ++steps) {
    const bool few = 4 * (at_least_low - above_high) <= padded;
    if ((few || steps == 4) && padded > 4 * kSlack) {
      const int64_t kept = copy_range(searched, padded, static_cast<int32_t>(low),
                                      static_cast<int32_t>(high), narrowed);
      padded = pad_keys(narrowed, kept);
      searched = narrowed;
      dropped_above = above_high;
      low = smallest_key(narrowed, kept);
      high = largest_key(narrowed, padded);
      steps = 0;
      if (low == high) break;
    }
    const int64_t middle = low + (high - low + 1) / 2;
    const int64_t at_least_middle =
        dropped_above + count_at_least(searched, padded, static_cast<int32_t>(middle));
    if (at_least_middle == topk) return {static_cast<int32_t>(middle - 1), 0};
    if (at_least_middle > topk) {
      low = middle;
      at_least_low = at_least_middle;
    } else {
      high = middle - 1;
      above_high = at_least_middle;
    }
  }
  return {static_cast<int32_t>(low), topk - above_high};
}

// Keeps the entries of the cut, in place and in order. The store of a vector reaches no further
// than the vector that was just read.
void keep_cut(int32_t* keys, int32_t* positions, int64_t count, TopkCut cut) {
  const I32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto above = hn::Set(d, cut.above);
  int64_t kept = 0;
  int64_t i = 0;
  const auto keep = [&](hn::Vec<I32> key, hn::Mask<I32> mask) HWY_ATTR {
    const Packing stays(d, mask);
    hn::StoreU(stays.pack(d, hn::LoadU(d, positions + i)), d, positions + kept);
    hn::StoreU(stays.pack(d, key), d, keys + kept);
    kept += stays.count;
  };
  // Up to the last equal entry that stays. Lanes past `count` hold kNanKey and come after every
  // real entry, so that they are never among the `equal` first.
  int64_t equal = cut.equal;
  for (; equal > 0 && i < count; i += lanes) {
    const auto key = hn::LoadU(d, keys + i);
    const auto is_equal = hn::Eq(key, above);
    const auto num_equal = static_cast<int64_t>(hn::CountTrue(d, is_equal));
    if (num_equal > equal) break;
    keep(key, hn::Or(hn::Gt(key, above), is_equal));
    equal -= num_equal;
  }
  if (equal > 0 && i < count) {
    // This vector has more equal entries than may stay: the first ones do.
    for (const int64_t end = i + lanes; i < end; ++i) {
      const bool stays = keys[i] > cut.above || (keys[i] == cut.above && equal-- > 0);
      const int32_t key = keys[i], position = positions[i];
      keys[kept] = key;
      positions[kept] = position;
      kept += stays ? 1 : 0;
    }
  }
  for (; i < count; i += lanes) {
    const auto key = hn::LoadU(d, keys + i);
    keep(key, hn::Gt(key, above));
  }
}

// Writes the places (of at most kBlock entries) that are >= threshold, ascending, and returns their
// number. Every vector costs the same, whatever it holds. The comparison is one of floats: -0
// equals +0 and NaN never passes. A thread that takes subnormal numbers for zeros collects a few
// entries too many, which the exact keys sort out.
int64_t find_places(const float* logits, int64_t size, float threshold, uint16_t* places) {
  const F32 d;
  const hn::Rebind<uint16_t, F32> d16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto limit = hn::Set(d, threshold);
  int64_t count = 0;
  int64_t i = 0;
#if HWY_TARGET == HWY_AVX2
  // The permutation that would move the passing lanes to the front is the list of their numbers, so
  // that nothing is moved: one narrow store per vector is what bounds the loop.
  const hn::Rebind<uint8_t, F32> d8;
  auto first = hn::Zero(d16);
  const auto step = hn::Set(d16, static_cast<uint16_t>(lanes));
#pragma GCC unroll 4
  for (; i + lanes <= size; i += lanes) {
    uint8_t byte = 0;
    hn::StoreMaskBits(d, hn::Ge(hn::LoadU(d, logits + i), limit), &byte);
    const uint64_t bits = byte;
    const auto* packed = reinterpret_cast<const uint8_t*>(&kPackedLanes.lanes[bits]);
    hn::StoreU(hn::Add(hn::PromoteTo(d16, hn::LoadU(d8, packed)), first), d16, places + count);
    first = hn::Add(first, step);
    count += std::popcount(bits);
  }
#else
  const I32 di;
  for (; i + lanes <= size; i += lanes) {
    const Packing passes(di, hn::RebindMask(di, hn::Ge(hn::LoadU(d, logits + i), limit)));
    const auto place = passes.pack(di, hn::Iota(di, static_cast<int32_t>(i)));
    hn::StoreU(hn::TruncateTo(d16, hn::BitCast(hn::RebindToUnsigned<I32>(), place)), d16,
               places + count);
    count += passes.count;
  }
#endif
  for (; i < size; ++i) {
    places[count] = static_cast<uint16_t>(i);
    count += logits[i] >= threshold ? 1 : 0;
  }
  return count;
}

// Appends the bits and positions of the entries of one block that are >= threshold; returns their
// number. The block, just read, is in the L1 cache.
int64_t collect(const float* logits, int64_t begin, int64_t end, float threshold, int32_t* values,
                int32_t* positions) {
  uint16_t places[kBlock + kSlack];
  const int64_t count = find_places(logits + begin, end - begin, threshold, places);
  const I32 d;
  const hn::Rebind<uint16_t, I32> d16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto first = hn::Set(d, static_cast<int32_t>(begin));
  for (int64_t i = 0; i < count; i += lanes) {
    hn::StoreU(hn::Add(hn::PromoteTo(d, hn::LoadU(d16, places + i)), first), d, positions + i);
  }
  for (int64_t i = 0; i < count; ++i) {
    values[i] = std::bit_cast<int32_t>(logits[begin + places[i]]);
  }
  return count;
}

// The same for every entry.
int64_t collect_all(const float* logits, int64_t begin, int64_t end, int32_t* values,
                    int32_t* positions) {
  for (int64_t i = begin; i < end; ++i) {
    positions[i - begin] = static_cast<int32_t>(i);
    values[i - begin] = std::bit_cast<int32_t>(logits[i]);
  }
  return end - begin;
}

// The sample's estimate of a key a little below the topk-th largest. kNanKey: collect everything.
int32_t sampled_floor(const float* logits, int64_t len, int64_t topk, const TopkScratch& scratch) {
  const TopkSample sample(len, topk);
  if (sample.size == 0) return kNanKey;
  TopkSample::Places places(sample);
  for (int64_t i = 0; i < sample.size; ++i) {
    scratch.keys[i] = std::bit_cast<int32_t>(logits[places.next()]);
  }
  to_keys(scratch.keys, 0, sample.size);
  const TopkCut cut = find_cut(scratch.keys, sample.size, sample.rank, kNanKey, scratch.narrowed);
  return cut.equal > 0 ? cut.above : cut.above + 1;
}

// Selects topk < len entries; afterwards scratch.positions holds them, ascending.
void select_row(const float* logits, int64_t len, int64_t topk, int64_t capacity,
                const TopkScratch& scratch) {
  // Entries whose key is below `threshold` are left out. Every entry that can be selected, of those
  // looked at so far, is in the buffer, provided that the row has topk entries at or above the
  // first threshold; or else it is walked again.
  int32_t threshold = sampled_floor(logits, len, topk, scratch);
  int32_t floor = threshold;  // at most the lowest key in the buffer
  int64_t count = 0;
  int64_t num_keys = 0;  // leading entries of the buffer that are keys already
  const auto prune = [&] {
    to_keys(scratch.keys, num_keys, count);
    const TopkCut cut = find_cut(scratch.keys, count, topk, floor, scratch.narrowed);
    keep_cut(scratch.keys, scratch.positions, count, cut);
    count = num_keys = topk;
    floor = cut.above;
    threshold = cut.above + 1;  // an equal entry further right loses the tie
  };
  while (true) {
    for (int64_t begin = 0; begin < len; begin += kBlock) {
      if (count > capacity) prune();
      const int64_t end = std::min(len, begin + kBlock);
      int32_t* values = scratch.keys + count;
      int32_t* positions = scratch.positions + count;
      count += threshold == kNanKey
                   ? collect_all(logits, begin, end, values, positions)
                   : collect(logits, begin, end, number_of_key(threshold), values, positions);
    }
    if (count >= topk) break;
    // The sample promised too much: start over without it.
    threshold = floor = kNanKey;
    count = num_keys = 0;
  }
  if (count > topk) prune();
}

void topk_select(const TopkSelectProblem& problem, const Device& device,
                 const TopkSelectTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const int64_t capacity = buffer_capacity(problem);
  TopkScratch first(cutter, problem);
  const auto worker_bytes = static_cast<int64_t>(cutter.used_bytes());
  const TopkRows rows(problem, tensors);
  // Rows of a few thousand columns and less share a piece, so that starting it does not show.
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, rows.width()));
  const ThreadScope threads(device.num_threads);
  ParallelFor(rows.num_rows(), grain, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter mine({static_cast<char*>(workspace.data) + worker * worker_bytes, 0});
    const TopkScratch scratch(mine, problem);
    for (int64_t t = begin; t < end; ++t) {
      const TopkWindow window = rows.window(t);
      if (window.len <= problem.topk) {
        rows.write_identity(t, window.len);
      } else if (problem.topk > 0) {
        select_row(rows.logits(t, window), window.len, problem.topk, capacity, scratch);
        rows.write(t, scratch.positions, problem.topk);
      }
    }
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(topk_select);

size_t topk_select_cpu_workspace(const TopkSelectProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  for (int worker = 0; worker < device.num_threads; ++worker) TopkScratch(cutter, problem);
  return cutter.used_bytes();
}

void topk_select_cpu(const TopkSelectProblem& problem, const Device& device,
                     const TopkSelectTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(topk_select)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
