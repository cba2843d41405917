#include <algorithm>
#include <limits>

#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/kda/cuda/kda_rows.cuh"
#include "src/kda/cuda/kda_sequences.cuh"
#include "src/kda/kda_commit_impl.h"

// One launch for all layers, states and windows. A block takes some rows of V of one value head, or
// a piece of one window; a warp keeps its rows of the committed state in registers, because they
// may be the ones that it writes.
namespace fovea::internal {
namespace {

using cuda::kWarpThreads;

constexpr char kOp[] = "kda_commit";
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpThreads;
constexpr int kRows = 2;  // of V, of a warp at a time
constexpr int kMaxLaneChannels = 8;
constexpr int kBlockRows = 32;                 // of V, of a block
constexpr int kWindowElements = 8 * kThreads;  // of a block

struct Params {
  CommitLists lists;
  CommitLayer first;          // layer 0
  int64_t scratch_layer = 0;  // elements from one layer to the next
  int64_t state_layer = 0;
  int64_t windows_layer = 0;
  int64_t window_pool_layer = 0;
  const int32_t* refused = nullptr;  // null without `check`
  int64_t requests = 0;
  int heads = 0, head_dim_k = 0, head_dim_v = 0;
  int slices = 0;         // blocks of one value head
  int window_blocks = 0;  // blocks of one window
  bool copies_states = false;
  bool aligned = false;  // four channels of states and of the pool are one word

  Params(const KdaCommitProblem& problem, const KdaCommitTensors& tensors)
      : lists(problem, tensors), first(problem, tensors, 0) {}
};

// A value head of a layer and request: where its states lie.
struct Head {
  int64_t request;
  int hv;
  const float* scratch;  // of the layer
  StateAccess states;    // of the layer
};

__device__ void copy_rows(const Params& params, const Head& head, const CommitTarget& target,
                          int v0, int v_end) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const VerifyScratch& kept = params.first.kept;
  const float* const from = head.scratch + head.request * kept.request_stride +
                            target.node * kept.row_stride + head.hv * kept.head_stride;
  for (int v = v0 + warp; v < v_end; v += kWarps) {
    const float* const row = from + v * kept.v_stride;
    if (params.aligned) {
      for (int k = 4 * lane; k < params.head_dim_k; k += 4 * kWarpThreads) {
        const float4 word = *reinterpret_cast<const float4*>(row + k);
        const int64_t at = head.states.offset(target.slot, head.hv, v, k);
        if (head.states.is_bf16) {
          const bf16_t rounded[4] = {bf16_from_float(word.x), bf16_from_float(word.y),
                                     bf16_from_float(word.z), bf16_from_float(word.w)};
          cuda::store4<true>(rounded, static_cast<bf16_t*>(head.states.data) + at);
        } else {
          *reinterpret_cast<float4*>(static_cast<float*>(head.states.data) + at) = word;
        }
      }
    } else {
      for (int k = lane; k < params.head_dim_k; k += kWarpThreads) {
        head.states.store(target.slot, head.hv, v, k, row[k]);
      }
    }
  }
}

// Rows v0 .. v0 + kRows - 1 of diag(exp(G_m)) S0 + sum_j (k_j exp(G_m - G_j)) u_j^T, from the last
// node back: the decays behind a node are summed, never subtracted.
__device__ void rebuild_rows(const Params& params, const Head& head, const CommitTarget& target,
                             int v0, const float (&start)[kRows][kMaxLaneChannels]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const VerifyScratch& kept = params.first.kept;
  const float* const records =
      head.scratch + head.request * kept.request_stride + head.hv * kept.head_stride;
  float sum[kRows][kMaxLaneChannels];
  float log_sum[kMaxLaneChannels];
#pragma unroll
  for (int i = 0; i < kMaxLaneChannels; ++i) {
    log_sum[i] = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r][i] = 0;
  }
  constexpr float kLog2e = static_cast<float>(kLog2E);
  for (int64_t j = target.node; j >= 0; j = parent_row(params.lists.parent, j)) {
    const float* const record = records + j * kept.row_stride;
    float u[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      u[r] = v0 + r < params.head_dim_v ? record[2 * params.head_dim_k + v0 + r] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kMaxLaneChannels; ++i) {
      const int c = lane + i * kWarpThreads;
      if (c >= params.head_dim_k) continue;
      const float key = record[c] * cuda::exp2_fast(log_sum[i] * kLog2e);
      log_sum[i] += record[params.head_dim_k + c];
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r][i] = fmaf(key, u[r], sum[r][i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kMaxLaneChannels; ++i) {
    const int c = lane + i * kWarpThreads;
    if (c >= params.head_dim_k) continue;
    const float decay = cuda::exp2_fast(log_sum[i] * kLog2e);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (v0 + r >= params.head_dim_v) continue;
      head.states.store(target.slot, head.hv, v0 + r, c, fmaf(start[r][i], decay, sum[r][i]));
    }
  }
}

__device__ void commit_records(const Params& params, const Head& head,
                               const CommitTarget (&targets)[2], int v_begin, int v_end) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int64_t entry = params.lists.start(head.request);
#pragma unroll 1
  for (int v0 = v_begin + warp * kRows; v0 < v_end; v0 += kWarps * kRows) {
    float start[kRows][kMaxLaneChannels];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kMaxLaneChannels; ++i) {
        const int c = lane + i * kWarpThreads;
        const bool used = entry >= 0 && v0 + r < params.head_dim_v && c < params.head_dim_k;
        start[r][i] = used ? head.states.load(entry, head.hv, v0 + r, c) : 0.0f;
      }
    }
