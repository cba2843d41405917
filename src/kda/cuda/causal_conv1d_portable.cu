#include <algorithm>
#include <limits>

#include "src/core/cuda/launch.cuh"
#include "src/kda/causal_conv1d_impl.h"
#include "src/kda/cuda/kda_sequences.cuh"

// A thread owns one channel, so that neighbouring threads read neighbouring inputs, and walks some
// rows of it with the last three inputs in registers. Windows are stored by launches of their own,
// after everything that reads the old ones.
namespace fovea::internal {
namespace {

using cuda::SequenceTable;

constexpr char kOp[] = "causal_conv1d";
constexpr int kThreads = 256;
constexpr int kRowsPerThread = 16;  // of a prefill: three more are read

struct Params {
  Accessor<const bf16_t, 2> x;
  Accessor<bf16_t, 2> out;
  const void* weight;
  int64_t weight_stride;
  const void* bias;  // may be null
  bool weight_is_bf16, bias_is_bf16;
  bool silu;
  WindowPool<bf16_t> pool;
  StateRoutes routes;
  const int32_t* refused;  // null without `check`
  SequenceTable table;     // prefill
  int64_t num_sequences;
  cuda::SnapshotList snapshots;
  const int32_t* parent;  // verify
  Accessor<bf16_t, 4> window_scratch;
  int draft_rows;
  uint32_t channel_blocks;

  __device__ bool is_refused() const { return refused != nullptr && *refused != 0; }
};

// The channel of a thread and the piece (rows, a sequence, ...) of its block.
struct Place {
  int64_t piece;
  int64_t channel;

  __device__ explicit Place(const Params& params)
      : piece(blockIdx.x / params.channel_blocks),
        channel(int64_t{blockIdx.x % params.channel_blocks} * kThreads +
                static_cast<int>(threadIdx.x)) {}
};

__device__ inline float load_float(const void* data, bool is_bf16, int64_t at) {
  return is_bf16 ? bf16_to_float(static_cast<const bf16_t*>(data)[at])
                 : static_cast<const float*>(data)[at];
}

struct Taps {
  float weight[kConvWidth];
  float bias;

  __device__ Taps(const Params& params, int64_t channel) {
#pragma unroll
    for (int w = 0; w < kConvWidth; ++w) {
      weight[w] =
          load_float(params.weight, params.weight_is_bf16, channel * params.weight_stride + w);
    }
    bias = params.bias != nullptr ? load_float(params.bias, params.bias_is_bf16, channel) : 0.0f;
  }
};

// The last three inputs of a channel, as stored.
struct History {
  bf16_t rows[kConvHistory];

