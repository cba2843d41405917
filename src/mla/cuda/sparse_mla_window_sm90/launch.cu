#include <algorithm>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/mla/cuda/sparse_mla_window_sm90/kernel.cuh"
#include "src/mla/sparse_mla_impl.h"

namespace fovea::internal {

void sparse_mla_cuda_sm90_window(const SparseMlaProblem& problem, const Device& device,
                                 const SparseMlaTensors& tensors, Workspace workspace,
                                 Stream stream) {
  using namespace sparse_window_sm90;
  const cuda::DeviceScope scope(device.ordinal);
  const int64_t num_sms = cuda::device_facts(device.ordinal).num_sms;
  const int64_t groups = (problem.num_heads + kHeads - 1) / kHeads;
  WorkspaceCutter cutter(workspace);
  Params params(latent::row_params(problem, tensors, 1, kHeads, cutter));
  const int64_t primary = (problem.topk + kListStep - 1) / kListStep * kListStep;
  params.first_extra = static_cast<int>(problem.extra_topk > 0 ? primary : kKeys);
  // By the plan, not by the rows of this call, so that a row's bits depend on nothing else.
  const int64_t max_rows = std::min<int64_t>(problem.max_rows, num_sms + 1);
  const bool is_wide = groups > 1 && max_rows * groups > num_sms;
  const bool is_halved = !is_wide && max_rows * groups * 2 <= num_sms;
  const int64_t num_rows = tensors.q.shape[0];
  params.num_rows = static_cast<int>(num_rows);
  const int64_t blocks_of_row = is_wide ? (groups + 1) / 2 : is_halved ? 2 * groups : groups;
  const int64_t rows_at_a_time = std::min(num_rows, std::max<int64_t>(1, num_sms / blocks_of_row));
  params.rows_at_a_time = static_cast<int>(rows_at_a_time);
  cuda::LaunchShape shape{
      dim3(static_cast<unsigned>(blocks_of_row), static_cast<unsigned>(rows_at_a_time)),
      dim3(kThreads)};
  shape.shared_bytes = sizeof(SharedMemory);
  const auto kernel = is_wide ? attend_lists<4> : is_halved ? attend_lists<1> : attend_lists<2>;
  cuda::launch("sparse_mla", kernel, shape, stream, params);
}

}  // namespace fovea::internal
