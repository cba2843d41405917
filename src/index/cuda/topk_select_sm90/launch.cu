#include <algorithm>
#include <cstddef>

#include "src/core/cuda/launch.cuh"
#include "src/index/cuda/topk_select_sm90/kernel.cuh"
#include "src/index/topk_select_impl.h"

namespace fovea::internal {
namespace {

using namespace topk_sm90;

// Shorter rows are as fast in one block.
constexpr int64_t kMinWidth = 16384;
// More rows fill the device, a block each.
constexpr int64_t kMaxRows = 16;
// Columns of a block when there are multiprocessors enough.
constexpr int64_t kBlockColumns = 4096;

/// Groups that cover a row of the call, wherever its window begins.
int64_t groups_of(const TopkSelectTensors& tensors) {
  const bool aligned = cuda::is_aligned(tensors.logits.data, 16) &&
                       tensors.logits.stride[0] % 4 == 0 && !tensors.row_start.defined();
  return (tensors.logits.shape[1] + (aligned ? 0 : 3) + 3) / 4;
}

/// Blocks of a row's cluster, by the bounds of the call alone; 0: a row has to be one block's.
int64_t blocks_of(const TopkSelectProblem& problem, const TopkSelectTensors& tensors,
                  int64_t num_sms) {
  const int64_t rows = tensors.indices.shape[0], width = tensors.logits.shape[1];
  if (problem.topk > kMaxTopk || rows == 0 || rows > kMaxRows || width < kMinWidth) return 0;
  // Clusters lie within groups of multiprocessors, some of which are smaller than others: not all
  // multiprocessors can be used at a time.
  const int64_t room = num_sms * 15 / 16 / rows;
  int64_t blocks = 2;
  while (2 * blocks <= std::min<int64_t>(room, kMaxBlocks) && blocks * kBlockColumns < width) {
    blocks *= 2;
  }
  return blocks <= room && groups_of(tensors) <= blocks * kBlockGroups ? blocks : 0;
}

template <int kBlocks>
void launch_rows(const TopkRows& rows, const TopkSelectProblem& problem, int64_t groups,
                 Stream stream) {
  const int64_t part_groups = (groups + kBlocks - 1) / kBlocks;
  if constexpr (kBlocks > 8) cuda::allow_large_clusters(select_rows<kBlocks>);
  cuda::launch("topk_select", select_rows<kBlocks>,
               {dim3(static_cast<unsigned>(rows.num_rows() * kBlocks)), dim3(kThreads),
                offsetof(SharedMemory, values) + 16 * static_cast<size_t>(part_groups)},
               stream, rows, static_cast<uint32_t>(problem.topk),
               static_cast<uint32_t>(problem.topk + kSlack));
}

}  // namespace

void topk_select_cuda_sm90(const TopkSelectProblem& problem, const Device& device,
                           const TopkSelectTensors& tensors, Workspace workspace, Stream stream) {
  if (problem.topk == 0) return;
  const int64_t blocks = blocks_of(problem, tensors, cuda::device_facts(device.ordinal).num_sms);
  if (blocks == 0) return topk_select_cuda_portable(problem, device, tensors, workspace, stream);
  const cuda::DeviceScope scope(device.ordinal);
  const TopkRows rows(problem, tensors);
  const int64_t groups = groups_of(tensors);
  switch (blocks) {
    case 2:
      return launch_rows<2>(rows, problem, groups, stream);
    case 4:
      return launch_rows<4>(rows, problem, groups, stream);
    case 8:
      return launch_rows<8>(rows, problem, groups, stream);
    default:
      return launch_rows<16>(rows, problem, groups, stream);
  }
}

}  // namespace fovea::internal
