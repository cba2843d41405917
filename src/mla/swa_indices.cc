#include "fovea/swa_indices.h"

#include <limits>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/mla/swa_indices_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "build_swa_indices";

constexpr internal::Implementation<SwaIndicesProblem, SwaIndicesTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr,
     internal::swa_indices_cuda_workspace, nullptr, internal::swa_indices_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::swa_indices_cpu_workspace,
     internal::swa_indices_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::swa_indices_ref},
};

const internal::OperatorRegistration kRegistration("mla", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const SwaIndicesProblem& problem) {
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, internal::kMaxInt32);
  internal::check_range(kOp, "max_requests", problem.max_requests, 0, internal::kMaxInt32);
  internal::check_range(kOp, "window", problem.window, 1, internal::kMaxInt32);
  internal::check_range(kOp, "width", problem.width, problem.window, internal::kMaxInt32);
  internal::check_range(kOp, "page_size", problem.page_size, 1, internal::kMaxInt32);
  internal::check_range(kOp, "pages", problem.pages, -1, std::numeric_limits<int64_t>::max());
}

void check_tensors(const SwaIndicesProblem& problem, const SwaIndicesTensors& tensors) {
  using internal::check_tensor;
  using internal::kAnyExtent;
  check_tensor(kOp, "kv_len", tensors.kv_len, DType::kI32, {kAnyExtent});
  const int64_t requests = tensors.kv_len.shape[0];
  internal::check_range(kOp, "kv_len.shape[0]", requests, 0, problem.max_requests);
  check_tensor(kOp, "q_indptr", tensors.q_indptr, DType::kI32, {requests + 1});
  const bool is_ring = problem.storage == WindowStorage::kRing;
  check_tensor(kOp, "page_table", tensors.page_table, DType::kI32,
               {requests, is_ring ? 1 : kAnyExtent});
  check_tensor(kOp, "indices", tensors.indices, DType::kI32, {kAnyExtent, problem.width});
  const int64_t rows = tensors.indices.shape[0];
  internal::check_range(kOp, "indices.shape[0]", rows, 0, problem.max_rows);
  check_tensor(kOp, "row_len", tensors.row_len, DType::kI32, {rows});
  internal::check_optional(kOp, "row_valid", tensors.row_valid, DType::kU8, {rows});
}

}  // namespace

BuildSwaIndices BuildSwaIndices::plan(const SwaIndicesProblem& problem, const Device& device,
                                      const Options& options) {
  check_problem(problem);
  return BuildSwaIndices(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
