#include <algorithm>
#include <limits>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/sink.h"
#include "src/core/workspace.h"
#include "src/mla/cuda/latent_tiles.cuh"
#include "src/mla/sparse_mla_cache.h"
#include "src/mla/sparse_mla_impl.h"
#include "src/mla/sparse_mla_parts.h"

// Blocks and tiles: latent_tiles.cuh. The number of parts is fixed by the plan, so that a row's
// bits depend on nothing but the row.
namespace fovea::internal {
namespace {

using namespace latent;

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
};

// The slots of one row.
struct RowSlots {
  const Params& params;
  const RowParts& parts;
  int64_t t;

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

template <int kHeads, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeads == 16 ? 2 : 1)
    attend(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeads, kHeadDim>*>(memory);
  const int64_t group = blockIdx.x % params.head_groups;
  const int64_t t = blockIdx.x / params.head_groups;
  const int64_t part = blockIdx.y;
  const int64_t first_head = group * kHeads;
  const int64_t num_heads = params.outputs.num_heads;
  const RowParts parts(params.segments[0].length(t), params.segments[1].length(t),
                       params.outputs.num_parts);
  // An empty row has no part; its first block writes the zeros.
  if (part >= parts.num_parts && part > 0) return;
  const int64_t begin_block = parts.num_parts > 0 ? parts.first_block(part) : 0;
  const int64_t end_block = parts.num_parts > 0 ? parts.first_block(part + 1) : 0;
  load_queries(params.queries, t, first_head,
               static_cast<int>(num_heads - first_head < kHeads ? num_heads - first_head : kHeads),
               shared);
  clear_state(shared);
  Values<kHeads> values = {};
  attend_blocks(RowSlots{params, parts, t}, params.ring, begin_block, end_block, params.scores,
                shared, values);
  store_part(params.outputs, t, first_head, num_heads, part, parts.num_parts <= 1, shared, values);
}

__global__ void __launch_bounds__(kFoldThreads) fold(const __grid_constant__ Params params) {
  const int64_t t = blockIdx.x / params.outputs.num_heads;
  const int64_t head = blockIdx.x % params.outputs.num_heads;
  const RowParts parts(params.segments[0].length(t), params.segments[1].length(t),
                       params.outputs.num_parts);
  if (parts.num_parts > 1) fold_head(params.outputs, t, head, parts.num_parts);
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

Segment device_segment(const SparseMlaSegment& from, bool may_stage) {
  Segment to{};
  to.base = from.base;
  to.num_pages = from.num_pages;
  to.page_size = from.page_size;
  to.page_stride_bytes = from.page_stride_bytes;
  to.layout.row_bytes = from.row_bytes;
  to.layout.format = from.format;
  to.layout.aligned = reinterpret_cast<uintptr_t>(from.base) % 16 == 0 &&
                      from.page_stride_bytes % 16 == 0 && from.row_bytes % 16 == 0;
  to.layout.staged = may_stage && to.layout.aligned && from.format != RowFormat::kBf16;
  to.indices = from.indices.data;
  to.index_stride = from.indices.stride[0];
  to.width = from.indices ? from.indices.shape[1] : 0;
  to.topk_length = from.topk_length.data;
  return to;
}

template <int kHeads>
void launch_attend(const SparseMlaProblem& problem, const Params& params, Stream stream) {
  const bool stages = params.segments[0].layout.staged || params.segments[1].layout.staged;

  const dim3 grid(static_cast<unsigned>(params.num_rows * params.head_groups),
                  static_cast<unsigned>(params.outputs.num_parts));
  if (problem.head_dim_qk == 576) {
    cuda::launch("sparse_mla", attend<kHeads, 576>,
                 {grid, dim3(kThreads), block_bytes<kHeads, 576>(params.ring, stages)}, stream,
                 params);
  } else {
    cuda::launch("sparse_mla", attend<kHeads, 512>,
                 {grid, dim3(kThreads), block_bytes<kHeads, 512>(params.ring, stages)}, stream,
                 params);
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
  const int heads = block_heads(problem, device);
  WorkspaceCutter cutter(workspace);
  Params params{};
  params.queries = device_queries(tensors.q);
  const int64_t max_shared_bytes = cuda::device_facts(device.ordinal).max_shared_bytes;
  const bool may_stage = has_staging(heads, max_shared_bytes);
  params.segments[0] = device_segment(primary_segment(problem, tensors), may_stage);
  params.segments[1] = device_segment(extra_segment(problem, tensors), may_stage);
  params.ring = has_ring(heads, max_shared_bytes);
  for (const Segment& segment : params.segments) {
    if (segment.width > 0) params.ring = params.ring && segment.layout.is_plain();
  }
  params.scores = {static_cast<float>(logit_scale(problem)), problem.logit_cap};
  params.num_rows = tensors.q.shape[0];
  params.head_groups = (problem.num_heads + heads - 1) / heads;
  Outputs& outputs = params.outputs;
  outputs.sink = static_cast<const float*>(tensors.sink.data);
  outputs.out = access<bf16_t, 3>(tensors.out);
  outputs.out_aligned = pairs_are_aligned(outputs.out);
  outputs.lse = access<float, 2>(tensors.lse);
  outputs.max_logits = access<float, 2>(tensors.max_logits);
  outputs.num_heads = problem.num_heads;
  outputs.num_parts = parts_of(problem, device);
  outputs.value_scale = problem.k_scale;
  outputs.empty_lse = problem.empty_lse == EmptyLse::kPosInf ? -kNegInf : kNegInf;
  const PartMemory memory(problem.max_rows, problem.num_heads, outputs.num_parts, cutter);
  outputs.part_values = memory.values;
  outputs.part_state = memory.state;
  if (heads == 64) {
    launch_attend<64>(problem, params, stream);
  } else if (heads == 32) {
    launch_attend<32>(problem, params, stream);
  } else {
    launch_attend<16>(problem, params, stream);
  }
  if (outputs.num_parts > 1) {
    cuda::launch(
        "sparse_mla", fold,
        {dim3(static_cast<unsigned>(params.num_rows * problem.num_heads)), dim3(kFoldThreads)},
        stream, params);
  }
}

}  // namespace fovea::internal
