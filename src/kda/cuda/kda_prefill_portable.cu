#include <algorithm>
#include <limits>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/kda/cuda/kda_chain.cuh"
#include "src/kda/cuda/kda_prepare.cuh"
#include "src/kda/cuda/kda_recurrence.cuh"
#include "src/kda/cuda/kda_sequences.cuh"
#include "src/kda/cuda/kda_states.cuh"
#include "src/kda/kda_prefill_impl.h"

// Launches of a prefill: the table of sequences (with `check` the judgement before it), all tiles
// in parallel, the chain over tiles, and with a staged commit the copy into the pool.
namespace fovea::internal {
namespace {

using cuda::ChainParams;
using cuda::kTileRows;
using cuda::PrepareParams;
using cuda::SequenceParams;
using cuda::SequenceTable;
using cuda::TileRecords;

constexpr char kOp[] = "kda_prefill";

// Whether the shape has tiles.
bool is_tiled(const KdaLayer& layer) {
  return (layer.head_dim_k == 64 || layer.head_dim_k == 128) && layer.head_dim_v % 16 == 0;
}

int64_t max_tiles(const KdaPrefillProblem& problem) {
  return problem.max_rows / kTileRows + problem.max_sequences;
}

// Columns of V of one block: those whose waves of blocks, times what a tile takes, are the least;
// of equals the most, because the blocks of one state repeat each other's work.
int slice_columns(const KdaPrefillProblem& problem, int64_t num_sequences, const Device& device) {
  if (problem.v_columns != 0) return static_cast<int>(problem.v_columns);
  const int64_t dim = problem.layer.head_dim_v;
  const int64_t sms = cuda::device_facts(device.ordinal).num_sms;
  int best = 16;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int columns : {16, 32, 64, 128}) {
    if (dim % columns != 0 || columns > problem.layer.head_dim_k) continue;
    const int64_t blocks = num_sequences * problem.layer.num_value_heads * (dim / columns);
    // Hundredths of a tile with fewer warps, whose number hardly matters below eight.
    const int64_t cost = (blocks + sms - 1) / sms * (columns == 128 ? 115 : 100);
    if (cost > least) continue;
    least = cost;
    best = columns;
  }
  return best;
}

struct Memory {
  SequenceTable table;
  TileRecords records;
  void* staging;

  Memory(WorkspaceCutter& cutter, const KdaPrefillProblem& problem)
      : table(cutter, problem.max_sequences),
        records(cutter,
                is_tiled(problem.layer) ? max_tiles(problem) * problem.layer.num_value_heads : 0,
                problem.layer.head_dim_k),
        staging(cutter.take<char>(kda_prefill_staging_bytes(problem))) {}
};

StateAccess staged_states(const KdaPrefillProblem& problem, void* staging, int64_t entries) {
  StateAccess access;
  if (problem.commit == CommitMode::kDirect) return access;
  const KdaLayer& layer = problem.layer;
  access.data = staging;
  access.is_bf16 = layer.state_dtype == DType::kBf16;
  access.entries = entries;
  access.k_stride = 1;
  access.v_stride = layer.head_dim_k;
  access.head_stride = layer.head_dim_v * layer.head_dim_k;
  access.entry_stride = layer.num_value_heads * access.head_stride;
  return access;
}

template <class T>
bool rows_start_at(const Accessor<T, 3>& rows, int64_t bytes) {
  const int64_t elements = bytes / static_cast<int64_t>(sizeof(T));
  return reinterpret_cast<uintptr_t>(rows.data) % static_cast<uintptr_t>(bytes) == 0 &&
         rows.stride[0] % elements == 0 && rows.stride[1] % elements == 0;
}

template <int kK, int kV>
void launch_chain(const ChainParams& params, Stream stream) {
  const int64_t blocks =
      params.num_sequences * params.input.value_heads * static_cast<int64_t>(params.slices);
  cuda::launch(kOp, cuda::chain_tiles<kK, kV>,
               {dim3(static_cast<unsigned>(blocks)), dim3(kV / 16 * cuda::kWarpThreads + kK),
                sizeof(cuda::ChainMemory<kK, kV>)},
               stream, params);
}

template <int kK>
void launch_tiles(const ChainParams& chain, int columns, int64_t tiles, Stream stream) {
  const PrepareParams prepare{chain.input, chain.table, chain.records, chain.num_sequences,
                              chain.pairs_aligned};
  cuda::launch(kOp, cuda::prepare_tiles<kK>,
               {dim3(static_cast<unsigned>(tiles * chain.input.value_heads)), dim3(kK / 2)}, stream,
               prepare);
  switch (columns) {
    case 128:
      if constexpr (kK == 128) return launch_chain<kK, 128>(chain, stream);
      [[fallthrough]];
    case 64:
      return launch_chain<kK, 64>(chain, stream);
    case 32:
      return launch_chain<kK, 32>(chain, stream);
    default:
      return launch_chain<kK, 16>(chain, stream);
  }
}

ChainParams make_params(const KdaPrefillProblem& problem, const KdaPrefillTensors& tensors,
                        const Memory& memory) {
  const int64_t num_snapshots = tensors.snapshot_seq.defined() ? tensors.snapshot_seq.shape[0] : 0;
  const int64_t num_sequences = tensors.q_indptr.shape[0] - 1;
  ChainParams params{};
  params.table = memory.table;
  params.records = memory.records;
  params.input = cuda::KdaInput(problem.layer, rows_of(tensors));
  params.out = access<bf16_t, 3>(tensors.out);
  params.num_sequences = num_sequences;
  params.pairs_aligned = rows_start_at(params.input.q, 4) && rows_start_at(params.input.k, 4);
  params.v_aligned = rows_start_at(params.input.v, 16);
  params.out_aligned = rows_start_at(params.out, 16);
  cuda::PrefillTargets& targets = params.targets;
  targets.states = StateAccess(tensors.state, problem.state_layout);
  targets.staged = staged_states(problem, memory.staging, num_sequences + num_snapshots);
  targets.chunk_states = StateAccess(tensors.chunk_states, problem.state_layout);
  targets.routes =
      StateRoutes(tensors.state, tensors.in_slot, tensors.out_slot, tensors.has_initial_state);
  targets.snapshots = {static_cast<const int32_t*>(tensors.snapshot_seq.data),
                       static_cast<const int32_t*>(tensors.snapshot_pos.data),
                       static_cast<const int32_t*>(tensors.snapshot_slot.data), num_snapshots};
  targets.interval = snapshot_interval(problem.chunk);
  targets.num_sequences = num_sequences;
  return params;
}

}  // namespace

