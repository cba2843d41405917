#include <algorithm>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/mla/cuda/sparse_mla_rows_sm90/kernel.cuh"
#include "src/mla/sparse_mla_impl.h"

namespace fovea::internal {

void sparse_mla_cuda_sm90_rows(const SparseMlaProblem& problem, const Device& device,
                               const SparseMlaTensors& tensors, Workspace workspace,
                               Stream stream) {
  using namespace sparse_rows_sm90;
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  Params params(latent::row_params(problem, tensors, 1, kHeads, cutter));
  params.num_units = tensors.q.shape[0] * params.head_groups;
  params.num_blocks = static_cast<unsigned>(
      std::min<int64_t>(params.num_units, cuda::device_facts(device.ordinal).num_sms));
  cuda::LaunchShape shape{dim3(params.num_blocks), dim3(kThreads)};
  if (problem.head_dim_qk == 576) {
    shape.shared_bytes = sizeof(SharedMemory<576>);
    cuda::launch("sparse_mla", attend<576>, shape, stream, params);
  } else {
    shape.shared_bytes = sizeof(SharedMemory<512>);
    cuda::launch("sparse_mla", attend<512>, shape, stream, params);
  }
}

}  // namespace fovea::internal