#pragma unroll
    for (const CommitTarget& target : targets) {
      if (target.slot >= 0) rebuild_rows(params, head, target, v0, start);
    }
  }
}

__device__ void commit_window(const Params& params, int64_t layer, int64_t request, int block,
                              const CommitTarget (&targets)[2]) {
  const auto& windows = params.first.windows;
  const int64_t channels = windows.shape[3];
  const bf16_t* const from = windows.data + layer * params.windows_layer;
  bf16_t* const pool = params.first.window_pool.data + layer * params.window_pool_layer;
  for (int step = 0; step < kWindowElements / kThreads; ++step) {
    const int64_t channel =
        int64_t{block} * kWindowElements + step * kThreads + static_cast<int>(threadIdx.x);
    if (channel >= channels) return;
#pragma unroll
    for (const CommitTarget& target : targets) {
      if (target.slot < 0) continue;
#pragma unroll
      for (int row = 0; row < kConvHistory; ++row) {
        pool[target.slot * params.first.window_pool.slot_stride +
             row * params.first.window_pool.row_stride +
             channel * params.first.window_pool.channel_stride] =
            from[request * windows.stride[0] + target.node * windows.stride[1] +
                 row * windows.stride[2] + channel];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) commit(const __grid_constant__ Params params) {
  if (params.refused != nullptr && *params.refused != 0) return;
  const auto state_blocks = static_cast<uint32_t>(params.heads * params.slices);
  const uint32_t per_request = state_blocks + static_cast<uint32_t>(params.window_blocks);
  const uint32_t piece = blockIdx.x % per_request;
  const uint32_t item = blockIdx.x / per_request;
  const auto requests = static_cast<uint32_t>(params.requests);
  const int64_t layer = item / requests, request = item % requests;
  const CommitTarget targets[2] = {params.lists.target(request, 0),
                                   params.lists.target(request, 1)};
  if (targets[0].slot < 0 && targets[1].slot < 0) return;
  if (piece >= state_blocks) {
    commit_window(params, layer, request, static_cast<int>(piece - state_blocks), targets);
    return;
  }
  Head head{request, static_cast<int>(piece) / params.slices,
            params.first.kept.data + layer * params.scratch_layer, params.first.states};
  const int64_t state_bytes = head.states.is_bf16 ? 2 : 4;
  head.states.data =
      static_cast<char*>(head.states.data) + layer * params.state_layer * state_bytes;
  const int v_begin = static_cast<int>(piece) % params.slices * kBlockRows;
  const int v_end = min(v_begin + kBlockRows, params.head_dim_v);
  if (params.copies_states) {
#pragma unroll
    for (const CommitTarget& target : targets) {
      if (target.slot >= 0) copy_rows(params, head, target, v_begin, v_end);
    }
  } else {
    commit_records(params, head, targets, v_begin, v_end);
  }
}

struct CheckParams {
  CommitLists lists;
  int64_t requests;
  bool has_in_slot;
  int32_t* refused;
  int32_t* report;  // may be null
};

constexpr int kCheckThreads = 256;

// Judges the contents as find_commit_fault() of the host does; one block.
__global__ void __launch_bounds__(kCheckThreads, 1)
    check(const __grid_constant__ CheckParams params) {
  __shared__ unsigned long long first;
  constexpr unsigned long long kNothing = ~0ull;
  if (threadIdx.x == 0) first = kNothing;
  __syncthreads();
  const CommitLists& lists = params.lists;
  const auto report = [&](KdaFault fault, int64_t entry) {
    atomicMin(&first, cuda::finding(fault, entry));
  };
  const auto list = [&](int which) { return which == 0 ? lists.slot : lists.track_slot; };
  const auto counts = [&](int which) { return which == 0 ? lists.accepted : lists.track_accepted; };
  // The slot that entry r of a list commits to; -1: none.
  const auto active = [&](int which, int64_t r) {
    const int32_t* const slots = list(which);
    const int32_t count = counts(which)[r];
    const bool commits = count >= 1 && count <= lists.rows_per_request;
    return commits && slots[r] >= 0 && slots[r] < lists.slots ? slots[r] : -1;
  };
  for (int64_t r = threadIdx.x; r < params.requests; r += kCheckThreads) {
    if (params.has_in_slot && lists.in_slot[r] >= lists.slots) report(KdaFault::kInSlot, r);
    for (int which = 0; which < 2; ++which) {
      if (list(which) == nullptr) continue;
      // All of `slot` stands before the track slots.
      const int64_t at = which * params.requests + r;
      if (list(which)[r] >= lists.slots) report(KdaFault::kOutSlot, at);
      const int32_t count = counts(which)[r];
      if (count < 0 || count > lists.rows_per_request) report(KdaFault::kAccepted, r);
      const int32_t slot = active(which, r);
      if (slot < 0) continue;
      for (int other = 0; other <= which; ++other) {
        const int64_t end = other < which ? params.requests : r;
        for (int64_t earlier = 0; earlier < end; ++earlier) {
          if (active(other, earlier) == slot) report(KdaFault::kDuplicateOutSlot, at);
        }
      }
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool found = first != kNothing;
  *params.refused = found;
  if (params.report == nullptr) return;
  params.report[0] = found ? static_cast<int32_t>(first >> 32) : 0;
  params.report[1] =
      found ? static_cast<int32_t>((first & 0xFFFFFFFF) % static_cast<uint32_t>(params.requests))
            : -1;
}

bool is_aligned(const ConstTensorView& view, uintptr_t bytes) {
  bool result = cuda::is_aligned(view.data, bytes);
  for (int axis = 0; axis + 1 < view.rank; ++axis) {
    result = result && view.stride[static_cast<size_t>(axis)] % 4 == 0;
  }
  return result;
}

int64_t slices_of(const KdaCommitProblem& problem) {
  return (problem.head_dim_v + kBlockRows - 1) / kBlockRows;
}

}  // namespace

Refusal kda_commit_cuda_supports(const KdaCommitProblem& problem) {
  // The windows of a request have fewer blocks than 2^20: 2^31 channels of 1024 each.
  const double blocks =
      static_cast<double>(std::max<int64_t>(problem.num_layers, 1)) *
      static_cast<double>(problem.max_requests) *
      (static_cast<double>(problem.num_value_heads) * static_cast<double>(slices_of(problem)) + 64);
  if (blocks <= std::numeric_limits<int32_t>::max()) return {};
  return "takes at most 2^31 - 1 blocks of layers, requests and value heads, got bounds of " +
         std::to_string(static_cast<int64_t>(std::min(blocks, 0x1p62)));
}

size_t kda_commit_cuda_workspace(const KdaCommitProblem& problem, const Device&) {
  return problem.check ? 64 : 0;
}

void kda_commit_cuda_portable(const KdaCommitProblem& problem, const Device& device,
                              const KdaCommitTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  Params params(problem, tensors);
  params.requests = tensors.accepted.shape[0];
  if (problem.check) {
    auto* const refused = static_cast<int32_t*>(workspace.data);
    const CheckParams contents{params.lists, params.requests, tensors.in_slot.defined(), refused,
                               static_cast<int32_t*>(tensors.report.data)};
    cuda::launch(kOp, check, {dim3(1), dim3(kCheckThreads)}, stream, contents);
    params.refused = refused;
  }
  if (params.requests == 0) return;
  if (problem.num_layers > 0) {
    params.scratch_layer = tensors.scratch.stride[0];
    params.state_layer = tensors.state.stride[0];
    params.windows_layer = tensors.window_scratch.stride[0];
    params.window_pool_layer = tensors.window_state.stride[0];
  }
  params.heads = static_cast<int>(problem.num_value_heads);
  params.head_dim_k = static_cast<int>(problem.head_dim_k);
  params.head_dim_v = static_cast<int>(problem.head_dim_v);
  params.slices = static_cast<int>(slices_of(problem));
  params.copies_states = problem.mode == VerifyMode::kStates;
  params.aligned = problem.head_dim_k % 4 == 0 && is_aligned(tensors.scratch, 16) &&
                   is_aligned(tensors.state, problem.state_dtype == DType::kF32 ? 16 : 8);
  if (tensors.window_scratch.defined()) {
    const int64_t channels = params.first.windows.shape[3];
    params.window_blocks = static_cast<int>((channels + kWindowElements - 1) / kWindowElements);
  }
  const int64_t per_request = int64_t{params.heads} * params.slices + params.window_blocks;
  const int64_t blocks = std::max<int64_t>(problem.num_layers, 1) * params.requests * per_request;
  cuda::launch(kOp, commit,
               {dim3(static_cast<unsigned>(checked_cast<int32_t>(blocks))), dim3(kThreads)}, stream,
               params);
}

}  // namespace fovea::internal
