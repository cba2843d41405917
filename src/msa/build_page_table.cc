#include "fovea/build_page_table.h"

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/msa/build_page_table_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "build_page_table";

constexpr internal::Implementation<BuildPageTableProblem, BuildPageTableTensors>
    kImplementations[] = {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
         internal::build_page_table_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::build_page_table_cpu_workspace,
         internal::build_page_table_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::build_page_table_ref},
};

const internal::OperatorRegistration kRegistration("msa", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const BuildPageTableProblem& problem) {
  internal::check_range(kOp, "max_requests", problem.max_requests, 0, internal::kMaxInt32);
  internal::check_range(kOp, "max_pages", problem.max_pages, 0, internal::kMaxInt32);
  internal::check_range(kOp, "page_size", problem.page_size, 1, internal::kMaxInt32);
  internal::check_range(kOp, "delta", problem.delta, -internal::kMaxInt32, internal::kMaxInt32);
}

void check_tensors(const BuildPageTableProblem& problem, const BuildPageTableTensors& tensors) {
  using internal::kAnyExtent;
  internal::check_tensor(kOp, "req_to_token", tensors.req_to_token, DType::kI32,
                         {kAnyExtent, kAnyExtent});
  internal::check_tensor(kOp, "pool_row", tensors.pool_row, DType::kI32, {kAnyExtent});
  const int64_t requests = tensors.pool_row.shape[0];
  internal::check_range(kOp, "pool_row.shape[0]", requests, 0, problem.max_requests);
  internal::check_tensor(kOp, "kv_len", tensors.kv_len, DType::kI32, {requests});
  internal::check_tensor(kOp, "page_table", tensors.page_table, DType::kI32,
                         {requests, kAnyExtent});
  const int64_t max_pages = tensors.page_table.shape[1];
  internal::check_range(kOp, "page_table.shape[1]", max_pages, 0, problem.max_pages);
  if (!tensors.kv_indices.defined() && !tensors.kv_page_indptr.defined()) return;
  internal::check_tensor(kOp, "kv_page_indptr", tensors.kv_page_indptr, DType::kI32,
                         {requests + 1});
  internal::check_tensor(kOp, "kv_indices", tensors.kv_indices, DType::kI32, {kAnyExtent});
  internal::check_range(kOp, "kv_indices.shape[0]", tensors.kv_indices.shape[0],
                        requests * max_pages, internal::kMaxInt32);
}

}  // namespace

BuildPageTable BuildPageTable::plan(const BuildPageTableProblem& problem, const Device& device,
                                    const Options& options) {
  check_problem(problem);
  return BuildPageTable(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
