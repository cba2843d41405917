#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/request_offsets.cuh"
#include "src/core/workspace.h"
#include "src/mla/swa_indices_impl.h"

// A warp takes a row, its lanes the columns.
namespace fovea::internal {
namespace {

using cuda::kWarpThreads;

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarpThreads;

struct Params {
  WindowTable table;
  const int32_t* row_offsets;  // [R+1], cut to the rows and never falling
  int64_t num_requests;
  int64_t width;
  Accessor<int32_t, 2> indices;
  Accessor<int32_t, 1> row_len;
};

__global__ void __launch_bounds__(kThreads) build(const __grid_constant__ Params params) {
  const WindowTable& table = params.table;
  const int64_t t = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpThreads;
  if (t >= params.indices.shape[0]) return;
  const auto begin_of = [&](int64_t r) { return int64_t{params.row_offsets[r]}; };
  const int64_t r = cuda::count_up_to(begin_of, params.num_requests, t) - 1;
  int64_t p = -1;
  if (r >= 0 && t < begin_of(r + 1)) {
    p = table.position(r, t - begin_of(r), begin_of(r + 1) - begin_of(r), t);
  }
  const int64_t first = table.first_token(p);
  const int64_t count = p + 1 - first;
  const int lane = threadIdx.x % kWarpThreads;
  if (lane == 0) params.row_len(t) = static_cast<int32_t>(count);
  for (int64_t column = lane; column < params.width; column += kWarpThreads) {
    params.indices(t, column) = column < count ? table.slot(r, first + column) : -1;
  }
}

}  // namespace

size_t swa_indices_cuda_workspace(const SwaIndicesProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<int32_t>(problem.max_requests + 1);
  return cutter.used_bytes();
}

void swa_indices_cuda_portable(const SwaIndicesProblem& problem, const Device& device,
                               const SwaIndicesTensors& tensors, Workspace workspace,
                               Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  auto* const row_offsets = WorkspaceCutter(workspace).take<int32_t>(problem.max_requests + 1);
  const Params params{WindowTable(problem, tensors),
                      row_offsets,
                      tensors.kv_len.shape[0],
                      problem.width,
                      access<int32_t, 2>(tensors.indices),
                      access<int32_t, 1>(tensors.row_len)};
  const OffsetParams offsets{{static_cast<const int32_t*>(tensors.q_indptr.data)},
                             {row_offsets},
                             {params.indices.shape[0]},
                             params.num_requests + 1};
  cuda::launch("build_swa_indices", clean_offsets<kOffsetThreads>, {dim3(1), dim3(kOffsetThreads)},
               stream, offsets);
  cuda::launch("build_swa_indices", build,
               {dim3(cuda::grid_blocks(params.indices.shape[0], kRowsPerBlock)), dim3(kThreads)},
               stream, params);
}

}  // namespace fovea::internal
