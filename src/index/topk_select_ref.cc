#include <algorithm>
#include <cmath>
#include <numeric>

#include "src/core/workspace.h"
#include "src/index/topk_select_impl.h"
#include "src/index/topk_select_transform.h"

namespace fovea::internal {

size_t topk_select_ref_workspace(const TopkSelectProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<int32_t>(problem.max_width);
  return cutter.used_bytes();
}

// Sorts all positions of a row by (logit descending, position ascending), NaN after every number,
// keeps the first K and sorts them by position.
void topk_select_ref(const TopkSelectProblem& problem, const Device&,
                     const TopkSelectTensors& tensors, Workspace workspace) {
  int32_t* positions = WorkspaceCutter(workspace).take<int32_t>(problem.max_width);
  const TopkRows rows(problem, tensors);
  for (int64_t t = 0; t < rows.num_rows(); ++t) {
    const TopkWindow window = rows.window(t);
    if (window.len <= problem.topk) {
      rows.write_identity(t, window.len);
      continue;
    }
    const float* logits = rows.logits(t, window);
    std::iota(positions, positions + window.len, 0);
    std::sort(positions, positions + window.len, [logits](int32_t a, int32_t b) {
      const bool a_is_nan = std::isnan(logits[a]);
      const bool b_is_nan = std::isnan(logits[b]);
      if (a_is_nan != b_is_nan) return b_is_nan;
      if (!a_is_nan && logits[a] != logits[b]) return logits[a] > logits[b];
      return a < b;
    });
    std::sort(positions, positions + problem.topk);
    rows.write(t, positions, problem.topk);
  }
}

}  // namespace fovea::internal
