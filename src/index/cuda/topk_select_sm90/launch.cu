#include <algorithm>

#include "src/core/cuda/launch.cuh"
#include "src/index/cuda/topk_select_sm90/kernel.cuh"
#include "src/index/topk_select_impl.h"

namespace fovea::internal {
namespace {

using namespace topk_sm90;

// Shorter rows are as fast in one block.
constexpr int64_t kMinWidth = 49152;
// More rows fill the device, a block each.
constexpr int64_t kMaxRows = 16;
// Columns of a block when there are multiprocessors enough.
constexpr int64_t kBlockColumns = 4096;

/// Blocks of a row's cluster, by the bounds of the call alone; 0: a row has to be one block's.
int64_t blocks_of(const TopkSelectProblem& problem, const TopkSelectTensors& tensors,
                  int64_t num_sms) {
  const int64_t rows = tensors.indices.shape[0], width = tensors.logits.shape[1];
  if (problem.topk > kMaxTopk || rows == 0 || rows > kMaxRows || width < kMinWidth) return 0;
  const bool aligned = cuda::is_aligned(tensors.logits.data, 16) &&
                       tensors.logits.stride[0] % 4 == 0 && !tensors.row_start.defined();
  const int64_t groups = (width + (aligned ? 0 : 3) + 3) / 4;
  // Clusters lie within groups of multiprocessors, some of which are smaller than others: not all
  // multiprocessors can be used at a time.
  const int64_t room = num_sms * 15 / 16 / rows;
  int64_t blocks = 2;
  while (2 * blocks <= std::min<int64_t>(room, kMaxBlocks) && blocks * kBlockColumns < width) {
    blocks *= 2;
  }
  return blocks <= room && groups <= blocks * kBlockGroups ? blocks : 0;
}

template <int kBlocks>
void launch_rows(const TopkRows& rows, const TopkSelectProblem& problem, Stream stream) {
  if constexpr (kBlocks > 8) cuda::allow_large_clusters(select_rows<kBlocks>);
  cuda::launch("topk_select", select_rows<kBlocks>,
               {dim3(static_cast<unsigned>(rows.num_rows() * kBlocks)), dim3(kThreads),
                sizeof(SharedMemory)},
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
  switch (blocks) {
    case 2:
      return launch_rows<2>(rows, problem, stream);
    case 4:
      return launch_rows<4>(rows, problem, stream);
    case 8:
      return launch_rows<8>(rows, problem, stream);
    default:
      return launch_rows<16>(rows, problem, stream);
  }
}

}  // namespace fovea::internal
