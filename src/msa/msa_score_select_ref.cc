#include <limits>

#include "src/core/workspace.h"
#include "src/msa/msa_index_impl.h"

namespace fovea::internal {
namespace {

struct Scratch {
  MsaRow* rows;
  double* products;
  float* scores;  // [heads][max_pages]
  int32_t* candidates;

  Scratch(WorkspaceCutter& cutter, const MsaScoreSelectProblem& problem)
      : rows(cutter.take<MsaRow>(problem.max_rows)),
        products(cutter.take<double>(problem.block_size)),
        scores(cutter.take<float>(problem.num_heads * problem.max_pages)),
        candidates(
            cutter.take<int32_t>((problem.num_heads + 1) * (problem.max_pages + problem.topk))) {}
};

}  // namespace

size_t msa_score_select_ref_workspace(const MsaScoreSelectProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  const Scratch scratch(cutter, problem);
  return cutter.used_bytes();
}

void msa_score_select_ref(const MsaScoreSelectProblem& problem, const Device&,
                          const MsaScoreSelectTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const Scratch scratch(cutter, problem);
  const MsaBlockScoresProblem scoring = msa_scores_problem(problem);
  const MsaSelectBlocksProblem selection = msa_select_problem(problem);
  const auto iq = access<const bf16_t, 3>(tensors.iq);
  const auto lists = access_blocks<int32_t>(tensors.blocks, problem.blocks_layout);
  const MsaIndexKeys keys{access<const bf16_t, 3>(tensors.index_k),
                          access<const int32_t, 2>(tensors.page_table), problem.block_size};
  const int64_t max_pages = keys.page_table.shape[1];
  read_msa_rows(msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset, iq.shape[0],
                          max_pages, problem.block_size),
                scratch.rows);
  for (int64_t t = 0; t < iq.shape[0]; ++t) {
    const MsaRow& row = scratch.rows[t];
    const bool chooses = row.own >= problem.topk;  // otherwise all candidates are taken
    for (int64_t h = 0; h < problem.num_heads && chooses; ++h) {
      for (int64_t n = 0; n <= row.own; ++n) {
        scratch.scores[h * max_pages + n] =
            msa_block_score_ref(scoring, keys, iq.row(t, h), row, n, scratch.products);
      }
    }
    msa_select_row_ref(selection, row, t, scratch.scores, max_pages, scratch.candidates, lists);
  }
}

}  // namespace fovea::internal
