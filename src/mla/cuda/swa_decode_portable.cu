#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/mla/sparse_mla_impl.h"
#include "src/mla/swa_decode_impl.h"

// A first launch narrows lists of 64 bits; the attention is that of sparse_mla.
namespace fovea::internal {
namespace {

constexpr int kThreads = 256;

struct Params {
  const int64_t* indices;  // null: not of 64 bits
  int64_t index_stride;
  const int64_t* lens;  // likewise
  int64_t num_rows;
  int64_t columns;
  SwaMemory memory;
};

__global__ void __launch_bounds__(kThreads) narrow(const __grid_constant__ Params params) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (params.lens != nullptr && i < params.num_rows) {
    params.memory.lens[i] = narrow_length(params.lens[i]);
  }
  if (params.indices == nullptr || i >= params.num_rows * params.columns) return;
  const int64_t t = i / params.columns;
  params.memory.indices[i] =
      narrow_index(params.indices[t * params.index_stride + (i - t * params.columns)]);
}

using SparseLaunch = void (*)(const SparseMlaProblem&, const Device&, const SparseMlaTensors&,
                              Workspace, Stream);

void launch_by(SparseLaunch attend, const SwaDecodeProblem& problem, const Device& device,
               const SwaDecodeTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  const SwaMemory memory(problem, cutter);
  const ConstTensorView indices = swa_index_rows(tensors);
  Params params{nullptr, 0, nullptr, tensors.q.shape[0], swa_columns(problem), memory};
  if (indices.dtype == DType::kI64) {
    params.indices = static_cast<const int64_t*>(indices.data);
    params.index_stride = indices.stride[0];
  }
  if (tensors.swa_lens.dtype == DType::kI64) {
    params.lens = static_cast<const int64_t*>(tensors.swa_lens.data);
  }
  if (params.indices != nullptr || params.lens != nullptr) {
    cuda::launch(
        "swa_decode", narrow,
        {dim3(cuda::grid_blocks(params.num_rows * params.columns, kThreads)), dim3(kThreads)},
        stream, params);
  }
  attend(swa_sparse_problem(problem), device, swa_sparse_tensors(problem, tensors, memory),
         behind_swa_memory(problem, workspace), stream);
}

}  // namespace

Refusal swa_decode_cuda_supports(const SwaDecodeProblem& problem) {
  return sparse_mla_cuda_supports(swa_sparse_problem(problem));
}

size_t swa_decode_cuda_workspace(const SwaDecodeProblem& problem, const Device& device) {
  return swa_memory_bytes(problem) + sparse_mla_cuda_workspace(swa_sparse_problem(problem), device);
}
size_t swa_decode_cuda_sm90_workspace(const SwaDecodeProblem& problem, const Device& device) {
  return swa_memory_bytes(problem) +
         sparse_mla_cuda_sm90_workspace(swa_sparse_problem(problem), device);
}

void swa_decode_cuda_portable(const SwaDecodeProblem& problem, const Device& device,
                              const SwaDecodeTensors& tensors, Workspace workspace, Stream stream) {
  launch_by(sparse_mla_cuda_portable, problem, device, tensors, workspace, stream);
}
void swa_decode_cuda_sm90(const SwaDecodeProblem& problem, const Device& device,
                          const SwaDecodeTensors& tensors, Workspace workspace, Stream stream) {
  const bool is_short = sparse_mla_cuda_sm90_window_takes(swa_sparse_problem(problem));
  launch_by(is_short ? sparse_mla_cuda_sm90_window : sparse_mla_cuda_sm90, problem, device, tensors,
            workspace, stream);
}

}  // namespace fovea::internal
