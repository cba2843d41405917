#include <algorithm>

#include "src/core/cuda/f16.cuh"
#include "src/core/workspace.h"
#include "src/msa/cuda/msa_attend_sm90/kernel.cuh"

namespace fovea::internal::msa::by_block {
namespace {

// Lane c of four has pairs 0..3; of pair c of all of them, in their order.
__device__ void exchange_pairs(uint32_t (&pairs)[4]) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFF;
  const bool odd = threadIdx.x % 2 != 0;
  const bool high = threadIdx.x % 4 >= 2;
  const uint32_t other[2] = {__shfl_xor_sync(kAllLanes, odd ? pairs[0] : pairs[1], 1),
                             __shfl_xor_sync(kAllLanes, odd ? pairs[2] : pairs[3], 1)};
  uint32_t two[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    two[i][0] = odd ? other[i] : pairs[2 * i];
    two[i][1] = odd ? pairs[2 * i + 1] : other[i];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t from = __shfl_xor_sync(kAllLanes, high ? two[0][i] : two[1][i], 2);
    pairs[i] = high ? from : two[0][i];
    pairs[2 + i] = high ? two[1][i] : from;
  }
}

// A lane per unit of a row and KV head.
template <int kDim>
__global__ void __launch_bounds__(kFoldWarps* kWarpThreads)
    fold_places(const __grid_constant__ ByBlockParams params, int slab) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFF;
  constexpr int kFour = 4;    // lanes that share a head and turns, and its states
  constexpr int kParts = 16;  // at a time
  const AttendParams& attend = params.attend;
  const int shift = params.group_shift;
  const int units = kDim / 8 << shift;
  const auto lanes = static_cast<uint32_t>(max(units, kWarpThreads));
  const uint32_t at = blockIdx.x * (kFoldWarps * kWarpThreads) + threadIdx.x;
  const uint32_t pair = at / lanes;
  const auto unit_index = static_cast<int>(at % lanes);
  const auto kv_heads = static_cast<uint32_t>(attend.num_kv_heads);
  const int64_t row = pair / kv_heads;
  const int64_t kv_head = pair % kv_heads;
  const int64_t t = slab * params.slab_rows + row;
  if (row >= params.slab_rows || t >= attend.num_rows) return;
  const PartUnit unit = PartUnit::of<kDim>(unit_index, shift);
  const bool present = unit_index < units && unit.head < attend.group;
  const int count = params.num_places[t * attend.num_kv_heads + kv_head];
  const int64_t first = int64_t{pair} * attend.topk << shift;
  const uint4* const values = params.part_values + first * (kDim / 8) + unit_index;
  const PartState* const states = params.part_state + first + unit.head;
  uint4 stored[kParts];
  float4 own[kParts / kFour];  // states of parts c, c + 4, ...
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < kParts / kFour; ++i) {
      const int part = base + kFour * i + unit.c;
      own[i] = present && part < count
                   ? *reinterpret_cast<const float4*>(&states[int64_t{part} << shift])
                   : make_float4(kNegInf, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      stored[i] = make_uint4(0, 0, 0, 0);
      if (present && base + i < count) stored[i] = values[int64_t{base + i} * units];
    }
  };
  load(0);
  const auto of_four = [&](float x, auto add) {
    x = add(x, __shfl_xor_sync(kAllLanes, x, 1));
    return add(x, __shfl_xor_sync(kAllLanes, x, 2));
  };
  // Of states behind the first ones.
  const auto for_others = [&](auto f) {
#pragma unroll 1
    for (int part = kParts + unit.c; part < count && present; part += kFour) {
      f(states[int64_t{part} << shift]);
    }
  };
  float largest = kNegInf;
#pragma unroll
  for (const float4& state : own) largest = fmaxf(largest, state.x);
  for_others([&](const PartState& state) { largest = fmaxf(largest, state.largest); });
  largest = of_four(largest, [](float a, float b) { return fmaxf(a, b); });
  const float base = largest == kNegInf ? 0.0f : largest;
  float sum = 0;
