#include "fovea/error.h"
#include "fovea/index_cache.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/index/index_page.h"
#include "src/index/index_store_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "index_store";

constexpr internal::Implementation<IndexCacheProblem, IndexStoreTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
     internal::index_store_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::index_store_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::index_store_ref},
};

const internal::OperatorRegistration kRegistration("index", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_tensors(const IndexCacheProblem& problem, const IndexStoreTensors& tensors) {
  using internal::kAnyExtent;
  internal::check_tensor(kOp, "k_fp8", tensors.k_fp8, DType::kU8, {kAnyExtent, problem.head_dim});
  const int64_t rows = tensors.k_fp8.shape[0];
  internal::check_range(kOp, "k_fp8.shape[0]", rows, 0, problem.max_rows);
  internal::check_tensor(kOp, "k_scale", tensors.k_scale, DType::kF32, {rows});
  const DType slot_type = tensors.slots.dtype == DType::kI64 ? DType::kI64 : DType::kI32;
  internal::check_tensor(kOp, "slots", tensors.slots, slot_type, {rows});
  internal::check_index_pool(kOp, tensors.index_pool, problem.page_size, problem.head_dim);
}

}  // namespace

IndexStore IndexStore::plan(const IndexCacheProblem& problem, const Device& device,
                            const Options& options) {
  internal::check_index_cache(kOp, problem);
  return IndexStore(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
