#include <algorithm>

#include "src/core/cuda/f16.cuh"
#include "src/core/workspace.h"
#include "src/msa/cuda/msa_attend_sm90/kernel.cuh"

namespace fovea::internal::msa::by_block {
namespace {

__global__ void __launch_bounds__(kFoldWarps* kWarpThreads)
    fold_places(const __grid_constant__ ByBlockParams params, int slab) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFF;
  constexpr int kHalfWarp = kWarpThreads / 2;  // has the channels of a partial result
  static_assert(kHalfWarp * kEight == kMaxDim);
  const AttendParams& attend = params.attend;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t heads = int64_t{attend.num_kv_heads} * attend.group;
  const int64_t at = int64_t{blockIdx.x} * kFoldWarps + threadIdx.x / kWarpThreads;
  const auto row = static_cast<int64_t>(static_cast<uint32_t>(at) / static_cast<uint32_t>(heads));
  const auto head = static_cast<int64_t>(static_cast<uint32_t>(at) % static_cast<uint32_t>(heads));
  const int64_t t = slab * params.slab_rows + row;
  if (row >= params.slab_rows || t >= attend.num_rows) return;
  const auto group = static_cast<uint32_t>(attend.group);
  const auto kv_head = static_cast<int64_t>(static_cast<uint32_t>(head) / group);
  const auto own = static_cast<int64_t>(static_cast<uint32_t>(head) % group);
  const int count = params.num_places[t * attend.num_kv_heads + kv_head];
  const int64_t first = (row * attend.num_kv_heads + kv_head) * attend.topk * group + own;
  const PartState* const states = params.part_state + first;
  const auto weight_of = [&](const PartState& state, float base) {
    return state.sum * cuda::exp2_fast(state.largest - base);
  };

  float largest = kNegInf;
  for (int i = lane; i < count; i += kWarpThreads) {
    largest = fmaxf(largest, states[int64_t{i} * group].largest);
  }
  largest = cuda::warp_max(largest);
  const float base = largest == kNegInf ? 0.0f : largest;
  float sum = 0;
  for (int i = lane; i < count; i += kWarpThreads) {
    sum += weight_of(states[int64_t{i} * group], base);
  }
  for (int step = kHalfWarp; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  const HeadResult result = finish_head(attend, kv_head, head, largest, sum);
  if (attend.inputs.lse && lane == 0) attend.inputs.lse(t, head) = result.lse;

  // Half a warp adds up every other partial result.
  const int half = lane / kHalfWarp;
  const int channel = lane % kHalfWarp * kEight;
  const bool present = channel < attend.head_dim;
  const int64_t stride = int64_t{group} * attend.head_dim;
  const uint16_t* const values = params.part_values + first * attend.head_dim + channel;
  float total[kEight] = {};
  for (int base_part = 0; base_part < count; base_part += kWarpThreads) {
    const int parts = min(count - base_part, kWarpThreads);
    float weight = 0, units[2] = {};
    if (lane < parts) {
      const PartState state = states[int64_t{base_part + lane} * group];
      weight = weight_of(state, base) * result.factor;
      units[0] = weight * state.unit[0];
      units[1] = weight * state.unit[1];
    }
    // A block without weight counts for nothing, whatever its values are.
    const uint32_t weighty = __ballot_sync(kAllLanes, weight != 0);
    const uint16_t* const from = values + base_part * stride;
#pragma unroll 8
    for (int j = 0; j < parts; j += 2) {
      const int part = j + half;
      const float low_channels = __shfl_sync(kAllLanes, units[0], part);
      const float high_channels = __shfl_sync(kAllLanes, units[1], part);
      const float unit = channel < kPassChannels ? low_channels : high_channels;
      uint4 stored = make_uint4(0, 0, 0, 0);
      if (present && (weighty >> part & 1) != 0) {
        stored = *reinterpret_cast<const uint4*>(from + part * stride);
      }
      const uint32_t pairs[] = {stored.x, stored.y, stored.z, stored.w};
#pragma unroll
      for (int i = 0; i < kEight / 2; ++i) {
        const float2 two = cuda::f16_values(pairs[i]);
        total[2 * i] = fmaf(unit, two.x, total[2 * i]);
        total[2 * i + 1] = fmaf(unit, two.y, total[2 * i + 1]);
      }
    }
  }
#pragma unroll
  for (float& x : total) x += __shfl_xor_sync(kAllLanes, x, kHalfWarp);
  if (!present || half != 0) return;
  store_channels({result.lse, 1.0f, result.empty}, total, attend.inputs.out.row(t, head) + channel);
}

// What follows from the problem.
struct Slabs {
  int64_t rows;
  int64_t number;

  explicit Slabs(const MsaAttendProblem& problem) {
    const int64_t heads = problem.num_heads * problem.topk;
    const int64_t row_bytes =
        heads * (problem.head_dim * static_cast<int64_t>(sizeof(uint16_t)) + sizeof(PartState));
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
// Heads of a place take a power of two of a tile's rows.
int group_shift_of(const MsaAttendProblem& problem) {
  int shift = 0;
  while (int64_t{1} << shift < problem.num_heads / problem.num_kv_heads) ++shift;
  return shift;
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
  uint16_t* part_values;

  ByBlockMemory(const MsaAttendProblem& problem, const Slabs& slabs, WorkspaceCutter& cutter) {
    const int64_t places_all = places_of(problem, problem.max_rows);
    const int64_t parts = slabs.rows * problem.num_heads * problem.topk;
    offsets = cutter.take<int32_t>(problem.max_requests + 1);
    num_places = cutter.take<int32_t>(problem.max_rows * problem.num_kv_heads);
    row_end = cutter.take<int32_t>(problem.max_rows);
    num_slab_counts = slabs.number * kSlabCounts;
    slab_counts = cutter.take<int32_t>(num_slab_counts + slabs.number * cells_of(problem));
    firsts = cutter.take<int32_t>(slabs.number * cells_of(problem));
    targets = cutter.take<Target>(places_all);
    places = cutter.take<Place>(slabs.number * places_of(problem, slabs.rows));
    items = cutter.take<Item>(slabs.number * items_of(problem, slabs));
    part_state = cutter.take<PartState>(parts);
    part_values = cutter.take<uint16_t>(parts * problem.head_dim);
  }
};

template <int kDim>
void launch_items(const ByBlockParams& params, int slab, int64_t num_blocks, Stream stream) {
  cuda::launch(kAttendOp, attend_items<kDim>,
               {dim3(static_cast<unsigned>(std::min(num_blocks, params.items_per_slab))),
                dim3(kItemThreads), sizeof(ItemMemory<kDim>)},
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
      by_block::launch_items<64>(params, slab, num_blocks, stream);
    } else {
      by_block::launch_items<128>(params, slab, num_blocks, stream);
    }
    const int64_t here = std::min(slabs.rows, rows - slab * slabs.rows);
    cuda::launch(msa::kAttendOp, by_block::fold_places,
                 {dim3(cuda::grid_blocks(here * problem.num_heads, by_block::kFoldWarps)),
                  dim3(by_block::kFoldWarps * msa::kWarpThreads)},
                 stream, params, slab);
  }
}

}  // namespace fovea::internal
