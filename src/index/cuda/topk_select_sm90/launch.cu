#include <algorithm>
#include <cstddef>
#include <limits>

#include "src/core/cuda/launch.cuh"
#include "src/index/cuda/topk_select_sm90/kernel.cuh"
#include "src/index/cuda/topk_select_sm90/stream.cuh"
#include "src/index/topk_select_impl.h"

namespace fovea::internal {
namespace {

using namespace topk_sm90;

// Columns of a block when there are multiprocessors enough.
constexpr int64_t kBlockColumns = 2048;
// A block that has a row alone is faster than the portable kernels up to this many groups.
constexpr int64_t kAloneGroups = 4096;

/// Groups that cover a row of the call, wherever its window begins.
int64_t groups_of(const TopkSelectTensors& tensors) {
  const bool aligned = cuda::is_aligned(tensors.logits.data, 16) &&
                       tensors.logits.stride[0] % 4 == 0 && !tensors.row_start.defined();
  return (tensors.logits.shape[1] + (aligned ? 0 : 3) + 3) / 4;
}

/// Blocks of a row, by the bounds of the call alone; 0: the portable kernels have it.
int64_t blocks_of(const TopkSelectProblem& problem, const TopkSelectTensors& tensors,
                  int64_t num_sms) {
  const int64_t rows = tensors.indices.shape[0], width = tensors.logits.shape[1];
  if (rows == 0 || rows > num_sms || width <= problem.topk) return 0;
  // Clusters lie within groups of multiprocessors, some of which are smaller than others: not all
  // multiprocessors can be used at a time.
  const int64_t room = num_sms * 15 / 16 / rows;
  int64_t blocks = 1;
  while (2 * blocks <= std::min<int64_t>(room, kMaxBlocks) && blocks * kBlockColumns < width) {
    blocks *= 2;
  }
  const int64_t most = blocks > 1 ? kBlockGroups : kAloneGroups;
  return groups_of(tensors) <= blocks * most ? blocks : 0;
}

template <int kBlocks, int kThreads>
void launch_rows(const TopkRows& rows, const TopkSelectProblem& problem, int64_t part_groups,
                 Stream stream) {
  if constexpr (kBlocks > 8) cuda::allow_large_clusters(select_rows<kBlocks, kThreads>);
  cuda::launch("topk_select", select_rows<kBlocks, kThreads>,
               {dim3(static_cast<unsigned>(rows.num_rows() * kBlocks)), dim3(kThreads),
                offsetof(SharedMemory, values) + 16 * static_cast<size_t>(part_groups)},
               stream, rows, static_cast<uint32_t>(problem.topk));
}

template <int kBlocks>
void launch_blocks(const TopkRows& rows, const TopkSelectProblem& problem, int64_t groups,
                   Stream stream) {
  const int64_t part_groups = (groups + kBlocks - 1) / kBlocks;
  if (kBlocks > 1 && part_groups <= kThreadGroups * kFewThreads) {
    launch_rows<kBlocks, kFewThreads>(rows, problem, part_groups, stream);
  } else {
    launch_rows<kBlocks, kMaxThreads>(rows, problem, part_groups, stream);
  }
}

// Wider rows are the portable kernels', and those whose sample would have too many of the best.
constexpr int64_t kMaxStreamColumns = 131072;
constexpr int64_t kMaxStreamTopk = 2048;
// Of rows that two blocks of a multiprocessor have room for at a time.
constexpr int64_t kMaxSharedColumns = 65536;

bool can_stream(const TopkSelectProblem& problem, const TopkSelectTensors& tensors) {
  const int64_t width = tensors.logits.shape[1];
  return tensors.indices.shape[0] > 0 && problem.topk < width && width <= kMaxStreamColumns &&
         problem.topk <= kMaxStreamTopk;
}

template <int kThreads, int kLaneGroups, int kBlocksPerSm>
void launch_streams(const TopkRows& rows, const TopkSelectProblem& problem, int64_t blocks,
                    int64_t slack, Stream stream) {
  const int64_t width = rows.width();
  StreamSizes sizes{};
  sizes.blocks = static_cast<uint32_t>(blocks);
  // The units behind the entries begin at a multiple of 16 bytes.
  sizes.capacity = static_cast<uint32_t>((problem.topk + slack + 1) / 2 * 2);
  const uint32_t bitmap_words = bitmap_place(static_cast<uint32_t>((width + 3 + 31) / 32));
  sizes.bin_words = (std::max(bitmap_words, static_cast<uint32_t>(kBins)) + 3) / 4 * 4;
  cuda::launch("topk_select", select_streams<kThreads, kLaneGroups, kBlocksPerSm>,
               {dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                offsetof(StreamMemory, bins) + 4 * size_t{sizes.bin_words} +
                    8 * size_t{sizes.capacity} + size_t{16} * kThreads * kLaneGroups * kSlots},
               stream, rows, static_cast<uint32_t>(problem.topk), sizes);
}

/// Whole rows by blocks of their own.
void launch_streams(const TopkRows& rows, const TopkSelectProblem& problem, int64_t num_sms,
                    Stream stream) {
  const int64_t num_rows = rows.num_rows();
  const int64_t blocks = std::min<int64_t>(num_rows, std::numeric_limits<int32_t>::max());
  if (num_rows > num_sms && rows.width() <= kMaxSharedColumns) {
    launch_streams<512, 4, 2>(rows, problem, blocks, 2048, stream);
  } else {
    launch_streams<1024, 4, 1>(rows, problem, blocks, 4096, stream);
  }
}

}  // namespace

void topk_select_cuda_sm90(const TopkSelectProblem& problem, const Device& device,
                           const TopkSelectTensors& tensors, Workspace workspace, Stream stream) {
  if (problem.topk == 0) return;
  const int64_t num_sms = cuda::device_facts(device.ordinal).num_sms;
  const int64_t blocks = blocks_of(problem, tensors, num_sms);
  if (blocks == 0 && !can_stream(problem, tensors)) {
    return topk_select_cuda_portable(problem, device, tensors, workspace, stream);
  }
  const cuda::DeviceScope scope(device.ordinal);
  const TopkRows rows(problem, tensors);
  if (blocks == 0) return launch_streams(rows, problem, num_sms, stream);
  const int64_t groups = groups_of(tensors);
  switch (blocks) {
    case 1:
      return launch_blocks<1>(rows, problem, groups, stream);
    case 2:
      return launch_blocks<2>(rows, problem, groups, stream);
    case 4:
      return launch_blocks<4>(rows, problem, groups, stream);
    case 8:
      return launch_blocks<8>(rows, problem, groups, stream);
    default:
      return launch_blocks<16>(rows, problem, groups, stream);
  }
}

}  // namespace fovea::internal
