#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/serving/v4_rows.h"
#include "src/serving/v4_rows_impl.h"

namespace fovea::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 16;
constexpr int kTile = kThreads * kElementsPerThread;

__device__ int64_t thread_index() {
  return int64_t{blockIdx.x} * kThreads + static_cast<int>(threadIdx.x);
}

__global__ void __launch_bounds__(kThreads)
    fill_row_facts_kernel(const __grid_constant__ RowFactsView view) {
  const int64_t t = thread_index();
  if (t < view.positions.shape[0]) view.fill(t);
}

struct CopyParams {
  StateCopyView view;
  int64_t tiles;  // of a state
};

// One block a tile of a state.
__global__ void __launch_bounds__(kThreads)
    copy_states_kernel(const __grid_constant__ CopyParams params) {
  const StateCopyView& view = params.view;
  const int64_t r = blockIdx.x / params.tiles;
  if (!view.moves(r)) return;
  const float* const from = view.source + view.from(r) * view.source_stride;
  float* const to = view.target + view.to(r) * view.target_stride;
  const int64_t begin = (blockIdx.x - r * params.tiles) * kTile;
#pragma unroll
  for (int step = 0; step < kElementsPerThread; ++step) {
    const int64_t i = begin + step * kThreads + static_cast<int>(threadIdx.x);
    if (i < view.elements) to[i] = from[i];
  }
}

struct SnapshotParams {
  SnapshotView view;
};

// One block a token of a snapshot.
__global__ void __launch_bounds__(kThreads)
    snapshot_states_kernel(const __grid_constant__ SnapshotParams params) {
  const SnapshotView& view = params.view;
  const int64_t ring = view.state.shape[1];
  const int64_t m = blockIdx.x / ring;
  const SnapshotToken token = view.token(m, blockIdx.x - m * ring);
  if (!token.exists()) return;
  const auto channels = static_cast<int>(view.ape.shape[1]);
  for (int i = static_cast<int>(threadIdx.x); i < channels; i += kThreads) {
    token.to[i] = token.values[i];
    token.to[channels + i] = token.logit(i, channels);
  }
}

__global__ void __launch_bounds__(kThreads)
    keep_accepted_kernel(const __grid_constant__ KeptRowsView view) {
  const int64_t t = thread_index();
  if (t < view.kept.shape[0]) view.kept(t) = view.request(t);
}

struct OwnSlotParams {
  Accessor<const int32_t, 1> slot;
  Accessor<int32_t, 1> own;
};

__global__ void __launch_bounds__(kThreads)
    own_slots_kernel(const __grid_constant__ OwnSlotParams params) {
  const int64_t r = thread_index();
  if (r >= params.own.shape[0]) return;
  params.own(r) = params.slot(r) < 0 ? -1 : static_cast<int32_t>(r);
}

cuda::LaunchShape one_thread_each(int64_t count) {
  return {dim3(cuda::grid_blocks(count, kThreads)), dim3(kThreads)};
}

}  // namespace

void fill_row_facts_cuda_portable(const V4RowFacts& facts, const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const RowFactsView view(facts);
  cuda::launch("v4_row_facts", fill_row_facts_kernel, one_thread_each(view.positions.shape[0]),
               stream, view);
}

void copy_states_cuda_portable(const StateCopy& copy, const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  CopyParams params{};
  params.view = StateCopyView(copy);
  params.tiles = (params.view.elements + kTile - 1) / kTile;
  cuda::launch("v4_copy_states", copy_states_kernel,
               {dim3(cuda::grid_blocks(params.view.to.shape[0] * params.tiles, 1)), dim3(kThreads)},
               stream, params);
}

void snapshot_states_cuda_portable(const StateSnapshots& snapshots, const Device& device,
                                   Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  SnapshotParams params{};
  params.view = SnapshotView(snapshots);
  const int64_t tokens = params.view.seq.shape[0] * params.view.state.shape[1];
  cuda::launch("v4_snapshot_states", snapshot_states_kernel,
               {dim3(cuda::grid_blocks(tokens, 1)), dim3(kThreads)}, stream, params);
}

void keep_accepted_cuda_portable(const AcceptedRows& rows, const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const KeptRowsView view(rows);
  cuda::launch("v4_keep_accepted", keep_accepted_kernel, one_thread_each(view.kept.shape[0]),
               stream, view);
}

void own_slots_cuda_portable(const ConstTensorView& slot, const TensorView& own,
                             const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  OwnSlotParams params{};
  params.slot = access<const int32_t, 1>(slot);
  params.own = access<int32_t, 1>(own);
  cuda::launch("v4_own_slots", own_slots_kernel, one_thread_each(own.shape[0]), stream, params);
}

}  // namespace fovea::internal
