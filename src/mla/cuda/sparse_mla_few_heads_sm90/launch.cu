#include <algorithm>

#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/mla/cuda/sparse_mla_few_heads_sm90/kernel.cuh"
#include "src/mla/sparse_mla_impl.h"

namespace fovea::internal {
namespace {

using namespace sparse_few_heads_sm90;

constexpr int64_t kMaxRowParts = 16;

// The number of parts with the least time, in units of a pair of tiles: a block takes about two
// before its first and after its last, the fold two and an eighth a part.
int64_t parts_of(const SparseMlaProblem& problem, const Device& device) {
  const int64_t tiles = RowParts(problem.topk, problem.extra_topk, 1).num_blocks;
  if (problem.fixed_splits > 0) return std::max<int64_t>(1, std::min(problem.fixed_splits, tiles));
  const int64_t num_sms = cuda::device_facts(device.ordinal).num_sms;
  const int64_t groups_of_heads = (problem.num_heads + kHeads - 1) / kHeads;
  // More rows than that fill every device, whatever their number.
  const int64_t rows = std::min<int64_t>(problem.max_rows, 64 * num_sms);
  int64_t best = 1, least = 0;
  for (int64_t parts = 1; parts <= std::min(tiles, kMaxRowParts); ++parts) {
    const int64_t rounds = (rows * groups_of_heads * parts + num_sms - 1) / num_sms;
    const int64_t pairs = ((tiles + parts - 1) / parts + 1) / kGroups;
    const int64_t eighths = 8 * rounds * (pairs + 2) + (parts > 1 ? 16 + parts : 0);
    if (parts > 1 && eighths >= least) continue;
    best = parts;
    least = eighths;
  }
  return best;
}

}  // namespace

size_t sparse_mla_cuda_sm90_few_heads_workspace(const SparseMlaProblem& problem,
                                                const Device& device) {
  WorkspaceCutter cutter({});
  latent::PartMemory(problem.max_rows, problem.num_heads, parts_of(problem, device), cutter);
  return cutter.used_bytes();
}

void sparse_mla_cuda_sm90_few_heads(const SparseMlaProblem& problem, const Device& device,
                                    const SparseMlaTensors& tensors, Workspace workspace,
                                    Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const int64_t num_rows = tensors.q.shape[0], num_parts = parts_of(problem, device);
  WorkspaceCutter cutter(workspace);
  const RowParams params = latent::row_params(problem, tensors, num_parts, kHeads, cutter);
  bool is_packed = problem.head_dim_qk != kValueDim;
  for (int i = 0; i < 2; ++i) {
    const bool is_absent = params.segments[i].base == nullptr;
    const RowLayout& layout = params.layouts[i];
    is_packed = is_packed && (is_absent || (layout.format == RowFormat::kV32 && layout.aligned));
  }
  const cuda::LaunchShape shape{
      dim3(static_cast<unsigned>(num_rows * params.head_groups), static_cast<unsigned>(num_parts)),
      dim3(static_cast<unsigned>(all_threads(is_packed))), sizeof(SharedMemory)};
  if (problem.head_dim_qk == kValueDim) {
    cuda::launch("sparse_mla", attend<512, false>, shape, stream, params);
  } else {
    cuda::launch("sparse_mla", is_packed ? attend<576, true> : attend<576, false>, shape, stream,
                 params);
  }
  latent::launch_fold(params, num_rows, stream);
}

}  // namespace fovea::internal
