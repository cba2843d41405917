#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "src/core/access.h"
#include "src/core/cuda/cluster_launch.cuh"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/mla/cuda/latent_tiles.cuh"
#include "src/mla/cuda/listed_keys.cuh"
#include "src/mla/cuda/sparse_mla_fold.cuh"
#include "src/mla/sparse_mla_cache.h"
#include "src/mla/sparse_mla_impl.h"
#include "src/mla/sparse_mla_parts.h"

// Blocks and tiles: latent_tiles.cuh. The number of parts is fixed by the plan, so that a row's
// bits depend on nothing but the row. The parts of a row may be blocks of a cluster (compute
// capability 9.0) that fold what they have themselves: one launch instead of two.
//
// Lists over rows that hold their own scales have kernels of their own; scales apart from the rows,
// page tables and the inverse rotation are in the extended ones, which would cost the others
// registers.
namespace fovea::internal {
namespace {

using namespace latent;

// Of blocks that may be a cluster.
constexpr int kClusterHeads = 16;

struct Segment {
  const uint8_t* base;
  int64_t num_pages;
  int64_t page_size;
  int64_t page_stride_bytes;
  RowLayout layout;
  const int32_t* indices;
  int64_t index_stride;
  int64_t width;
  const int32_t* topk_length;  // may be null

  __device__ int64_t length(int64_t t) const {
    if (topk_length == nullptr) return width;
    const int64_t len = topk_length[t];
    return len < 0 ? 0 : len > width ? width : len;
  }
  __device__ const uint8_t* row(int32_t index) const {
    if (index < 0) return nullptr;
    const int64_t page = static_cast<uint32_t>(index) / static_cast<uint32_t>(page_size);
    if (page >= num_pages) return nullptr;
    return base + page * page_stride_bytes + (index - page * page_size) * layout.row_bytes;
  }
};

struct Params {
  Queries queries;
  Segment segments[2];
  Scores scores;
  Outputs outputs;
  int64_t num_rows;
  int64_t head_groups;
  bool ring;
  bool in_clusters;  // of the parts of a row
};

// What an extended kernel has besides.
struct ExtendedParams {
  Params params;  // of its segments only the layout
  SparseMlaSegment segments[2];
  InverseRotations rotations;
  int rope_dim;
};

// The slots of one row.
struct RowSlots {
  static constexpr bool kIsExtended = false;
  static constexpr bool kHasScales = false;
  const Params& params;
  const RowParts& parts;
  int64_t t;
  NoScales scales = {};

  __device__ const RowLayout& layout(int64_t block) const {
    return params.segments[block < parts.primary_blocks ? 0 : 1].layout;
  }
  __device__ int32_t place(int64_t block, int key) const {
    const bool primary = block < parts.primary_blocks;
    const Segment& segment = params.segments[primary ? 0 : 1];
    const int64_t slot = (primary ? block : block - parts.primary_blocks) * kBlockSlots + key;
    if (slot >= (primary ? parts.primary_slots : parts.extra_slots)) return -1;
    return segment.indices[t * segment.index_stride + slot];
  }
  __device__ const uint8_t* row(int64_t block, int, int32_t index) const {
    return params.segments[block < parts.primary_blocks ? 0 : 1].row(index);
  }
};

// The same in extended kernels. Only rows of 512 channels have scales apart from them.
template <int kHeadDim>
struct ExtendedSlots {
  static constexpr bool kIsExtended = true;
  static constexpr bool kHasScales = kHeadDim == kLatentDim;
  const ExtendedParams& extended;
  const RowParts& parts;
  int64_t t;
  std::conditional_t<kHasScales, KeyScales&, NoScales> scales;

  __device__ ListedKeys keys() const { return {extended.segments, parts, t}; }
  __device__ const RowLayout& layout(int64_t block) const {
    return extended.params.segments[keys().is_primary(block) ? 0 : 1].layout;
  }
  __device__ int32_t place(int64_t block, int key) const { return keys().place(block, key); }
  __device__ const uint8_t* row(int64_t block, int key, int32_t place) const {
    const LatentAddress found = keys().address(block, key, place);
    if constexpr (kHasScales) scales.from[key] = found.scales;
    return found.row;
  }
};

// What a block computes: one part of row t for the heads from first_head on.
struct BlockWork {
  int64_t t;
  int64_t part;
  int64_t first_head;