  __device__ void clear() {
#pragma unroll
    for (bf16_t& row : rows) row = bf16_t{0};
  }
  // The window of a slot; zeros for -1.
  __device__ void load(const Params& params, int64_t slot, int64_t channel) {
    clear();
    if (slot < 0) return;
#pragma unroll
    for (int row = 0; row < kConvHistory; ++row) rows[row] = *params.pool.at(slot, row, channel);
  }
  __device__ void store(const Params& params, int64_t slot, int64_t channel) const {
#pragma unroll
    for (int row = 0; row < kConvHistory; ++row) *params.pool.at(slot, row, channel) = rows[row];
  }
  __device__ void push(bf16_t input) {
    rows[0] = rows[1];
    rows[1] = rows[2];
    rows[2] = input;
  }
};

__device__ inline bf16_t convolve(const Params& params, const Taps& taps, const History& before,
                                  bf16_t input) {
  float y = taps.bias;
#pragma unroll
  for (int w = 0; w < kConvHistory; ++w) {
    y = fmaf(taps.weight[w], bf16_to_float(before.rows[w]), y);
  }
  y = fmaf(taps.weight[kConvHistory], bf16_to_float(input), y);
  if (params.silu) y = y / (1.0f + expf(-y));
  return bf16_from_float(y);
}

// The history of a sequence in front of its row `position`.
__device__ History history_at(const Params& params, int64_t n, int64_t begin, int64_t position,
                              int64_t channel) {
  History history;
  history.clear();
  if (position < kConvHistory) history.load(params, params.routes.start(n), channel);
  for (int64_t row = position > kConvHistory ? position - kConvHistory : 0; row < position; ++row) {
    history.push(params.x(begin + row, channel));
  }
  return history;
}

__global__ void __launch_bounds__(kThreads) prefill(const __grid_constant__ Params params) {
  if (params.is_refused()) return;
  const Place place(params);
  if (place.channel >= params.x.shape[1]) return;
  const int64_t first = place.piece * kRowsPerThread;
  const int64_t last = min(first + kRowsPerThread, params.x.shape[0]);
  const int64_t* const offsets = params.table.offsets;
  // The last sequence that begins at or before the first row.
  int64_t n = 0, above = params.num_sequences;
  while (above - n > 1) {
    const int64_t middle = (n + above) / 2;
    if (offsets[middle] <= first)
      n = middle;
    else
      above = middle;
  }
  const Taps taps(params, place.channel);
  History history;
  int64_t row = max(first, offsets[n]);
  bool fresh = true;
  while (n < params.num_sequences && row < last) {
    if (row >= offsets[n + 1]) {
      ++n;
      if (n < params.num_sequences) row = max(row, offsets[n]);
      fresh = true;
      continue;
    }
    if (fresh) {
      history = history_at(params, n, offsets[n], row - offsets[n], place.channel);
      fresh = false;
    }
    const bf16_t input = params.x(row, place.channel);
    params.out(row, place.channel) = convolve(params, taps, history, input);
    history.push(input);
    ++row;
  }
}

__global__ void __launch_bounds__(kThreads) store_snapshots(const __grid_constant__ Params params) {
  if (params.is_refused()) return;
  const Place place(params);
  if (place.channel >= params.x.shape[1]) return;
  const int64_t n = params.snapshots.sequence[place.piece];
  const int64_t slot = params.snapshots.slot[place.piece];
  if (n < 0 || n >= params.num_sequences || !params.pool.contains(slot)) return;
  const int64_t begin = params.table.offsets[n];
  const int64_t position = params.snapshots.position[place.piece];
  if (position < 0 || position > params.table.offsets[n + 1] - begin) return;
  history_at(params, n, begin, position, place.channel).store(params, slot, place.channel);
}

__global__ void __launch_bounds__(kThreads) store_ends(const __grid_constant__ Params params) {
  if (params.is_refused()) return;
  const Place place(params);
  if (place.channel >= params.x.shape[1]) return;
  const int64_t n = place.piece, slot = params.routes.finish(n);
  const int64_t begin = params.table.offsets[n];
  const int64_t length = params.table.offsets[n + 1] - begin;
  if (slot < 0 || (length == 0 && params.routes.in_place(n))) return;
  history_at(params, n, begin, length, place.channel).store(params, slot, place.channel);
}

__global__ void __launch_bounds__(kThreads) update(const __grid_constant__ Params params) {
  if (params.is_refused()) return;
  const Place place(params);
  if (place.channel >= params.x.shape[1]) return;
  const int64_t t = place.piece;
  if (params.routes.is_padding(t)) {
    params.out(t, place.channel) = bf16_t{0};
    return;
  }
  History history;
  history.load(params, params.routes.start(t), place.channel);
  const bf16_t input = params.x(t, place.channel);
  params.out(t, place.channel) = convolve(params, Taps(params, place.channel), history, input);
  history.push(input);
  const int64_t slot = params.routes.finish(t);
  if (slot >= 0) history.store(params, slot, place.channel);
}

__global__ void __launch_bounds__(kThreads) verify(const __grid_constant__ Params params) {
  if (params.is_refused()) return;
  const Place place(params);
  const int64_t channel = place.channel;
  if (channel >= params.x.shape[1]) return;
  const int64_t r = place.piece;
  const bool padding = params.routes.is_padding(r);
  const Taps taps(params, channel);
  History committed;
  committed.load(params, padding ? -1 : params.routes.start(r), channel);
  for (int64_t t = 0; t < params.draft_rows; ++t) {
    const int64_t row = r * params.draft_rows + t;
    History history = committed;
    if (padding) {
      params.out(row, channel) = bf16_t{0};
    } else {
      // The path back to the committed state, its row furthest from t first.
      int64_t path[kConvHistory] = {-1, -1, -1};
      int64_t node = t;
#pragma unroll
      for (int i = 0; i < kConvHistory; ++i) {
        node = node >= 0 ? parent_row(params.parent, node) : -1;
        path[i] = node;
      }
#pragma unroll
      for (int i = kConvHistory - 1; i >= 0; --i) {
        if (path[i] >= 0) history.push(params.x(r * params.draft_rows + path[i], channel));
      }
      const bf16_t input = params.x(row, channel);
      params.out(row, channel) = convolve(params, taps, history, input);
      history.push(input);
    }
    if (!params.window_scratch) continue;
#pragma unroll
    for (int i = 0; i < kConvHistory; ++i) {
      params.window_scratch(r, t, i, channel) = padding ? bf16_t{0} : history.rows[i];
    }
  }
}

struct ConvScratch {
  int32_t* refused;
  SequenceTable table;

