#include <algorithm>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/mla/cuda/sparse_mla_fold.cuh"
#include "src/mla/cuda/sparse_mla_sm90/kernel.cuh"
#include "src/mla/sparse_mla_impl.h"

namespace fovea::internal {
namespace {

using namespace sparse_sm90;

constexpr int64_t kMaxRowParts = 32;

int64_t groups_of_heads(const SparseMlaProblem& problem) {
  return (problem.num_heads + kHeads - 1) / kHeads;
}

// Blocks with the heads of one row that share the rows of its keys. Worth it where rows are
// decoded, and not for a few tiles, because the blocks wait for each other at the start and at the
// end.
unsigned blocks_together(const SparseMlaProblem& problem) {
  return groups_of_heads(problem) % 2 == 0 && problem.row_format != RowFormat::kBf16 &&
                 problem.topk + problem.extra_topk > 256
             ? 2
             : 1;
}

// The number of parts with the least time, by the bound of the rows alone, in units of a tile: a
// block takes about two before its first tile and after its last, the fold one and a half and a
// 32nd a part.
int64_t parts_of(const SparseMlaProblem& problem, const Device& device) {
  const int64_t tiles = RowParts(problem.topk, problem.extra_topk, 1).num_blocks;
  if (problem.fixed_splits > 0) return std::max<int64_t>(1, std::min(problem.fixed_splits, tiles));
  const int64_t num_sms = cuda::device_facts(device.ordinal).num_sms;
  // More rows than that fill every device, whatever their number.
  const int64_t rows = std::min<int64_t>(problem.max_rows, 64 * num_sms);
  int64_t best = 1, least = 0;
  for (int64_t parts = 1; parts <= std::min(tiles, kMaxRowParts); ++parts) {
    const int64_t blocks = rows * groups_of_heads(problem) * parts;
    const int64_t rounds = (blocks + num_sms - 1) / num_sms;
    const int64_t eighths =
        8 * rounds * ((tiles + parts - 1) / parts + 2) + (parts > 1 ? 12 + parts / 4 : 0);
    if (parts > 1 && eighths >= least) continue;
    best = parts;
    least = eighths;
  }
  return best;
}

}  // namespace

size_t sparse_mla_cuda_sm90_workspace(const SparseMlaProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  latent::PartMemory(problem.max_rows, problem.num_heads, parts_of(problem, device), cutter);
  return cutter.used_bytes();
}

void sparse_mla_cuda_sm90(const SparseMlaProblem& problem, const Device& device,
                          const SparseMlaTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const int64_t num_rows = tensors.q.shape[0], num_parts = parts_of(problem, device);
  WorkspaceCutter cutter(workspace);
  const Params params(latent::row_params(problem, tensors, num_parts, kHeads, cutter));
  cuda::LaunchShape shape{
      dim3(static_cast<unsigned>(num_rows * params.head_groups), static_cast<unsigned>(num_parts)),
      dim3(kThreads)};
  const bool together = blocks_together(problem) == 2;
  if (problem.head_dim_qk == 576) {
    shape.shared_bytes = sizeof(SharedMemory<576>);
    cuda::launch("sparse_mla", together ? attend_together<576> : attend<576>, shape, stream,
                 params);
  } else {
    shape.shared_bytes = sizeof(SharedMemory<512>);
    cuda::launch("sparse_mla", together ? attend_together<512> : attend<512>, shape, stream,
                 params);
  }
  latent::launch_fold(params, num_rows, stream);
}

}  // namespace fovea::internal
