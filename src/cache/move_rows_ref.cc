#include <cstring>

#include "src/cache/move_rows_impl.h"
#include "src/core/access.h"
#include "src/core/row_layout.h"

namespace fovea::internal {
namespace {

// One token of the pool into a run of row_bytes, or back.
void copy_token(const MoveRowsProblem& problem, const PagedRows<uint8_t>& pool, int32_t slot,
                uint8_t* token, bool into_pool) {
  const auto copy = [&](uint8_t* in_pool, uint8_t* outside, int64_t bytes) {
    std::memcpy(into_pool ? in_pool : outside, into_pool ? outside : in_pool,
                static_cast<size_t>(bytes));
  };
  const int64_t bytes = row_bytes(problem.row_format, problem.width);
  const int64_t first = first_region_bytes(problem.row_format, problem.width);
  if (first > 0) {
    copy(pool.at(slot, first), token, first);
    copy(pool.at(slot, bytes - first, problem.page_size * first), token + first, bytes - first);
  } else {
    copy(pool.record(slot, bytes), token, bytes);
  }
}

}  // namespace

void move_rows_ref(const MoveRowsProblem& problem, const Device&, const MoveRowsTensors& tensors,
                   Workspace workspace) {
  const auto pool = paged_rows<uint8_t>(tensors.pool, problem.page_size);
  const auto src = access<const int32_t, 1>(tensors.src_slots);
  const auto dst = access<const int32_t, 1>(tensors.dst_slots);
  const int64_t bytes = row_bytes(problem.row_format, problem.width);
  auto* const tokens = static_cast<uint8_t*>(workspace.data);
  for (const bool into_pool : {false, true}) {  // all reads, then all writes
    for (int64_t i = 0; i < src.shape[0]; ++i) {
      if (!pool.contains(src(i)) || !pool.contains(dst(i))) continue;
      copy_token(problem, pool, into_pool ? dst(i) : src(i), tokens + i * bytes, into_pool);
    }
  }
}

}  // namespace fovea::internal
