#include <algorithm>
#include <cstdint>
#include <limits>

#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/index/cuda/topk_cut.cuh"
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

using namespace topk;

/// Of one launch, in dynamic shared memory, in this order.
struct ScratchSizes {
  uint32_t capacity;      // candidates; 0: none are collected
  uint32_t bitmap_words;  // columns / 32 of the longest row that has candidates

  /// Whether candidates of the row can be collected.
  __device__ bool allow(uint32_t len, uint32_t topk) const {
    return topk <= capacity && (len + 31) / 32 <= bitmap_words;
  }
};

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
struct Shared : CutShared {
  uint32_t candidates;
  uint32_t largest_key;
  uint32_t better, equal;
  int64_t row;
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

/// Collects the positions that reach `threshold`, a number, in no order, from the share of `part`
/// among `parts` blocks; returns how many there are, of which no more than `capacity` are written.
/// kKeys: their keys go before them, at positions - capacity.
template <int kThreads, bool kKeys>
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
    if constexpr (kKeys) {
      // More candidates than there is room for are not looked at.
      if (to + own > capacity) reaching = 0;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if ((reaching >> (4 * j + i) & 1) == 0) continue;
          positions[to] = row.position(first + j * kThreads + lane, i);
          *(positions + to - capacity) = key_of(values[j][i]);
          ++to;
        }
      }
    } else {
      for (; reaching != 0 && to < capacity; reaching &= reaching - 1, ++to) {
        const int bit = __ffs(static_cast<int>(reaching)) - 1;
        positions[to] = row.position(first + bit / 4 * kThreads + lane, bit % 4);
      }
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

/// Calls emit(rank, position) for the best K of the candidates. Their keys are in place.
template <int kThreads, class Emit>
__device__ void select_candidates(uint32_t count, uint32_t least_key, uint32_t largest_key,
                                  const Row& row, uint32_t topk, const Scratch& scratch,
                                  Shared& shared, Emit emit) {
  // Loops of few turns stay as they are: instructions come from cold memory too.
  const auto each_candidate = [&](auto use) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      use(scratch.keys[i], scratch.positions[i]);
    }
  };
  const Entry last = find_last<kThreads>({least_key, bits_of(largest_key - least_key), topk, count},
                                         row.len, scratch.bins, shared, each_candidate);
  each_candidate([&](uint32_t key, uint32_t pos) {
    if (!Entry{key, pos}.reaches(last)) return;
    atomicOr(&scratch.bitmap[bitmap_place(pos / 32)], 1u << (pos % 32));
  });
  __syncthreads();
  // Each thread takes neighbouring words.
  const uint32_t words = (row.len + 31) / 32;
  const uint32_t share = (words + kThreads - 1) / kThreads;
  const uint32_t begin = min(threadIdx.x * share, words);
  const uint32_t end = min(begin + share, words);
  uint32_t own = 0;
#pragma unroll 1
  for (uint32_t word = begin; word < end; ++word) {
    own += static_cast<uint32_t>(__popc(scratch.bitmap[bitmap_place(word)]));
  }
  uint32_t rank = block_before<kThreads>(own, shared);
#pragma unroll 1
  for (uint32_t word = begin; word < end; ++word) {
    for (uint32_t set = scratch.bitmap[bitmap_place(word)]; set != 0; set &= set - 1) {
      emit(rank++, word * 32 + static_cast<uint32_t>(__ffs(static_cast<int>(set))) - 1);
    }
  }
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