  __device__ BlockWork(const Params& params, int heads) {
    const auto parts = static_cast<unsigned>(params.outputs.num_parts);
    const auto groups = static_cast<unsigned>(params.head_groups);
    const unsigned group = params.in_clusters ? blockIdx.x / parts : blockIdx.x;
    part = params.in_clusters ? blockIdx.x % parts : blockIdx.y;
    t = group / groups;
    first_head = int64_t{group % groups} * heads;
  }
};

// The parts of a row, all blocks of a cluster, have been stored: each block folds some of the
// heads.
template <class Turn>
__device__ __forceinline__ void fold_cluster(const Outputs& outputs, const BlockWork& work,
                                             int heads, const RowParts& parts, const Turn& turn) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kAtOnce = kThreads / kFoldThreads;
  cuda::meet_cluster();
  const int thread = threadIdx.x % kFoldThreads;
  int i = static_cast<int>(work.part) * kAtOnce + static_cast<int>(threadIdx.x) / kFoldThreads;
  for (; i < heads; i += static_cast<int>(outputs.num_parts) * kAtOnce) {
    fold_head(outputs, work.t, work.first_head + i, parts.num_parts, turn, thread);
  }
#endif
}

template <int kHeads, int kHeadDim, class Slots, class Turn>
__device__ __forceinline__ void attend_part(const Params& params, const BlockWork& work, int heads,
                                            const RowParts& parts, const Slots& slots,
                                            const Turn& turn,
                                            SharedMemory<kHeads, kHeadDim>& shared) {
  const int64_t first_head = work.first_head, num_heads = params.outputs.num_heads;
  const int64_t begin_block = parts.num_parts > 0 ? parts.first_block(work.part) : 0;
  const int64_t end_block = parts.num_parts > 0 ? parts.first_block(work.part + 1) : 0;
  if constexpr (Slots::kIsExtended) {
    // They come while the first keys are looked up.
    if (begin_block < end_block)
      load_queries<false>(params.queries, work.t, first_head, heads, shared);
  } else {
    load_queries(params.queries, work.t, first_head, heads, shared);
  }
  clear_state(shared);
  Values<kHeads> values = {};
  attend_blocks(slots, params.ring, begin_block, end_block, params.scores, shared, values);
  store_part(params.outputs, work.t, first_head, num_heads, work.part, parts.num_parts <= 1, turn,
             shared, values);
}

// What a block does.
template <int kHeads, int kHeadDim, class Slots, class Turn>
__device__ __forceinline__ void attend_block(const Params& params, const BlockWork& work,
                                             const RowParts& parts, const Slots& slots,
                                             const Turn& turn,
                                             SharedMemory<kHeads, kHeadDim>& shared) {
  cuda::let_next_launch_start();
  const int64_t heads_left = params.outputs.num_heads - work.first_head;
  const int heads = static_cast<int>(heads_left < kHeads ? heads_left : kHeads);
  // An empty row has no part; its first block writes the zeros.
  if (work.part < parts.num_parts || work.part == 0) {
    attend_part(params, work, heads, parts, slots, turn, shared);
  }
  if constexpr (kHeads == kClusterHeads) {
    if (params.in_clusters && parts.num_parts > 1) {
      fold_cluster(params.outputs, work, heads, parts, turn);
    }
  }
}

template <int kHeads, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeads == 16 ? 2 : 1)
    attend(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeads, kHeadDim>*>(memory);
  const BlockWork work(params, kHeads);
  const RowParts parts(params.segments[0].length(work.t), params.segments[1].length(work.t),
                       params.outputs.num_parts);
  attend_block(params, work, parts, RowSlots{params, parts, work.t}, NoTurn{}, shared);
}

__device__ RowParts extended_parts(const ExtendedParams& extended, int64_t t) {
  return {extended.segments[0].length(t), extended.segments[1].length(t),
          extended.params.outputs.num_parts};
}