#pragma unroll
  for (const float4& state : own) sum += state.y * cuda::exp2_fast(state.x - base);
  for_others(
      [&](const PartState& state) { sum += state.sum * cuda::exp2_fast(state.largest - base); });
  sum = of_four(sum, [](float a, float b) { return a + b; });
  const int64_t head = kv_head * attend.group + unit.head;
  HeadResult result{};
  if (present) {
    result = finish_head(attend, kv_head, head, largest, sum);
    if (attend.inputs.lse && unit.turn == 0 && unit.c == 0) attend.inputs.lse(t, head) = result.lse;
  }

  float total[kEight] = {};
#pragma unroll 1
  for (int base_part = 0;;) {
    float factors[kParts / kFour];
#pragma unroll
    for (int i = 0; i < kParts / kFour; ++i) {
      // A block without weight counts for nothing, whatever its values are.
      factors[i] =
          own[i].y == 0 ? 0.0f : cuda::exp2_fast(own[i].x - base) * result.factor * own[i].z;
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float factor = __shfl_sync(kAllLanes, factors[i / kFour],
                                       threadIdx.x % kWarpThreads / kFour * kFour + i % kFour);
      const uint32_t pairs[] = {stored[i].x, stored[i].y, stored[i].z, stored[i].w};
#pragma unroll
      for (int j = 0; j < kEight / 2; ++j) {
        const float2 two = cuda::f16_values(factor == 0 ? 0 : pairs[j]);
        total[2 * j] = fmaf(factor, two.x, total[2 * j]);
        total[2 * j + 1] = fmaf(factor, two.y, total[2 * j + 1]);
      }
    }
    base_part += kParts;
    if (base_part >= count) break;
    load(base_part);
  }
  uint32_t pairs[kEight / 2];
#pragma unroll
  for (int j = 0; j < kEight / 2; ++j) {
    // Adding +0 turns -0 into +0.
    pairs[j] = cuda::bf16_pair(total[2 * j] + 0.0f, total[2 * j + 1] + 0.0f);
  }
  exchange_pairs(pairs);
  const int channel = 32 * unit.turn + kEight * unit.c;
  if (!present || channel >= attend.head_dim) return;
  *reinterpret_cast<uint4*>(attend.inputs.out.row(t, head) + channel) =
      make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Heads of a place take a power of two of a tile's rows.
int group_shift_of(const MsaAttendProblem& problem) {
  int shift = 0;
  while (int64_t{1} << shift < problem.num_heads / problem.num_kv_heads) ++shift;
  return shift;
}
// Of 16 bytes, of a partial result.
int64_t part_units(const MsaAttendProblem& problem) {
  return (problem.head_dim <= 64 ? 64 : kMaxDim) / 8 << group_shift_of(problem);
}

// What follows from the problem.
struct Slabs {
  int64_t rows;
  int64_t number;

  explicit Slabs(const MsaAttendProblem& problem) {
    const int64_t row_bytes =
        problem.num_kv_heads * problem.topk *
        (part_units(problem) * static_cast<int64_t>(sizeof(uint4)) +
         (static_cast<int64_t>(sizeof(PartState)) << group_shift_of(problem)));
    const int64_t bound = std::max<int64_t>(1, problem.max_rows);
    const int64_t most = std::clamp<int64_t>(kMaxSlabBytes / row_bytes, 1, bound);
    number = (bound + most - 1) / most;
    rows = (bound + number - 1) / number;
  }
};

