#include "src/batch/cuda/schedules.cuh"
#include "src/batch/paged_schedule_impl.h"
#include "src/batch/split_schedule_impl.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"

// Each schedule is the work of one block: a sum over the rows, then a search per entry.
namespace fovea::internal {
namespace {

constexpr int kThreads = cuda::kScheduleThreads;

__global__ void __launch_bounds__(kThreads)
    paged_schedule(const int32_t* row_len, int64_t groups, int64_t rows_per_group,
                   cuda::PagedScheduleOut out, int64_t* work) {
  __shared__ int64_t shared[cuda::kWarpThreads + 1];
  if (threadIdx.x == 0) work[0] = 0;
  cuda::block_scan<int64_t>(
      groups, shared,
      [&](int64_t g) {
        const int64_t len = row_len[g * rows_per_group + rows_per_group - 1];
        return len <= 0 ? 0 : (len + kScheduleTokens - 1) / kScheduleTokens;
      },
      [&](int64_t g, int64_t, int64_t upto) { work[g + 1] = upto; });
  cuda::write_paged_schedule(work, groups, out);
}

__global__ void __launch_bounds__(kThreads)
    split_schedule(const int32_t* topk_length, int64_t rows, cuda::SplitScheduleOut out,
                   int64_t* cost, cuda::SplitWork work) {
  __shared__ int64_t shared[cuda::kWarpThreads + 1];
  if (threadIdx.x == 0) cost[0] = 0;
  cuda::block_scan<int64_t>(
      rows, shared,
      [&](int64_t r) {
        const int64_t blocks = (int64_t{topk_length[r]} + kSplitBlockSlots - 1) / kSplitBlockSlots;
        return (blocks > 1 ? blocks : 1) + kSplitOverheadBlocks;
      },
      [&](int64_t r, int64_t, int64_t upto) { cost[r + 1] = upto; });
  cuda::write_split_schedule({cost, rows}, rows, out, work);
}

struct SplitMemory {
  int64_t* cost;  // [rows + 1]
  cuda::SplitWork work;

  SplitMemory(WorkspaceCutter& cutter, const SplitScheduleProblem& problem)
      : cost(cutter.take<int64_t>(problem.max_rows + 1)),
        work{cutter.take<cuda::SplitStart>(problem.parts + 1), nullptr, 0} {}
};

}  // namespace

size_t paged_schedule_cuda_workspace(const PagedScheduleProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<int64_t>(problem.max_rows / problem.rows_per_group + 1);
  return cutter.used_bytes();
}

void paged_schedule_cuda_portable(const PagedScheduleProblem& problem, const Device& device,
                                  const PagedScheduleTensors& tensors, Workspace workspace,
                                  Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const int64_t groups = tensors.row_len.shape[0] / problem.rows_per_group;
  cuda::launch("paged_schedule", paged_schedule, {dim3(1), dim3(kThreads)}, stream,
               static_cast<const int32_t*>(tensors.row_len.data), groups, problem.rows_per_group,
               cuda::PagedScheduleOut{static_cast<int32_t*>(tensors.schedule.data),
                                      tensors.schedule.stride[0], problem.workers},
               static_cast<int64_t*>(workspace.data));
}

size_t split_schedule_cuda_workspace(const SplitScheduleProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  const SplitMemory memory(cutter, problem);
  return cutter.used_bytes();
}

void split_schedule_cuda_portable(const SplitScheduleProblem& problem, const Device& device,
                                  const SplitScheduleTensors& tensors, Workspace workspace,
                                  Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  const SplitMemory memory(cutter, problem);
  cuda::launch(
      "split_schedule", split_schedule, {dim3(1), dim3(kThreads)}, stream,
      static_cast<const int32_t*>(tensors.topk_length.data), tensors.topk_length.shape[0],
      cuda::SplitScheduleOut{static_cast<int32_t*>(tensors.split_schedule.data),
                             tensors.split_schedule.stride[0],
                             static_cast<int32_t*>(tensors.split_indptr.data), problem.parts},
      memory.cost, memory.work);
}

}  // namespace fovea::internal
