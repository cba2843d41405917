#include <algorithm>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/mla/cuda/sparse_mla_rows_sm90/kernel.cuh"
#include "src/mla/cuda/sparse_mla_rows_sm90/order.cuh"
#include "src/mla/sparse_mla_impl.h"

namespace fovea::internal {
namespace {

using namespace sparse_rows_sm90;

// Whether lists are ordered where the cache is large. It pays from a few rounds of blocks on, and
// is the same for all batches of a plan.
bool may_order(const SparseMlaProblem& problem) {
  constexpr int64_t kMinUnits = 512;
  const int64_t groups = (problem.num_heads + kHeads - 1) / kHeads;
  return problem.topk >= kMinOrderedSlots && problem.topk <= kMaxOrderedSlots &&
         problem.max_rows >= (kMinUnits + groups - 1) / groups;
}

int32_t* ordered_lists(const SparseMlaProblem& problem, WorkspaceCutter& cutter) {
  return cutter.take<int32_t>(may_order(problem) ? problem.max_rows * problem.topk : 0);
}

}  // namespace

size_t sparse_mla_cuda_sm90_rows_workspace(const SparseMlaProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  ordered_lists(problem, cutter);
  return cutter.used_bytes();
}

void sparse_mla_cuda_sm90_rows(const SparseMlaProblem& problem, const Device& device,
                               const SparseMlaTensors& tensors, Workspace workspace,
                               Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  Params params(latent::row_params(problem, tensors, 1, kHeads, cutter));
  SparseMlaSegment& lists = params.segments[0];
  const int64_t num_rows = tensors.q.shape[0];
  if (may_order(problem) && lists.num_pages * lists.page_size > kUnorderedKeys) {
    const Accessor<int32_t, 2> ordered{
        ordered_lists(problem, cutter), {num_rows, problem.topk}, {problem.topk, 1}};
    cuda::launch("sparse_mla", order_lists,
                 {dim3(static_cast<unsigned>(num_rows)), dim3(kOrderThreads)}, stream,
                 ListOrder{lists, ordered});
    lists.indices = {ordered.data, ordered.shape, ordered.stride};
  }
  params.num_units = num_rows * params.head_groups;
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