/// The usual row: calls emit(rank, position) for its K best. False: they have to be found
/// otherwise, from `cut`, which is a cut of all keys of the row.
template <int kThreads, bool kParts, class Emit>
__device__ bool select_sampled(const Row& row, uint32_t topk, const ScratchSizes& sizes,
                               const Scratch& scratch, const Parts& parts, int64_t t,
                               Shared& shared, Cut& cut, Emit emit) {
  // Where many rows are under way, their values are no longer near when all are collected; for few
  // it is faster to read some again than to look for keys at every place.
  constexpr bool kKeys = kThreads < 1024;
  const uint32_t words = (row.len + 31) / 32;
  if (!sizes.allow(row.len, topk)) return false;
  uint32_t count = row.len;
  uint32_t threshold = 0;
  bool has_keys = false;
  const auto clear = [&] {
    for (uint32_t i = threadIdx.x; i < bitmap_place(words); i += kThreads) scratch.bitmap[i] = 0;
    if (threadIdx.x == 0) shared.candidates = shared.largest_key = shared.listed = 0;
  };
  if (row.len <= sizes.capacity) {
    clear();
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) scratch.positions[i] = i;
    __syncthreads();
  } else {
    if constexpr (kParts) {
      threshold = parts.thresholds[t];
      if (threshold != 0) {
        clear();
        count = gather_parts<kThreads>(parts, t, scratch.positions, shared);
      }
    }
    if (threshold == 0) {
      row.prefetch(threadIdx.x * 32);
      clear();
      Cut narrow{};
      threshold = sampled_threshold<kThreads>(row, SampleShape(row.len, topk), sizes.capacity,
                                              scratch.bins, scratch.keys, shared, narrow);
      if (threshold == 0) {
        if (narrow.bits == 0) try_plateau<kThreads>(row, narrow.base, topk, cut, shared);
        return false;
      }
      count =
          collect<kThreads, kKeys>(row, threshold, scratch.positions, sizes.capacity, 0, 1, shared);
      has_keys = kKeys;
    }
    if (count < topk || count > sizes.capacity) return false;
  }
  uint32_t largest = 0;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t key = has_keys ? scratch.keys[i] : key_of(row.at(scratch.positions[i]));
    scratch.keys[i] = key;
    largest = max(largest, key);
  }
  largest = __reduce_max_sync(0xFFFFFFFF, largest);
  if (threadIdx.x % cuda::kWarpThreads == 0) atomicMax(&shared.largest_key, largest);
  __syncthreads();
  select_candidates<kThreads>(count, threshold, shared.largest_key, row, topk, scratch, shared,
                              emit);
  return true;
}

/// Blocks t * parts.count .. of row t collect its candidates.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    collect_parts(const __grid_constant__ TopkRows rows, uint32_t topk, ScratchSizes sizes,
                  Parts parts) {
  __shared__ Shared shared;
  __shared__ __align__(16) uint32_t bins[kBins];
  __shared__ uint32_t keys[kMaxSample];
  const int64_t t = blockIdx.x / parts.count;
  const TopkWindow window = rows.window(t);
  if (window.len <= topk || window.len <= sizes.capacity) return;
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
  if (threadIdx.x == 0) shared.candidates = 0;
  __syncthreads();
  const Row row(rows.logits(t, window), window.len);
  uint32_t threshold = 0;
  if (sizes.allow(row.len, topk)) {
    row.prefetch(blockIdx.x % parts.count * (4 * kGroups * kThreads) +
                 threadIdx.x % (kGroups * kThreads / 8) * 32);
    Cut narrow{};
    threshold = sampled_threshold<kThreads>(row, SampleShape(row.len, topk), sizes.capacity, bins,
                                            keys, shared, narrow);
  }
  uint32_t entries = 0;
  if (threshold != 0) {
    uint32_t* const positions = parts.positions + int64_t{blockIdx.x} * parts.capacity;
    entries = collect<kThreads, false>(row, threshold, positions, parts.capacity,
                                       blockIdx.x % parts.count, parts.count, shared);
  }
  if (threadIdx.x != 0) return;
  parts.thresholds[t] = threshold;  // the same from every block of the row
  parts.entries[blockIdx.x] = entries;
}

