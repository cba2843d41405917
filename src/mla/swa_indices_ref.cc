#include <algorithm>

#include "src/mla/request_ranges.h"
#include "src/mla/swa_indices_impl.h"

namespace fovea::internal {

void swa_indices_ref(const SwaIndicesProblem& problem, const Device&,
                     const SwaIndicesTensors& tensors, Workspace) {
  const WindowTable table(problem, tensors);
  const auto indices = access<int32_t, 2>(tensors.indices);
  const auto row_len = access<int32_t, 1>(tensors.row_len);
  for (int64_t t = 0; t < indices.shape[0]; ++t) {
    std::fill_n(indices.row(t), problem.width, -1);
    row_len(t) = 0;
  }
  RequestRanges ranges(static_cast<const int32_t*>(tensors.q_indptr.data), indices.shape[0]);
  for (int64_t r = 0; r < table.kv_len.shape[0]; ++r) {
    const RequestRange rows = ranges.next();
    for (int64_t i = 0; i < rows.count(); ++i) {
      const int64_t t = rows.begin + i;
      const int64_t p = table.position(r, i, rows.count(), t);
      for (int64_t token = table.first_token(p); token <= p; ++token)
        indices(t, row_len(t)++) = table.slot(r, token);
    }
  }
}

}  // namespace fovea::internal