template <int kHeads, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeads == 16 ? 2 : 1)
    attend_extended(const __grid_constant__ ExtendedParams extended) {
  using Slots = ExtendedSlots<kHeadDim>;
  extern __shared__ __align__(16) uint8_t memory[];
  const BlockWork work(extended.params, kHeads);
  const RowParts parts = extended_parts(extended, work.t);
  const RowTurn turn{extended.rotations.row(work.t), extended.rope_dim};
  if constexpr (Slots::kHasScales) {
    auto& shared = *reinterpret_cast<ScaledMemory<kHeads>*>(memory);
    attend_block(extended.params, work, parts, Slots{extended, parts, work.t, shared.scales}, turn,
                 shared.tiles);
  } else {
    auto& shared = *reinterpret_cast<SharedMemory<kHeads, kHeadDim>*>(memory);
    attend_block(extended.params, work, parts, Slots{extended, parts, work.t, {}}, turn, shared);
  }
}

// Whether a problem needs the extended kernels.
bool is_extended(const SparseMlaProblem& problem) {
  const auto apart = [](RowFormat format) {
    return format == RowFormat::kV4 || format == RowFormat::kR512;
  };
  return apart(problem.row_format) || apart(*problem.extra_row_format) ||
         problem.extra_max_pages > 0 || problem.inverse_rope_dim > 0;
}

// Of the parts of one row, blocks of `heads` heads. Pairs find room wherever single blocks do.
// Larger clusters leave multiprocessors empty and wait for others to end, which costs nothing only
// where there are few (H200, 16 heads over bf16 rows: 4 rows of 16 parts 22 us either way, 8 rows
// 29.7 us and 25.9 with a second launch, 64 rows of 4 parts 110 and 77, 128 rows of 2 parts 125 and
// 131). Blocks of more heads have a multiprocessor each, and no gain was seen.
bool runs_in_clusters(int heads, int64_t num_blocks, int64_t num_parts, const Device& device) {
  if (heads != kClusterHeads || num_parts < 2 || !cuda::has_clusters(device.ordinal)) return false;
  const bool are_few = 2 * num_blocks <= cuda::device_facts(device.ordinal).num_sms;
  return num_parts == 2 || (are_few && num_parts <= cuda::kMostClusterBlocks);
}

int block_heads(const SparseMlaProblem& problem, const Device& device) {
  return heads_per_block(problem.num_heads, cuda::device_facts(device.ordinal).max_shared_bytes);
}

// Enough blocks for two rounds over the multiprocessors, from the bound of the rows alone.
int64_t parts_of(const SparseMlaProblem& problem, const Device& device) {
  const int64_t blocks = RowParts(problem.topk, problem.extra_topk, 1).num_blocks;
  if (problem.fixed_splits > 0) return std::max<int64_t>(1, std::min(problem.fixed_splits, blocks));
  const int64_t heads = block_heads(problem, device);
  const int64_t groups = (problem.num_heads + heads - 1) / heads;
  const int64_t wanted = 2 * cuda::device_facts(device.ordinal).num_sms /
                         std::max<int64_t>(1, problem.max_rows * groups);
  return std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(blocks / 2, 1, kMaxParts));
}

// Heads of a block of the extended kernels: fewer while the blocks still run at a time, because
// what a row of a few tiles takes is what one block does one after the other. No bit of a head
// depends on the heads beside it.
int extended_heads(int heads, int64_t blocks_per_group, const SparseMlaProblem& problem,
                   const Device& device) {
  const int64_t num_sms = cuda::device_facts(device.ordinal).num_sms;
  const auto groups_of = [&](int64_t of) { return (problem.num_heads + of - 1) / of; };
  while (heads > 16 && blocks_per_group <= num_sms / groups_of(heads / 2)) heads /= 2;
  return heads;
}

Segment device_segment(const SparseMlaSegment& from, bool may_stage) {
  Segment to{};
  to.base = from.base;
  to.num_pages = from.num_pages;
  to.page_size = from.page_size;
  to.page_stride_bytes = from.page_stride_bytes;
  to.layout.row_bytes = from.row_bytes;
  to.layout.format = from.format;
  to.layout.aligned = rows_are_aligned(from);
  to.layout.staged = may_stage && to.layout.aligned && from.format != RowFormat::kBf16;
  to.layout.bf16_scale = from.inv_scale.is_bf16;
  to.indices = from.indices.data;
  to.index_stride = from.indices.stride[0];
  to.width = from.indices ? from.indices.shape[1] : from.max_length;
  to.topk_length = from.topk_length.data;
  return to;
}

