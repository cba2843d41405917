#include <algorithm>
#include <numeric>

#include "src/core/workspace.h"
#include "src/msa/msa_index_impl.h"

namespace fovea::internal {
namespace {

// The first K of the candidates 0..own in the order forced, score, id, as an ascending list;
// returns its length. `score` gives the score of a block.
template <class Score>
int64_t choose(const MsaSelectBlocksProblem& problem, int64_t own, Score score, int32_t* list) {
  const int64_t candidates = own + 1;
  std::iota(list, list + candidates, 0);
  const int64_t count = std::min(problem.topk, candidates);
  if (count == candidates) return count;
  std::sort(list, list + candidates, [&](int32_t a, int32_t b) {
    const auto forced = [&](int32_t n) {
      return msa_block_is_forced(n, own, problem.init_blocks, problem.local_blocks);
    };
    if (forced(a) != forced(b)) return forced(a);
    const uint32_t rank_a = msa_score_rank(score(a));
    const uint32_t rank_b = msa_score_rank(score(b));
    return rank_a != rank_b ? rank_a > rank_b : a < b;
  });
  std::sort(list, list + count);
  return count;
}

void write_list(const int32_t* list, int64_t count, int64_t width, int32_t* to) {
  std::copy(list, list + count, to);
  std::fill(to + count, to + width, -1);
}

}  // namespace

// `candidates`: heads / KV heads times max_pages entries.
void msa_select_row_ref(const MsaSelectBlocksProblem& problem, const MsaRow& row, int64_t t,
                        const float* scores, int64_t head_stride, int32_t* candidates,
                        const Accessor<int32_t, 3>& lists) {
  const int64_t kv_heads = problem.num_kv_heads;
  const int64_t width = lists.shape[2];
  const int64_t per_group =
      problem.index_reduce == IndexReduce::kUnion ? problem.num_heads / kv_heads : 1;
  for (int64_t g = 0; g < kv_heads; ++g) {
    int64_t count = 0;
    for (int64_t i = 0; i < per_group && !row.is_empty(); ++i) {
      count += choose(
          problem, row.own,
          [&](int32_t n) {
            if (problem.index_reduce != IndexReduce::kMaxAll)
              return scores[(g * per_group + i) * head_stride + n];
            float best = scores[n];
            for (int64_t h = 1; h < problem.num_heads; ++h) {
              const float other = scores[h * head_stride + n];
              if (msa_score_rank(other) > msa_score_rank(best)) best = other;
            }
            return best;
          },
          candidates + count);
    }
    std::sort(candidates, candidates + count);
    count = std::unique(candidates, candidates + count) - candidates;
    write_list(candidates, count, width, lists.row(g, t));
  }
}

size_t msa_select_blocks_ref_workspace(const MsaSelectBlocksProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<MsaRow>(problem.max_rows);
  cutter.take<int32_t>((problem.num_heads + 1) * (problem.max_pages + problem.topk));
  return cutter.used_bytes();
}

void msa_select_blocks_ref(const MsaSelectBlocksProblem& problem, const Device&,
                           const MsaSelectBlocksTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  auto* rows = cutter.take<MsaRow>(problem.max_rows);
  auto* candidates =
      cutter.take<int32_t>((problem.num_heads + 1) * (problem.max_pages + problem.topk));
  const auto scores = access<const float, 3>(tensors.scores);
  const auto lists = access_blocks<int32_t>(tensors.blocks, problem.blocks_layout);
  read_msa_rows(msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset, scores.shape[1],
                          scores.shape[2], problem.block_size),
                rows);
  for (int64_t t = 0; t < scores.shape[1]; ++t) {
    msa_select_row_ref(problem, rows[t], t, scores.row(0, t), scores.stride[0], candidates, lists);
  }
}

}  // namespace fovea::internal
