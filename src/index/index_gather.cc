#include "fovea/error.h"
#include "fovea/index_cache.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/index/index_page.h"
#include "src/index/index_store_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "index_gather";

constexpr internal::Implementation<IndexCacheProblem, IndexGatherTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
     internal::index_gather_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::index_gather_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::index_gather_ref},
};

const internal::OperatorRegistration kRegistration("index", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_tensors(const IndexCacheProblem& problem, const IndexGatherTensors& tensors) {
  using internal::kAnyExtent;
  internal::check_index_pool(kOp, tensors.index_pool, problem.page_size, problem.head_dim);
  internal::check_tensor(kOp, "page_table", tensors.page_table, DType::kI32,
                         {kAnyExtent, kAnyExtent});
  internal::check_tensor(kOp, "kv_indptr", tensors.kv_indptr, DType::kI32,
                         {tensors.page_table.shape[0] + 1});
  internal::check_tensor(kOp, "k_fp8", tensors.k_fp8, DType::kU8, {kAnyExtent, problem.head_dim});
  const int64_t rows = tensors.k_fp8.shape[0];
  internal::check_range(kOp, "k_fp8.shape[0]", rows, 0, problem.max_rows);
  internal::check_tensor(kOp, "k_scale", tensors.k_scale, DType::kF32, {rows});
}

}  // namespace

IndexGather IndexGather::plan(const IndexCacheProblem& problem, const Device& device,
                              const Options& options) {
  internal::check_index_cache(kOp, problem);
  return IndexGather(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
