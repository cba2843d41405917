#include "src/core/parallel.h"
#include "src/msa/msa_select_row.h"

namespace fovea::internal {

size_t msa_select_blocks_cpu_workspace(const MsaSelectBlocksProblem& problem,
                                       const Device& device) {
  WorkspaceCutter cutter({});
  cutter.take<MsaRow>(problem.max_rows);
  for (int worker = 0; worker < device.num_threads; ++worker) MsaRowSelector(cutter, problem);
  return cutter.used_bytes();
}

void msa_select_blocks_cpu(const MsaSelectBlocksProblem& problem, const Device& device,
                           const MsaSelectBlocksTensors& tensors, Workspace workspace) {
  constexpr int64_t kGrain = 4;
  WorkspaceCutter cutter(workspace);
  auto* rows = cutter.take<MsaRow>(problem.max_rows);
  const auto scores = access<const float, 3>(tensors.scores);
  const auto lists = access_blocks<int32_t>(tensors.blocks, problem.blocks_layout);
  read_msa_rows(msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset, scores.shape[1],
                          scores.shape[2], problem.block_size),
                rows);
  const ThreadScope threads(device.num_threads);
  ParallelFor(scores.shape[1], kGrain, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter rest = cutter;
    for (int i = 0; i < worker; ++i) MsaRowSelector(rest, problem);
    MsaRowSelector selector(rest, problem);
    for (int64_t t = begin; t < end; ++t)
      selector.select(rows[t], t, scores.row(0, t), scores.stride[0], lists);
  });
}

}  // namespace fovea::internal
