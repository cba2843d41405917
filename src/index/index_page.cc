#include "src/index/index_page.h"

#include <string>

#include "src/core/check.h"

namespace fovea::internal {

void check_index_cache(const char* op, const IndexCacheProblem& problem) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  check_range(op, "max_rows", problem.max_rows, 0, kMax);
  check_range(op, "head_dim", problem.head_dim, 1, kMaxIndexHeadDim);
  check_range(op, "page_size", problem.page_size, 1, kMaxIndexPageSize);
}

void check_index_pool(const char* op, const ConstTensorView& pool, int64_t page_size,
                      int64_t head_dim) {
  check_tensor(op, "index_pool", pool, DType::kU8, {kAnyExtent, kAnyExtent});
  const int64_t needed = index_page_bytes(page_size, head_dim);
  if (pool.shape[1] < needed) {
    invalid(op, "index_pool.shape[1] = " + std::to_string(pool.shape[1]) + ", expected at least " +
                    std::to_string(needed) + " = page_size * (head_dim + 4)");
  }
}

}  // namespace fovea::internal
