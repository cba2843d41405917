#include <algorithm>

#include "src/core/workspace.h"
#include "src/msa/cuda/msa_index.cuh"

// Windows of rows, one after the other: scores of a window, then its lists. The scores of a window
// stay in the second-level cache. How many windows there are follows from the shapes.
namespace fovea::internal {
namespace {

constexpr char kOp[] = "msa_score_select";
constexpr int64_t kWindowBytes = int64_t{16} << 20;

struct Memory {
  int64_t window_rows;
  int32_t* offsets;
  float* scores;  // [heads][window rows][max_pages]

  Memory(const MsaScoreSelectProblem& problem, WorkspaceCutter& cutter) {
    const int64_t row_bytes =
        std::max<int64_t>(1, problem.num_heads * problem.max_pages * int64_t{sizeof(float)});
    window_rows =
        std::clamp<int64_t>(kWindowBytes / row_bytes, 1, std::max<int64_t>(1, problem.max_rows));
    offsets = cutter.take<int32_t>(problem.max_requests + 1);
    scores = cutter.take<float>(problem.num_heads * window_rows * problem.max_pages);
  }
};

}  // namespace

Refusal msa_score_select_cuda_supports(const MsaScoreSelectProblem& problem) {
  const Refusal refusal =
      msa_scores_cuda_refusal(problem.max_rows, problem.num_heads, problem.head_dim);
  return refusal.empty() ? msa_select_cuda_refusal(problem.max_rows, problem.num_kv_heads)
                         : refusal;
}

size_t msa_score_select_cuda_workspace(const MsaScoreSelectProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  const Memory memory(problem, cutter);
  return cutter.used_bytes();
}

void msa_score_select_cuda_portable(const MsaScoreSelectProblem& problem, const Device& device,
                                    const MsaScoreSelectTensors& tensors, Workspace workspace,
                                    Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  const Memory memory(problem, cutter);
  MsaScoreWork scoring{};
  scoring.iq = access<const bf16_t, 3>(tensors.iq);
  scoring.keys = {access<const bf16_t, 3>(tensors.index_k),
                  access<const int32_t, 2>(tensors.page_table), problem.block_size};
  scoring.score = problem.score;
  scoring.index_scale = problem.index_scale;
  scoring.min_own = problem.topk;
  const int64_t num_rows = scoring.iq.shape[0];
  const int64_t max_pages = scoring.keys.page_table.shape[1];
  if (num_rows == 0) return;
  scoring.rows = launch_msa_rows(kOp,
                                 msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset,
                                           num_rows, max_pages, problem.block_size),
                                 memory.offsets, stream);
  MsaSelectWork selection{};
  selection.rows = scoring.rows;
  selection.lists = access_blocks<int32_t>(tensors.blocks, problem.blocks_layout);
  selection.num_heads = problem.num_heads;
  selection.topk = problem.topk;
  selection.init_blocks = problem.init_blocks;
  selection.local_blocks = problem.local_blocks;
  selection.index_reduce = problem.index_reduce;
  const MsaLaunch launch{kOp, cuda::device_facts(device.ordinal).num_sms, stream};
  for (int64_t first = 0; first < num_rows; first += memory.window_rows) {
    const MsaRowWindow window{first, std::min(memory.window_rows, num_rows - first)};
    scoring.window = selection.window = window;
    scoring.scores = {memory.scores,
                      {problem.num_heads, window.count, max_pages},
                      {window.count * max_pages, max_pages, 1}};
    selection.scores = {memory.scores, scoring.scores.shape, scoring.scores.stride};
    if (max_pages > problem.topk) launch_msa_scores(launch, scoring);
    launch_msa_select(launch, selection);
  }
}

}  // namespace fovea::internal