Refusal kda_prefill_cuda_supports(const KdaPrefillProblem& problem) {
  const KdaLayer& layer = problem.layer;
  if (problem.v_columns != 0 && !is_tiled(layer)) {
    return "takes v_columns with head_dim_k 64 or 128 and head_dim_v a multiple of 16 only";
  }
  if (problem.v_columns > layer.head_dim_k) {
    return "takes v_columns = " + std::to_string(problem.v_columns) + " with head_dim_k 128 only";
  }
  const double groups = is_tiled(layer) ? static_cast<double>(max_tiles(problem)) : 0.0;
  const double blocks = std::max(groups, static_cast<double>(problem.max_sequences) *
                                             static_cast<double>((layer.head_dim_v + 15) / 16)) *
                        static_cast<double>(layer.num_value_heads);
  if (blocks > std::numeric_limits<int32_t>::max()) {
    return "takes at most 2^31 - 1 tiles of rows and value heads, got bounds of " +
           std::to_string(static_cast<int64_t>(std::min(blocks, 0x1p62)));
  }
  if (problem.commit == CommitMode::kStaged && layer.num_value_heads > 65535) {
    return "a staged commit takes at most 65535 value heads, got " +
           std::to_string(layer.num_value_heads);
  }
  return {};
}

size_t kda_prefill_cuda_workspace(const KdaPrefillProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  Memory(cutter, problem);
  return cutter.used_bytes();
}

void kda_prefill_cuda_portable(const KdaPrefillProblem& problem, const Device& device,
                               const KdaPrefillTensors& tensors, Workspace workspace,
                               Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  const Memory memory(cutter, problem);
  ChainParams params = make_params(problem, tensors, memory);
  const KdaLayer& layer = problem.layer;
  const int64_t num_rows = tensors.q.shape[0];
  const PackedOffsets offsets(tensors.q_indptr, num_rows);
  const cuda::PrefillTargets& targets = params.targets;
  const cuda::LaunchShape one_block{dim3(1), dim3(cuda::kSequenceThreads)};
  if (problem.check) {
    cuda::CheckParams check{};
    check.offsets = offsets;
    check.in_slot = targets.routes.in_slot;
    check.out_slot = targets.routes.out_slot;
    check.num_entries = params.num_sequences;
    check.slots = targets.routes.entries;
    check.snapshots = targets.snapshots;
    check.interval = targets.interval;
    check.refused = memory.table.refused;
    check.report = static_cast<int32_t*>(tensors.report.data);
    cuda::launch(kOp, cuda::check_contents, one_block, stream, check);
  } else {
    params.table.refused = nullptr;
  }
  if (params.num_sequences == 0) return;
  const SequenceParams sequences{params.table, offsets, targets.snapshots, targets.interval};
  cuda::launch(kOp, cuda::fill_sequences, one_block, stream, sequences);
  if (is_tiled(layer)) {
    const int columns = slice_columns(problem, params.num_sequences, device);
    params.slices = static_cast<int>(layer.head_dim_v) / columns;
    const int64_t tiles = num_rows / kTileRows + params.num_sequences;
    if (layer.head_dim_k == 128) {
      launch_tiles<128>(params, columns, tiles, stream);
    } else {
      launch_tiles<64>(params, columns, tiles, stream);
    }
  } else {
    constexpr int64_t kBlockRows = cuda::kRecurrenceWarps * cuda::kRecurrenceRows;
    params.slices = static_cast<int>((layer.head_dim_v + kBlockRows - 1) / kBlockRows);
    const cuda::RecurrenceParams recurrence{params, static_cast<int>(layer.head_dim_k),
                                            static_cast<int>(layer.head_dim_v)};
    const int64_t blocks = params.num_sequences * layer.num_value_heads * params.slices;
    cuda::launch(
        kOp, cuda::recur,
        {dim3(static_cast<unsigned>(blocks)), dim3(cuda::kRecurrenceWarps * cuda::kWarpThreads)},
        stream, recurrence);
  }
  if (problem.commit == CommitMode::kStaged) {
    const int64_t staged = params.num_sequences + targets.snapshots.count;
    begin_launch(kOp);
    const cuda::CommitParams commit{targets, params.table, layer.head_dim_v * layer.head_dim_k,
                                    static_cast<int>(layer.head_dim_k)};
    cuda::launch(kOp, cuda::commit_states,
                 {dim3(static_cast<unsigned>(staged), static_cast<unsigned>(layer.num_value_heads)),
                  dim3(cuda::kCommitThreads)},
                 stream, commit);
  }
}

}  // namespace fovea::internal