template <int kHeads, int kHeadDim>
void launch_attend(const ExtendedParams& extended, bool is_extended, Stream stream) {
  const Params& params = extended.params;
  const bool stages = params.segments[0].layout.staged || params.segments[1].layout.staged;
  const auto num_parts = static_cast<unsigned>(params.outputs.num_parts);
  cuda::LaunchShape shape{
      dim3(static_cast<unsigned>(params.num_rows * params.head_groups), num_parts), dim3(kThreads),
      block_bytes<kHeads, kHeadDim>(params.ring, stages)};
  if (is_extended && kHeadDim == kLatentDim) shape.shared_bytes += sizeof(KeyScales);
  if (params.in_clusters) shape.grid = dim3(shape.grid.x * num_parts);
  const auto start = [&](auto* kernel, const auto& given) {
    if (params.in_clusters) {
      cuda::launch_in_clusters("sparse_mla", kernel, shape, num_parts, stream, given);
    } else {
      cuda::launch("sparse_mla", kernel, shape, stream, given);
    }
  };
  if (is_extended) {
    start(attend_extended<kHeads, kHeadDim>, extended);
  } else {
    start(attend<kHeads, kHeadDim>, params);
  }
}

template <int kHeads>
void launch_attend(const SparseMlaProblem& problem, const ExtendedParams& extended, Stream stream) {
  if (problem.head_dim_qk == 576) {
    launch_attend<kHeads, 576>(extended, is_extended(problem), stream);
  } else {
    launch_attend<kHeads, 512>(extended, is_extended(problem), stream);
  }
}

}  // namespace

Refusal sparse_mla_cuda_supports(const SparseMlaProblem& problem) {
  if (problem.num_heads > 128) {
    return "takes at most 128 heads, got " + std::to_string(problem.num_heads);
  }
  return {};
}

size_t sparse_mla_cuda_workspace(const SparseMlaProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  PartMemory(problem.max_rows, problem.num_heads, parts_of(problem, device), cutter);
  return cutter.used_bytes();
}

void sparse_mla_cuda_portable(const SparseMlaProblem& problem, const Device& device,
                              const SparseMlaTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const int64_t num_rows = tensors.q.shape[0], num_parts = parts_of(problem, device);
  int heads = block_heads(problem, device);
  if (is_extended(problem)) heads = extended_heads(heads, num_rows * num_parts, problem, device);
  WorkspaceCutter cutter(workspace);
  ExtendedParams extended{};
  extended.segments[0] = primary_segment(problem, tensors);
  extended.segments[1] = extra_segment(problem, tensors);
  extended.rotations = InverseRotations(tensors);
  extended.rope_dim = static_cast<int>(problem.inverse_rope_dim);
  Params& params = extended.params;
  params.queries = device_queries(tensors.q);
  const int64_t max_shared_bytes = cuda::device_facts(device.ordinal).max_shared_bytes;
  const bool may_stage = has_staging(heads, max_shared_bytes);
  params.segments[0] = device_segment(extended.segments[0], may_stage);
  params.segments[1] = device_segment(extended.segments[1], may_stage);
  params.ring = has_ring(heads, max_shared_bytes);
  for (const Segment& segment : params.segments) {
    if (segment.width > 0) params.ring = params.ring && segment.layout.is_plain();
  }
  params.scores = {static_cast<float>(logit_scale(problem)), problem.logit_cap};
  params.num_rows = num_rows;
  params.head_groups = (problem.num_heads + heads - 1) / heads;
  params.outputs = part_outputs(problem, tensors, num_parts, cutter);
  params.in_clusters =
      runs_in_clusters(heads, num_rows * params.head_groups * num_parts, num_parts, device);
  if (heads == 64) {
    launch_attend<64>(problem, extended, stream);
  } else if (heads == 32) {
    launch_attend<32>(problem, extended, stream);
  } else {
    launch_attend<16>(problem, extended, stream);
  }
  if (params.in_clusters) return;
  launch_fold({{extended.segments[0], extended.segments[1]},
               params.outputs,
               extended.rotations,
               extended.rope_dim,
               heads == kClusterHeads && cuda::has_clusters(device.ordinal)},
              num_rows, stream);
}

}  // namespace fovea::internal
