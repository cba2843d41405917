#include <algorithm>
#include <limits>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/request_offsets.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/workspace.h"
#include "src/mla/cuda/latent_tiles.cuh"
#include "src/mla/dense_mla_impl.h"

// Blocks and tiles: latent_tiles.cuh. A block has one row alone, so that no key has to be masked
// for one row and not for another; rows of a request read its keys from the second-level cache.
// What follows from the device contents, which request a row belongs to and how many keys it sees,
// a block finds out for itself: the grid depends on bounds only.
namespace fovea::internal {
namespace {

using namespace latent;

struct Params {
  Queries queries;
  DenseMlaKeys keys;
  RowLayout layout;
  Scores scores;
  Outputs outputs;
  const int32_t* row_offsets;  // [R+1], cut to the rows and never falling
  int64_t num_requests;
  int64_t num_rows;
  int64_t heads_per_kv;
  int64_t groups_per_kv;  // of heads
  int64_t num_groups;     // of all KV heads
  int64_t split_keys;
  bool causal;
  bool ring;
};

// Where a row stands.
struct Row {
  int64_t request = -1;  // -1: nobody's
  int64_t num_keys = 0;  // that it sees
};

__device__ Row find_row(const Params& params, int64_t t) {
  const auto begin_of = [&](int64_t r) { return int64_t{params.row_offsets[r]}; };
  const int64_t r = cuda::count_up_to(begin_of, params.num_requests, t) - 1;
  if (r < 0 || t >= params.row_offsets[r + 1]) return {};
  const int64_t begin = params.row_offsets[r];
  return {r, visible_keys(params.causal, t - begin, params.row_offsets[r + 1] - begin,
                          params.keys.length(r))};
}

// The parts of a row: by split_keys, or as many equal ones as the plan has.
struct DeviceParts {
  int64_t num_blocks;
  int64_t num_parts;
  int64_t blocks_per_part;  // 0: equal ones

  __device__ DeviceParts(const Params& params, int64_t num_keys) {
    if (params.split_keys > 0) {
      const KeyParts parts(num_keys, params.split_keys);
      num_blocks = parts.num_blocks;
      num_parts = parts.num_parts();
      blocks_per_part = parts.blocks_per_part;
    } else {
      num_blocks = (num_keys + kBlockSlots - 1) / kBlockSlots;
      num_parts = min(params.outputs.num_parts, num_blocks);
      blocks_per_part = 0;
    }
  }
  __device__ int64_t first_block(int64_t part) const {
    if (num_parts <= 1) return part == 0 ? 0 : num_blocks;
    if (blocks_per_part > 0) return min(num_blocks, part * blocks_per_part);
    return num_blocks * part / num_parts;
  }
};

struct RowKeys {
  static constexpr bool kHasScales = false;
  const Params& params;
  Row row_;
  int64_t kv_head;
  NoScales scales = {};

  __device__ const RowLayout& layout(int64_t) const { return params.layout; }
  __device__ int32_t place(int64_t block, int key) const {
    const int64_t j = block * kBlockSlots + key;
    return j < row_.num_keys ? params.keys.page(row_.request, j) : -1;
  }
  __device__ const uint8_t* row(int64_t block, int key, int32_t page) const {
    return params.keys.row_of_page(page, kv_head, block * kBlockSlots + key);
  }
};

template <int kHeads, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeads == 16 ? 2 : 1)
    attend(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeads, kHeadDim>*>(memory);
  const int64_t group = blockIdx.x % params.num_groups;
  const int64_t t = blockIdx.x / params.num_groups;
  const int64_t part = blockIdx.y;
  const Row row = find_row(params, t);
  if (row.request < 0) return;
  const DeviceParts parts(params, row.num_keys);
  // An empty row has no part; its first block writes the zeros.
  if (part >= parts.num_parts && part > 0) return;
  const int64_t kv_head = group / params.groups_per_kv;
  const int64_t first_head = kv_head * params.heads_per_kv + group % params.groups_per_kv * kHeads;
  const int64_t end_head = min((kv_head + 1) * params.heads_per_kv, first_head + kHeads);
  load_queries(params.queries, t, first_head, static_cast<int>(end_head - first_head), shared);
  clear_state(shared);
  Values<kHeads> values = {};
  attend_blocks(RowKeys{params, row, kv_head}, params.ring, parts.first_block(part),
                parts.first_block(part + 1), params.scores, shared, values);
  store_part(params.outputs, t, first_head, end_head, part, parts.num_parts <= 1, NoTurn{}, shared,
             values);
}

__global__ void __launch_bounds__(kFoldThreads) fold(const __grid_constant__ Params params) {
  const int64_t t = blockIdx.x / params.outputs.num_heads;
  const int64_t head = blockIdx.x % params.outputs.num_heads;
  const Row row = find_row(params, t);
  if (row.request < 0) return;
  const DeviceParts parts(params, row.num_keys);
  if (parts.num_parts > 1)
    fold_head(params.outputs, t, head, parts.num_parts, NoTurn{}, threadIdx.x);
}

// What follows from problem and device: grid and memory.
struct Shape {
  int heads;  // of a block
  int64_t groups_per_kv;
  int64_t parts;

  Shape(const DenseMlaProblem& problem, const Device& device) {
    const cuda::DeviceFacts& facts = cuda::device_facts(device.ordinal);
    heads = heads_per_block(heads_per_kv(problem), facts.max_shared_bytes);
    groups_per_kv = (heads_per_kv(problem) + heads - 1) / heads;
    const int64_t blocks = (max_keys(problem) + kBlockSlots - 1) / kBlockSlots;
    if (problem.split_keys > 0) {
      parts = std::max<int64_t>(1, KeyParts(max_keys(problem), problem.split_keys).num_parts());
    } else {
      // Enough blocks for two rounds over the multiprocessors, from the bound of the rows alone.
      const int64_t wanted =
          2 * facts.num_sms /
          std::max<int64_t>(1, problem.max_rows * problem.num_heads_kv * groups_per_kv);
      parts = std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(blocks / 2, 1, kMaxParts));
    }
  }
};

