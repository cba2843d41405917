#include <algorithm>
#include <cmath>

#include "src/core/workspace.h"
#include "src/kda/kda_commit_impl.h"

namespace fovea::internal {
namespace {

struct Scratch {
  int64_t* check;
  double* start;  // [V][K] the state that the verify read

  Scratch(const KdaCommitProblem& problem, WorkspaceCutter* cutter)
      : check(cutter->take<int64_t>(kda_commit_check_elements(problem))),
        start(cutter->take<double>(problem.head_dim_v * problem.head_dim_k)) {}
};

// Element (v, k) of diag(exp(G_m)) S0 + sum_j (k_j exp(G_m - G_j)) u_j^T over the path to `node`.
double rebuilt(const KdaCommitProblem& problem, const CommitLists& lists, const CommitLayer& layer,
               int64_t request, int64_t head, int64_t node, double start, int64_t v, int64_t k) {
  double log_sum = 0, sum = 0;
  for (int64_t j = node; j >= 0; j = parent_row(lists.parent, j)) {
    const float* record = layer.kept.at(request, j, head);
    sum += static_cast<double>(record[k]) * std::exp(log_sum) *
           static_cast<double>(record[2 * problem.head_dim_k + v]);
    log_sum += static_cast<double>(record[problem.head_dim_k + k]);
  }
  return std::exp(log_sum) * start + sum;
}

void commit_head(const KdaCommitProblem& problem, const CommitLists& lists,
                 const CommitLayer& layer, int64_t request, int64_t head, double* start) {
  const int64_t dim_k = problem.head_dim_k, dim_v = problem.head_dim_v;
  // The state that was read may be the one that is written.
  const int64_t from = lists.reads_pool ? lists.start(request) : -1;
  for (int64_t i = 0; i < dim_v * dim_k; ++i) {
    start[i] =
        from >= 0 && from < lists.slots ? layer.states.load(from, head, i / dim_k, i % dim_k) : 0.0;
  }
  for (const int which : {0, 1}) {
    const CommitTarget target = lists.target(request, which);
    if (target.slot < 0) continue;
    for (int64_t v = 0; v < dim_v; ++v) {
      for (int64_t k = 0; k < dim_k; ++k) {
        const double value =
            problem.mode == VerifyMode::kStates
                ? layer.kept.at(request, target.node, head)[v * layer.kept.v_stride + k]
                : rebuilt(problem, lists, layer, request, head, target.node, start[v * dim_k + k],
                          v, k);
        layer.states.store(target.slot, head, v, k, static_cast<float>(value));
      }
    }
  }
}

void commit_window(const CommitLists& lists, const CommitLayer& layer, int64_t request) {
  for (const int which : {0, 1}) {
    const CommitTarget target = lists.target(request, which);
    if (target.slot < 0) continue;
    for (int64_t row = 0; row < kConvHistory; ++row) {
      for (int64_t channel = 0; channel < layer.windows.shape[3]; ++channel) {
        *layer.window_pool.at(target.slot, row, channel) =
            layer.windows(request, target.node, row, channel);
      }
    }
  }
}

}  // namespace

size_t kda_commit_ref_workspace(const KdaCommitProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  Scratch(problem, &cutter);
  return cutter.used_bytes();
}

void kda_commit_ref(const KdaCommitProblem& problem, const Device&, const KdaCommitTensors& tensors,
                    Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  const Scratch scratch(problem, &cutter);
  judge_kda_commit(problem, tensors, scratch.check);
  const CommitLists lists(problem, tensors);
  for (int64_t l = 0; l < std::max<int64_t>(problem.num_layers, 1); ++l) {
    const CommitLayer layer(problem, tensors, l);
    for (int64_t r = 0; r < tensors.accepted.shape[0]; ++r) {
      for (int64_t head = 0; head < problem.num_value_heads; ++head) {
        commit_head(problem, lists, layer, r, head, scratch.start);
      }
      if (tensors.window_scratch.defined()) commit_window(lists, layer, r);
    }
  }
}

}  // namespace fovea::internal