template <int kThreads, int kBlocksPerSm, bool kParts>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    select_rows(const __grid_constant__ TopkRows rows, uint32_t topk, ScratchSizes sizes,
                Parts parts) {
  extern __shared__ __align__(16) uint32_t dynamic[];
  __shared__ Shared shared;
  const Scratch scratch{dynamic, dynamic + kBins, dynamic + kBins + sizes.capacity,
                        dynamic + kBins + 2 * sizes.capacity};
  for (int i = threadIdx.x; i < kBins; i += kThreads) scratch.bins[i] = 0;
  __syncthreads();
  int64_t t = blockIdx.x;
  while (t < rows.num_rows()) {
    if constexpr (kBlocksPerSm == 1) {
      // The row's first columns come while its length does; few, for a row that may be short.
      const float* const columns = rows.columns(t);
      const int64_t ahead = int64_t{threadIdx.x} * 32;
      if (columns != nullptr && threadIdx.x < kThreads / 4 && ahead < rows.width()) {
        cuda::prefetch_l2(columns + ahead);
      }
    }
    const TopkWindow window = rows.window(t);
    if (window.len <= topk) {
      int32_t* const out = rows.out(t);
      for (uint32_t i = threadIdx.x; i < topk; i += kThreads) {
        out[i] = i < window.len ? rows.index(t, static_cast<int32_t>(i)) : -1;
      }
      t += gridDim.x;
      continue;
    }
    if (threadIdx.x == 0) shared.row = t;  // registers are few where the row's entries are emitted
    const Row row(rows.logits(t, window), window.len);
    Cut cut{0, 32, topk, row.len};
    const auto emit = [&](uint32_t rank, uint32_t pos) {
      rows.out(shared.row)[rank] = rows.index(shared.row, static_cast<int32_t>(pos));
    };
    if (!select_sampled<kThreads, kParts>(row, topk, sizes, scratch, parts, t, shared, cut, emit)) {
      const auto each = [&](auto use) { each_key<kThreads>(row, use); };
      cut = find_cut<kThreads>(cut, 3, 0, BlockBins{scratch.bins}, shared, each);
      emit_in_order<kThreads>(row, cut.at_key(), topk, shared, emit);
    }
    t = shared.row + gridDim.x;
    __syncthreads();  // the next row uses the same scratch
  }
}

ScratchSizes scratch_sizes(const TopkSelectProblem& problem, int64_t width,
                           const cuda::DeviceFacts& facts) {
  ScratchSizes sizes{};
  if (problem.topk > kMaxSampledTopk || problem.topk >= width) return sizes;
  sizes.capacity = static_cast<uint32_t>(std::min(problem.topk + kSlack, width));
  // The dynamic part begins at a multiple of 16 bytes.
  const auto used = static_cast<int64_t>((sizeof(Shared) + 15) / 16 * 16 + shared_bytes(sizes));
  const int64_t room = (facts.max_shared_bytes - used) / int64_t{sizeof(uint32_t)};
  const int64_t words = room * 32 / 33;  // without the gaps
  sizes.bitmap_words = static_cast<uint32_t>(std::clamp<int64_t>(words, 0, (width + 31) / 32));
  return sizes;
}

template <int kThreads, int kBlocksPerSm, bool kParts>
void launch_rows(const TopkRows& rows, const TopkSelectProblem& problem, const ScratchSizes& sizes,
                 const Parts& parts, Stream stream) {
  const int64_t blocks = std::min<int64_t>(rows.num_rows(), std::numeric_limits<int32_t>::max());
  // More than 48 KiB have to be asked for, with what the kernel declares itself.
  constexpr size_t kUnasked = size_t{48} << 10;
  size_t bytes = shared_bytes(sizes);
  if (bytes + sizeof(Shared) > kUnasked) bytes = std::max(bytes, kUnasked + 16);
  cuda::launch("topk_select", select_rows<kThreads, kBlocksPerSm, kParts>,
               {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), bytes}, stream, rows,
               static_cast<uint32_t>(problem.topk), sizes, parts);
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