int64_t places_of(const MsaAttendProblem& problem, int64_t rows) {
  return rows * problem.num_kv_heads * problem.topk;
}
int64_t cells_of(const MsaAttendProblem& problem) {
  return problem.num_kv_heads * problem.max_requests * problem.max_pages;
}
int64_t item_places_of(const MsaAttendProblem& problem) {
  return std::min(kItemRows >> group_shift_of(problem), kMaxItemPlaces);
}
// Every cell with places has an item that is not full.
int64_t items_of(const MsaAttendProblem& problem, const Slabs& slabs) {
  const int64_t places = places_of(problem, slabs.rows);
  return places / item_places_of(problem) + std::min(places, cells_of(problem));
}

struct ByBlockMemory {
  int32_t *offsets, *num_places, *row_end, *slab_counts, *firsts;
  int64_t num_slab_counts;
  Target* targets;
  Place* places;
  Item* items;
  PartState* part_state;
  uint4* part_values;

  ByBlockMemory(const MsaAttendProblem& problem, const Slabs& slabs, WorkspaceCutter& cutter) {
    const int64_t places_all = places_of(problem, problem.max_rows);
    const int64_t parts = places_of(problem, slabs.rows);
    offsets = cutter.take<int32_t>(problem.max_requests + 1);
    num_places = cutter.take<int32_t>(problem.max_rows * problem.num_kv_heads);
    row_end = cutter.take<int32_t>(problem.max_rows);
    num_slab_counts = slabs.number * kSlabCounts;
    slab_counts = cutter.take<int32_t>(num_slab_counts + slabs.number * cells_of(problem));
    firsts = cutter.take<int32_t>(slabs.number * cells_of(problem));
    targets = cutter.take<Target>(places_all);
    places = cutter.take<Place>(slabs.number * places_of(problem, slabs.rows));
    items = cutter.take<Item>(slabs.number * items_of(problem, slabs));
    part_state = cutter.take<PartState>(parts << group_shift_of(problem));
    part_values = cutter.take<uint4>(parts * part_units(problem));
  }
};

template <int kDim>
void launch_slab(const ByBlockParams& params, int slab, int64_t num_blocks, Stream stream) {
  cuda::launch(kAttendOp, attend_items<kDim>,
               {dim3(static_cast<unsigned>(std::min(num_blocks, params.items_per_slab))),
                dim3(kItemThreads), sizeof(ItemMemory<kDim>)},
               stream, params, slab);
  const int64_t rows = std::min(params.slab_rows, params.attend.num_rows - slab * params.slab_rows);
  const int64_t lanes = std::max<int64_t>(kDim / 8 << params.group_shift, kWarpThreads);
  constexpr int kThreads = kFoldWarps * kWarpThreads;
  cuda::launch(kAttendOp, fold_places<kDim>,
               {dim3(cuda::grid_blocks(rows * params.attend.num_kv_heads * lanes, kThreads)),
                dim3(kThreads)},
               stream, params, slab);
}

}  // namespace
}  // namespace fovea::internal::msa::by_block

