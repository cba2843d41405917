#include "fovea/index_logits.h"

#include <limits>
#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/index/index_logits_impl.h"
#include "src/index/index_page.h"

namespace fovea {
namespace {

constexpr char kOp[] = "index_logits";

constexpr internal::Implementation<IndexLogitsProblem, IndexLogitsTensors> kImplementations[] = {
    {"cuda_sm90", DeviceKind::kCuda, internal::cuda_sm90_available,
     internal::index_logits_cuda_sm90_supports, nullptr, nullptr, internal::index_logits_cuda_sm90,
     internal::index_logits_cuda_sm90_preferred},
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
     internal::index_logits_cuda_portable},
    {"cpu_avx512bf16", DeviceKind::kCpu, internal::index_logits_avx512bf16_available, nullptr,
     internal::index_logits_avx512bf16_bytes, internal::index_logits_avx512bf16},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::index_logits_cpu_bytes,
     internal::index_logits_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::index_logits_ref},
};

const internal::OperatorRegistration kRegistration("index", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const IndexLogitsProblem& problem) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  if (problem.layout != IndexLayout::kRagged && problem.layout != IndexLayout::kPaged) {
    internal::invalid(kOp, "layout = " + std::to_string(static_cast<int>(problem.layout)) +
                               ", expected IndexLayout::kRagged or IndexLayout::kPaged");
  }
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMax);
  internal::check_range(kOp, "num_heads", problem.num_heads, 1, internal::kMaxIndexHeads);
  internal::check_range(kOp, "head_dim", problem.head_dim, 1, internal::kMaxIndexHeadDim);
  if (problem.layout == IndexLayout::kPaged) {
    internal::check_range(kOp, "page_size", problem.page_size, 1, internal::kMaxIndexPageSize);
  }
}

void check_ragged(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors,
                  int64_t rows) {
  using internal::kAnyExtent;
  internal::check_tensor(kOp, "k_fp8", tensors.k_fp8, DType::kU8, {kAnyExtent, problem.head_dim});
  internal::check_tensor(kOp, "k_scale", tensors.k_scale, DType::kF32, {tensors.k_fp8.shape[0]});
  internal::check_tensor(kOp, "k_start", tensors.k_start, DType::kI32, {rows});
  internal::check_tensor(kOp, "k_end", tensors.k_end, DType::kI32, {rows});
}

void check_paged(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors,
                 int64_t rows) {
  using internal::kAnyExtent;
  internal::check_index_pool(kOp, tensors.index_pool, problem.page_size, problem.head_dim);
  internal::check_tensor(kOp, "page_table", tensors.page_table, DType::kI32,
                         {kAnyExtent, kAnyExtent});
  internal::check_tensor(kOp, "row_to_request", tensors.row_to_request, DType::kI32, {rows});
  internal::check_tensor(kOp, "row_len", tensors.row_len, DType::kI32, {rows});
  internal::check_optional(kOp, "schedule", tensors.schedule, DType::kI32, {kAnyExtent, 2});
}

void check_tensors(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors) {
  using internal::kAnyExtent;
  internal::check_tensor(kOp, "q_fp8", tensors.q_fp8, DType::kU8,
                         {kAnyExtent, problem.num_heads, problem.head_dim});
  const int64_t rows = tensors.q_fp8.shape[0];
  internal::check_range(kOp, "q_fp8.shape[0]", rows, 0, problem.max_rows);
  internal::check_tensor(kOp, "head_weight", tensors.head_weight, DType::kF32,
                         {rows, problem.num_heads});
  if (problem.layout == IndexLayout::kRagged)
    check_ragged(problem, tensors, rows);
  else
    check_paged(problem, tensors, rows);
  internal::check_tensor(kOp, "logits", tensors.logits, DType::kF32, {rows, kAnyExtent});
}

}  // namespace

namespace internal {

Refusal index_logits_cuda_sm90_supports(const IndexLogitsProblem& problem) {
  if (problem.num_heads > 64)
    return "needs num_heads <= 64, got " + std::to_string(problem.num_heads);
  if (problem.head_dim > 128)
    return "needs head_dim <= 128, got " + std::to_string(problem.head_dim);
  return {};
}

Refusal index_logits_cuda_sm90_preferred(const IndexLogitsProblem& problem) {
  if (problem.num_heads <= 16 || problem.head_dim != 128) {
    return "multiplies 64 heads of 128 channels, got " + std::to_string(problem.num_heads) +
           " of " + std::to_string(problem.head_dim);
  }
  const int64_t page = problem.page_size;
  if (problem.layout == IndexLayout::kPaged && (page < 16 || (page & (page - 1)) != 0)) {
    return "reads pages of 16, 32, 64, 128 or 256 keys by 16 bytes, others byte by byte, got "
           "page_size " +
           std::to_string(page);
  }
  return {};
}

}  // namespace internal

IndexLogits IndexLogits::plan(const IndexLogitsProblem& problem, const Device& device,
                              const Options& options) {
  check_problem(problem);
  return IndexLogits(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