  ConvScratch(const CausalConv1dProblem& problem, WorkspaceCutter& cutter)
      : refused(cutter.take<int32_t>(1)) {
    if (problem.mode == ConvMode::kPrefill) table = SequenceTable(cutter, problem.max_sequences);
  }
};

const int32_t* list(const ConstTensorView& tensor) {
  return static_cast<const int32_t*>(tensor.data);
}

void launch_check(const CausalConv1dProblem& problem, const CausalConv1dTensors& tensors,
                  const Params& params, int64_t entries, int32_t* refused, Stream stream) {
  cuda::CheckParams contents{};
  if (problem.mode == ConvMode::kPrefill) {
    contents.offsets = PackedOffsets(tensors.q_indptr, params.x.shape[0]);
    contents.in_slot = list(tensors.in_slot);
  }
  contents.out_slot = list(tensors.slot.defined() ? tensors.slot : tensors.out_slot);
  contents.num_entries = entries;
  contents.slots = params.pool.num_slots;
  contents.snapshots = params.snapshots;
  contents.interval = 1;
  contents.out_slots_are_read = problem.mode == ConvMode::kVerify;
  contents.refused = refused;
  contents.report = static_cast<int32_t*>(tensors.report.data);
  cuda::launch(kOp, cuda::check_contents, {dim3(1), dim3(cuda::kSequenceThreads)}, stream,
               contents);
}

void launch_prefill(const CausalConv1dTensors& tensors, const Params& params, Stream stream) {
  const cuda::SequenceParams sequences{
      params.table, PackedOffsets(tensors.q_indptr, params.x.shape[0]), params.snapshots, 64};
  cuda::launch(kOp, cuda::fill_sequences, {dim3(1), dim3(cuda::kSequenceThreads)}, stream,
               sequences);
  if (params.num_sequences == 0) return;
  const auto shape = [&](int64_t pieces) {
    return cuda::LaunchShape{dim3(static_cast<unsigned>(pieces * params.channel_blocks)),
                             dim3(kThreads)};
  };
  cuda::launch(kOp, prefill, shape((params.x.shape[0] + kRowsPerThread - 1) / kRowsPerThread),
               stream, params);
  if (!tensors.window_state.defined()) return;
  cuda::launch(kOp, store_snapshots, shape(params.snapshots.count), stream, params);
  cuda::launch(kOp, store_ends, shape(params.num_sequences), stream, params);
}

}  // namespace

Refusal causal_conv1d_cuda_supports(const CausalConv1dProblem& problem) {
  const int64_t pieces =
      std::max({problem.max_rows, problem.max_sequences, problem.max_snapshots, int64_t{1}});
  const double blocks = static_cast<double>(pieces) *
                        static_cast<double>((problem.num_channels + kThreads - 1) / kThreads);
  if (blocks <= std::numeric_limits<int32_t>::max()) return {};
  return "takes at most 2^31 - 1 blocks of rows and channels, got bounds of " +
         std::to_string(static_cast<int64_t>(std::min(blocks, 0x1p62)));
}

size_t causal_conv1d_cuda_workspace(const CausalConv1dProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  ConvScratch(problem, cutter);
  return cutter.used_bytes();
}

void causal_conv1d_cuda_portable(const CausalConv1dProblem& problem, const Device& device,
                                 const CausalConv1dTensors& tensors, Workspace workspace,
                                 Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  const ConvScratch scratch(problem, cutter);
  Params params{};
  params.x = access<const bf16_t, 2>(tensors.x);
  params.out = access<bf16_t, 2>(tensors.out);
  params.weight = tensors.weight.data;
  params.weight_stride = tensors.weight.stride[0];
  params.bias = tensors.bias.data;
  params.weight_is_bf16 = problem.weight_dtype == DType::kBf16;
  params.bias_is_bf16 = problem.bias_dtype == DType::kBf16;
  params.silu = problem.activation == ConvActivation::kSilu;
  params.pool = window_pool<bf16_t>(tensors.window_state, problem.window_layout);
  params.routes = conv_routes(tensors);
  params.table = scratch.table;
  params.table.refused = nullptr;
  params.channel_blocks = static_cast<uint32_t>((problem.num_channels + kThreads - 1) / kThreads);
  params.parent = list(tensors.parent);
  params.draft_rows = static_cast<int>(problem.rows_per_request);
  int64_t entries = params.x.shape[0];
  if (problem.mode == ConvMode::kPrefill) {
    entries = params.num_sequences = tensors.q_indptr.shape[0] - 1;
    params.snapshots = {list(tensors.snapshot_seq), list(tensors.snapshot_pos),
                        list(tensors.snapshot_slot),
                        tensors.snapshot_seq.defined() ? tensors.snapshot_seq.shape[0] : 0};
  } else if (problem.mode == ConvMode::kVerify) {
    entries /= problem.rows_per_request;
    params.window_scratch = access<bf16_t, 4>(tensors.window_scratch);
  }
  if (problem.check) {
    launch_check(problem, tensors, params, entries, scratch.refused, stream);
    params.refused = scratch.refused;
  }
  if (problem.mode == ConvMode::kPrefill) return launch_prefill(tensors, params, stream);
  const cuda::LaunchShape shape{dim3(static_cast<unsigned>(entries * params.channel_blocks)),
                                dim3(kThreads)};
  cuda::launch(kOp, problem.mode == ConvMode::kUpdate ? update : verify, shape, stream, params);
}

}  // namespace fovea::internal