namespace fovea::internal {

namespace by_block = msa::by_block;

Refusal msa_attend_cuda_sm90_supports(const MsaAttendProblem& problem) {
  if (problem.kv_mode != MsaKvMode::kBf16) return "takes kv_mode bf16 only";
  const int64_t group = problem.num_heads / problem.num_kv_heads;
  if (group > msa::kMaxGroup) {
    return "needs at most " + std::to_string(msa::kMaxGroup) + " query heads per KV head, got " +
           std::to_string(group);
  }
  if (problem.head_dim > by_block::kMaxDim) {
    return "takes head_dim up to " + std::to_string(by_block::kMaxDim) + ", got " +
           std::to_string(problem.head_dim);
  }
  if (problem.block_size > by_block::kMaxBlockKeys) {
    return "takes blocks of at most " + std::to_string(by_block::kMaxBlockKeys) + " tokens, got " +
           std::to_string(problem.block_size);
  }
  if (problem.topk < 1 || problem.topk > 1024) {
    return "takes lists of 1 to 1024 blocks, got topk = " + std::to_string(problem.topk);
  }
  constexpr int64_t kMaxEntries = int64_t{1} << 30;
  const int64_t pairs = problem.max_rows * problem.num_kv_heads;
  const int64_t columns = problem.max_requests * problem.max_pages;
  if (problem.max_rows * problem.num_heads > kMaxEntries || pairs > kMaxEntries / problem.topk) {
    return "takes at most 2^30 rows times heads and rows times list entries";
  }
  if (columns > kMaxEntries / problem.num_kv_heads ||
      by_block::Slabs(problem).number >
          kMaxEntries / std::max<int64_t>(1, columns * problem.num_kv_heads)) {
    return "takes at most 2^30 blocks of requests times KV heads times slabs of rows";
  }
  return {};
}

Refusal msa_attend_cuda_sm90_preferred(const MsaAttendProblem& problem) {
  constexpr int64_t kMinPairs = 2048;  // rows times KV heads that fill a GPU
  constexpr int64_t kMinSharing = 2;   // rows that list a block, by the bounds
  if (2 * problem.block_size <= by_block::kMaxBlockKeys)
    return "multiplies every block as 128 tokens";
  // Plans of few rows have to choose as those of many do.
  if (problem.batch_invariant) return {};
  if (problem.max_rows * problem.num_kv_heads < kMinPairs) {
    return "pays from " + std::to_string(kMinPairs) + " rows times KV heads on";
  }
  if (problem.max_rows * problem.topk < kMinSharing * problem.max_requests * problem.max_pages) {
    return "pays where " + std::to_string(kMinSharing) + " rows list a block on average";
  }
  return {};
}

size_t msa_attend_cuda_sm90_workspace(const MsaAttendProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  const by_block::ByBlockMemory memory(problem, by_block::Slabs(problem), cutter);
  return cutter.used_bytes();
}

void msa_attend_cuda_sm90(const MsaAttendProblem& problem, const Device& device,
                          const MsaAttendTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const by_block::Slabs slabs(problem);
  WorkspaceCutter cutter(workspace);
  const by_block::ByBlockMemory memory(problem, slabs, cutter);
  if (tensors.q.shape[0] == 0) return;
  by_block::ByBlockParams params{};
  msa::AttendParams& attend = params.attend;
  attend = msa::attend_params(problem, tensors, memory.offsets, stream);
  const int64_t rows = attend.num_rows;
  const auto num_slabs = static_cast<int>((rows + slabs.rows - 1) / slabs.rows);
  const int64_t cells =
      problem.num_kv_heads * attend.rows.batch.num_requests() * attend.inputs.page_table.shape[1];
  params.slab_rows = slabs.rows;
  params.cells_per_slab = static_cast<int32_t>(cells);
  params.item_places = static_cast<int32_t>(by_block::item_places_of(problem));
  params.group_shift = by_block::group_shift_of(problem);
  params.places_per_slab = by_block::places_of(problem, slabs.rows);
  params.items_per_slab = by_block::items_of(problem, slabs);
  params.num_places = memory.num_places;
  params.row_end = memory.row_end;
  params.targets = memory.targets;
  params.slab_counts = reinterpret_cast<by_block::SlabCounts*>(memory.slab_counts);
  params.counts = memory.slab_counts + memory.num_slab_counts;
  params.firsts = memory.firsts;
  params.places = memory.places;
  params.items = memory.items;
  params.part_values = memory.part_values;
  params.part_state = memory.part_state;

  by_block::launch_lists(params, num_slabs, stream);
  const int64_t num_blocks = cuda::device_facts(device.ordinal).num_sms * by_block::kBlocksPerSm;
  for (int slab = 0; slab < num_slabs; ++slab) {
    if (problem.head_dim <= 64) {
      by_block::launch_slab<64>(params, slab, num_blocks, stream);
    } else {
      by_block::launch_slab<128>(params, slab, num_blocks, stream);
    }
  }
}

}  // namespace fovea::internal
