#include <algorithm>

#include "src/core/access.h"
#include "src/index/index_page.h"
#include "src/index/index_store_impl.h"

namespace fovea::internal {

// Row kv_indptr[r] + p of the output is position p of request r.
void index_gather_ref(const IndexCacheProblem& problem, const Device&,
                      const IndexGatherTensors& tensors, Workspace) {
  const IndexPages<const uint8_t> pages(tensors.index_pool, problem.page_size, problem.head_dim);
  const auto page_table = access<const int32_t, 2>(tensors.page_table);
  const auto kv_indptr = access<const int32_t, 1>(tensors.kv_indptr);
  const auto k_fp8 = access<uint8_t, 2>(tensors.k_fp8);
  const auto k_scale = access<float, 1>(tensors.k_scale);
  for (int64_t r = 0; r < page_table.shape[0]; ++r) {
    const int64_t first = kv_indptr(r);
    const int64_t begin = std::max<int64_t>(first, 0);
    const int64_t end = std::min<int64_t>(kv_indptr(r + 1), k_fp8.shape[0]);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t column = (row - first) / problem.page_size;
      const int64_t offset = (row - first) % problem.page_size;
      const int64_t page = column < page_table.shape[1] ? page_table(r, column) : -1;
      const bool held = pages.holds(page);
      for (int64_t d = 0; d < problem.head_dim; ++d) {
        k_fp8(row, d) = held ? pages.codes(page, offset)[d] : uint8_t{0};
      }
      k_scale(row) = held ? load_scale(pages.scale(page, offset)) : 0.0f;
    }
  }
}

}  // namespace fovea::internal
