#include "src/core/access.h"
#include "src/index/index_page.h"
#include "src/index/index_store_impl.h"

namespace fovea::internal {
namespace {

template <class Slot>
void store(const IndexCacheProblem& problem, const IndexStoreTensors& tensors) {
  const auto k_fp8 = access<const uint8_t, 2>(tensors.k_fp8);
  const auto k_scale = access<const float, 1>(tensors.k_scale);
  const auto slots = access<const Slot, 1>(tensors.slots);
  const IndexPages<uint8_t> pages(tensors.index_pool, problem.page_size, problem.head_dim);
  for (int64_t t = 0; t < slots.shape[0]; ++t) {
    const int64_t slot = slots(t);
    if (slot < 0 || slot >= pages.num_pages * problem.page_size) continue;
    uint8_t* codes = pages.codes(slot / problem.page_size, slot % problem.page_size);
    for (int64_t d = 0; d < problem.head_dim; ++d) codes[d] = k_fp8(t, d);
    store_scale(k_scale(t), pages.scale(slot / problem.page_size, slot % problem.page_size));
  }
}

}  // namespace

// Token t goes to slot s = slots[t]: page s / P, offset s % P.
void index_store_ref(const IndexCacheProblem& problem, const Device&,
                     const IndexStoreTensors& tensors, Workspace) {
  if (tensors.slots.dtype == DType::kI64)
    store<int64_t>(problem, tensors);
  else
    store<int32_t>(problem, tensors);
}

}  // namespace fovea::internal
