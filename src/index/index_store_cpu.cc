#include <cstring>

#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/index/index_page.h"
#include "src/index/index_store_impl.h"

namespace fovea::internal {
namespace {

// A row is two copies of a few cache lines; 64 rows (8 KiB) are worth a task.
constexpr int64_t kRowsPerPiece = 64;

template <class Slot>
void store(const IndexCacheProblem& problem, const Device& device,
           const IndexStoreTensors& tensors) {
  const auto k_fp8 = access<const uint8_t, 2>(tensors.k_fp8);
  const auto k_scale = access<const float, 1>(tensors.k_scale);
  const auto slots = access<const Slot, 1>(tensors.slots);
  const IndexPages<uint8_t> pages(tensors.index_pool, problem.page_size, problem.head_dim);
  const int64_t num_slots = pages.num_pages * problem.page_size;
  const auto code_bytes = static_cast<size_t>(problem.head_dim);
  const ThreadScope threads(device.num_threads);
  ParallelFor(slots.shape[0], kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = slots(t);
      if (slot < 0 || slot >= num_slots) continue;
      const int64_t page = slot / problem.page_size;
      const int64_t offset = slot - page * problem.page_size;
      std::memcpy(pages.codes(page, offset), k_fp8.row(t), code_bytes);
      store_scale(k_scale(t), pages.scale(page, offset));
    }
  });
}

}  // namespace

void index_store_cpu(const IndexCacheProblem& problem, const Device& device,
                     const IndexStoreTensors& tensors, Workspace) {
  if (tensors.slots.dtype == DType::kI64)
    store<int64_t>(problem, device, tensors);
  else
    store<int32_t>(problem, device, tensors);
}

}  // namespace fovea::internal