struct Memory {
  int32_t* offsets;
  PartMemory parts;

  Memory(const DenseMlaProblem& problem, const Shape& shape, WorkspaceCutter& cutter)
      : offsets(cutter.take<int32_t>(problem.max_requests + 1)),
        parts(problem.max_rows, problem.num_heads, shape.parts, cutter) {}
};

RowLayout device_layout(const DenseMlaKeys& keys, int64_t row_bytes) {
  RowLayout layout{};
  layout.row_bytes = row_bytes;
  layout.format = keys.format;
  layout.aligned = reinterpret_cast<uintptr_t>(keys.base) % 16 == 0 &&
                   keys.page_stride_bytes % 16 == 0 && keys.row_stride_bytes % 16 == 0 &&
                   keys.head_stride_bytes % 16 == 0;
  return layout;
}

template <int kHeads>
void launch_attend(const DenseMlaProblem& problem, const Params& params, Stream stream) {
  const bool stages = params.layout.staged;

  const dim3 grid(static_cast<unsigned>(params.num_rows * params.num_groups),
                  static_cast<unsigned>(params.outputs.num_parts));
  if (problem.head_dim_qk == 576) {
    cuda::launch("dense_mla", attend<kHeads, 576>,
                 {grid, dim3(kThreads), block_bytes<kHeads, 576>(params.ring, stages)}, stream,
                 params);
  } else {
    cuda::launch("dense_mla", attend<kHeads, 512>,
                 {grid, dim3(kThreads), block_bytes<kHeads, 512>(params.ring, stages)}, stream,
                 params);
  }
}

}  // namespace

Refusal dense_mla_cuda_supports(const DenseMlaProblem& problem) {
  constexpr int64_t kMaxGridX = std::numeric_limits<int32_t>::max(), kMaxGridY = 65535;
  if (problem.num_heads > 128) {
    return "takes at most 128 heads, got " + std::to_string(problem.num_heads);
  }
  if (problem.max_rows * problem.num_heads > kMaxGridX) {
    return "takes at most 2^31 - 1 rows times heads, got bounds of " +
           std::to_string(problem.max_rows * problem.num_heads);
  }
  if (problem.split_keys > 0 &&
      KeyParts(max_keys(problem), problem.split_keys).num_parts() > kMaxGridY) {
    return "takes at most 65535 parts of a row, got split_keys = " +
           std::to_string(problem.split_keys) + " for up to " + std::to_string(max_keys(problem)) +
           " keys";
  }
  return {};
}

size_t dense_mla_cuda_workspace(const DenseMlaProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  Memory(problem, Shape(problem, device), cutter);
  return cutter.used_bytes();
}

void dense_mla_cuda_portable(const DenseMlaProblem& problem, const Device& device,
                             const DenseMlaTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const Shape shape(problem, device);
  WorkspaceCutter cutter(workspace);
  const Memory memory(problem, shape, cutter);
  Params params{};
  params.queries = device_queries(tensors.q);
  params.keys = dense_mla_keys(problem, tensors);
  params.layout =
      device_layout(params.keys, sparse_mla_row_bytes(problem.row_format, problem.head_dim_qk));
  const int64_t max_shared_bytes = cuda::device_facts(device.ordinal).max_shared_bytes;
  params.layout.staged = params.layout.aligned && problem.row_format != RowFormat::kBf16 &&
                         has_staging(shape.heads, max_shared_bytes);
  params.ring = params.layout.is_plain() && has_ring(shape.heads, max_shared_bytes);
  params.scores = {static_cast<float>(logit_scale(problem)), 0.0f};
  params.row_offsets = memory.offsets;
  params.num_requests = tensors.page_table.shape[0];
  params.num_rows = tensors.q.shape[0];
  params.heads_per_kv = heads_per_kv(problem);
  params.groups_per_kv = shape.groups_per_kv;
  params.num_groups = problem.num_heads_kv * shape.groups_per_kv;
  params.split_keys = problem.split_keys;
  params.causal = problem.causal;
  Outputs& outputs = params.outputs;
  outputs.out = access<bf16_t, 3>(tensors.out);
  outputs.out_aligned = pairs_are_aligned(outputs.out);
  outputs.lse = access<float, 2>(tensors.lse);
  outputs.num_heads = problem.num_heads;
  outputs.num_parts = shape.parts;
  outputs.value_scale = problem.k_scale;
  outputs.empty_lse = kNegInf;
  outputs.part_values = memory.parts.values;
  outputs.part_state = memory.parts.state;
  if (params.num_rows == 0 || params.num_requests == 0) return;
  const OffsetParams offsets{{static_cast<const int32_t*>(tensors.q_indptr.data)},
                             {memory.offsets},
                             {params.num_rows},
                             params.num_requests + 1};
  cuda::launch("dense_mla", clean_offsets<kOffsetThreads>, {dim3(1), dim3(kOffsetThreads)}, stream,
               offsets);
  if (shape.heads == 64) {
    launch_attend<64>(problem, params, stream);
  } else if (shape.heads == 32) {
    launch_attend<32>(problem, params, stream);
  } else {
    launch_attend<16>(problem, params, stream);
  }
  if (outputs.num_parts > 1) {
    cuda::launch(
        "dense_mla", fold,
        {dim3(static_cast<unsigned>(params.num_rows * problem.num_heads)), dim3(kFoldThreads)},
        stream, params);
  }
}

}  // namespace fovea::internal
