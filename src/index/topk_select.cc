#include "fovea/topk_select.h"

#include <limits>
#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/index/topk_select_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "topk_select";

constexpr internal::Implementation<TopkSelectProblem, TopkSelectTensors> kImplementations[] = {
    {"cuda_sm90", DeviceKind::kCuda, internal::cuda_sm90_available, nullptr,
     internal::topk_select_cuda_workspace, nullptr, internal::topk_select_cuda_sm90},
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr,
     internal::topk_select_cuda_workspace, nullptr, internal::topk_select_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::topk_select_cpu_workspace,
     internal::topk_select_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::topk_select_ref_workspace,
     internal::topk_select_ref},
};

const internal::OperatorRegistration kRegistration("index", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_tensors(const TopkSelectProblem& problem, const TopkSelectTensors& tensors) {
  using internal::kAnyExtent;
  internal::check_tensor(kOp, "row_len", tensors.row_len, DType::kI32, {kAnyExtent});
  const int64_t live_rows = tensors.row_len.shape[0];
  internal::check_tensor(kOp, "logits", tensors.logits, DType::kF32, {live_rows, kAnyExtent});
  internal::check_range(kOp, "logits.shape[1]", tensors.logits.shape[1], 0, problem.max_width);
  internal::check_optional(kOp, "row_start", tensors.row_start, DType::kI32, {live_rows});
  internal::check_topk_transform_tensors(kOp, problem, tensors, live_rows);
  if (problem.transform == IndexTransform::kPaged && tensors.token_table.defined() &&
      problem.page_size > 1) {
    internal::invalid(kOp, "page_size = " + std::to_string(problem.page_size) +
                               " with a token_table, expected 0 or 1: its entries are slots; plan "
                               "without it or pass a page_table");
  }
}

}  // namespace

namespace internal {
namespace {

// An array of the live rows that may also cover the padding rows.
void check_row_array(const char* op, const char* name, const ConstTensorView& tensor,
                     int64_t live_rows, int64_t rows) {
  check_tensor(op, name, tensor, DType::kI32, {kAnyExtent});
  if (tensor.shape[0] < live_rows || tensor.shape[0] > rows) {
    invalid(op, std::string(name) + ".shape[0] = " + std::to_string(tensor.shape[0]) +
                    ", expected the live rows, " + std::to_string(live_rows) +
                    ", or up to the rows of indices, " + std::to_string(rows));
  }
}

void check_paged(const char* op, const TopkSelectProblem& problem, const TopkSelectTensors& tensors,
                 int64_t live_rows) {
  const int64_t rows = tensors.indices.shape[0];
  const bool by_token = tensors.token_table.defined();
  if (by_token && tensors.page_table.defined()) {
    invalid(op, "page_table and token_table are both given, expected one; leave the other out");
  }
  if (!by_token && !tensors.page_table.defined()) {
    invalid(op,
            "page_table is missing, expected i32 [any, any] (or a token_table) for the paged "
            "transform");
  }
  check_tensor(op, by_token ? "token_table" : "page_table",
               by_token ? tensors.token_table : tensors.page_table, DType::kI32,
               {kAnyExtent, kAnyExtent});
  if (!by_token && problem.page_size < 1) {
    invalid(op, "page_size = " + std::to_string(problem.page_size) +
                    ", expected >= 1 with a page_table; plan with it or pass a token_table");
  }
  if (!by_token || tensors.row_to_request.defined()) {
    check_row_array(op, "row_to_request", tensors.row_to_request, live_rows, rows);
  } else {
    check_range(op, "token_table.shape[0] (without row_to_request)", tensors.token_table.shape[0],
                0, rows);
  }
}

}  // namespace

void check_topk_select_problem(const char* op, const TopkSelectProblem& problem) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMaxIndex = std::numeric_limits<int32_t>::max();
  check_range(op, "max_rows", problem.max_rows, 0, kMax);
  check_range(op, "max_width", problem.max_width, 0, kMaxIndex);
  check_range(op, "topk", problem.topk, 0, kMaxIndex);
  check_range(op, "page_size", problem.page_size, 0, kMaxIndex);
  switch (problem.transform) {
    case IndexTransform::kLocal:
    case IndexTransform::kPaged:
    case IndexTransform::kRagged:
      return;
  }
  invalid(op, "transform = " + std::to_string(static_cast<int>(problem.transform)) +
                  ", expected local, paged or ragged");
}

void check_topk_transform_tensors(const char* op, const TopkSelectProblem& problem,
                                  const TopkSelectTensors& tensors, int64_t live_rows) {
  check_tensor(op, "indices", tensors.indices, DType::kI32, {kAnyExtent, problem.topk});
  const int64_t rows = tensors.indices.shape[0];
  check_range(op, "indices.shape[0]", rows, live_rows, problem.max_rows);
  if (problem.transform == IndexTransform::kPaged) check_paged(op, problem, tensors, live_rows);
  if (problem.transform == IndexTransform::kRagged) {
    check_row_array(op, "row_offset", tensors.row_offset, live_rows, rows);
  }
}

}  // namespace internal

TopkSelect TopkSelect::plan(const TopkSelectProblem& problem, const Device& device,
                            const Options& options) {
  internal::check_topk_select_problem(kOp, problem);
  return TopkSelect(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
