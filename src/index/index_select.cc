#include "fovea/index_select.h"

#include <limits>
#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/index/index_logits_impl.h"
#include "src/index/index_page.h"
#include "src/index/index_select_driver.h"
#include "src/index/topk_select_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "index_select";

// An implementation of the CPU as the driver calls it.
template <auto run, class Problem, class Tensors>
void on_cpu(const Problem& problem, const Device& device, const Tensors& tensors,
            Workspace workspace, Stream) {
  run(problem, device, tensors, workspace);
}

// Logits of a chunk that stay in the last cache between scoring and selection.
constexpr int64_t kCachedLogitsBytes = int64_t{32} << 20;

constexpr internal::IndexSelectParts kBf16Parts = {
    .logits = on_cpu<internal::index_logits_avx512bf16>,
    .logits_workspace = internal::index_logits_avx512bf16_bytes,
    .topk = on_cpu<internal::topk_select_cpu>,
    .topk_workspace = internal::topk_select_cpu_workspace,
    .chunk_bytes = kCachedLogitsBytes};
constexpr internal::IndexSelectParts kCpuParts = {
    .logits = on_cpu<internal::index_logits_cpu>,
    .logits_workspace = internal::index_logits_cpu_bytes,
    .topk = on_cpu<internal::topk_select_cpu>,
    .topk_workspace = internal::topk_select_cpu_workspace,
    .chunk_bytes = kCachedLogitsBytes};
constexpr internal::IndexSelectParts kRefParts = {
    .logits = on_cpu<internal::index_logits_ref>,
    .logits_workspace = nullptr,
    .topk = on_cpu<internal::topk_select_ref>,
    .topk_workspace = internal::topk_select_ref_workspace,
    .chunk_bytes = kCachedLogitsBytes};
// A GPU is filled by as many rows as the budget allows.
constexpr internal::IndexSelectParts cuda_parts(decltype(internal::IndexSelectParts::logits) logits,
                                                decltype(internal::IndexSelectParts::topk) topk) {
  return {.logits = logits,
          .logits_workspace = nullptr,
          .topk = topk,
          .topk_workspace = internal::topk_select_cuda_workspace,
          .fill = internal::fill_index_select_chunk_cuda,
          .chunk_bytes = std::numeric_limits<int64_t>::max()};
}
constexpr internal::IndexSelectParts kSm90Parts =
    cuda_parts(internal::index_logits_cuda_sm90, internal::topk_select_cuda_sm90);
constexpr internal::IndexSelectParts kCudaParts =
    cuda_parts(internal::index_logits_cuda_portable, internal::topk_select_cuda_portable);

template <const internal::IndexSelectParts& parts>
size_t workspace_of(const IndexSelectProblem& problem, const Device& device) {
  return internal::index_select_workspace(problem, device, parts);
}

template <const internal::IndexSelectParts& parts>
void launch_with(const IndexSelectProblem& problem, const Device& device,
                 const IndexSelectTensors& tensors, Workspace workspace, Stream stream) {
  internal::run_index_select(problem, device, tensors, workspace, stream, parts);
}

template <const internal::IndexSelectParts& parts>
void run_with(const IndexSelectProblem& problem, const Device& device,
              const IndexSelectTensors& tensors, Workspace workspace) {
  internal::run_index_select(problem, device, tensors, workspace, {}, parts);
}

// What an implementation of index_logits says of its part.
template <internal::Refusal (*of_part)(const IndexLogitsProblem&)>
internal::Refusal of_logits(const IndexSelectProblem& problem) {
  return of_part(internal::index_select_logits_problem(problem));
}

constexpr internal::Implementation<IndexSelectProblem, IndexSelectTensors> kImplementations[] = {
    {"cuda_sm90", DeviceKind::kCuda, internal::cuda_sm90_available,
     of_logits<internal::index_logits_cuda_sm90_supports>, workspace_of<kSm90Parts>, nullptr,
     launch_with<kSm90Parts>, of_logits<internal::index_logits_cuda_sm90_preferred>},
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr,
     workspace_of<kCudaParts>, nullptr, launch_with<kCudaParts>},
    {"cpu_avx512bf16", DeviceKind::kCpu, internal::index_logits_avx512bf16_available, nullptr,
     workspace_of<kBf16Parts>, run_with<kBf16Parts>},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, workspace_of<kCpuParts>, run_with<kCpuParts>},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, workspace_of<kRefParts>, run_with<kRefParts>},
};

const internal::OperatorRegistration kRegistration("index", kOp, [] {
  return internal::list_implementations(kImplementations);
});

bool uses_pages(const IndexSelectProblem& problem) { return problem.layout == IndexLayout::kPaged; }

void check_problem(const IndexSelectProblem& problem) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  internal::check_topk_select_problem(kOp, internal::index_select_topk_problem(problem));
  if (problem.layout != IndexLayout::kRagged && problem.layout != IndexLayout::kPaged) {
    internal::invalid(kOp, "layout = " + std::to_string(static_cast<int>(problem.layout)) +
                               ", expected IndexLayout::kRagged or IndexLayout::kPaged");
  }
  internal::check_range(kOp, "num_heads", problem.num_heads, 1, internal::kMaxIndexHeads);
  internal::check_range(kOp, "head_dim", problem.head_dim, 1, internal::kMaxIndexHeadDim);
  internal::check_range(kOp, "logits_budget_bytes", problem.logits_budget_bytes, 1, kMax);
  if (uses_pages(problem)) {
    internal::check_range(kOp, "page_size", problem.page_size, 1, internal::kMaxIndexPageSize);
  }
}

void check_keys(const IndexSelectProblem& problem, const IndexSelectTensors& tensors,
                int64_t live_rows) {
  using internal::kAnyExtent;
  if (uses_pages(problem)) {
    internal::check_index_pool(kOp, tensors.index_pool, problem.page_size, problem.head_dim);
    internal::check_tensor(kOp, "page_table", tensors.page_table, DType::kI32,
                           {kAnyExtent, kAnyExtent});
    internal::check_tensor(kOp, "row_len", tensors.row_len, DType::kI32, {live_rows});
    internal::check_tensor(kOp, "row_to_request", tensors.row_to_request, DType::kI32,
                           {kAnyExtent});
    internal::check_range(kOp, "row_to_request.shape[0]", tensors.row_to_request.shape[0],
                          live_rows, tensors.indices.shape[0]);
    internal::check_optional(kOp, "schedule", tensors.schedule, DType::kI32, {kAnyExtent, 2});
    return;
  }
  internal::check_tensor(kOp, "k_fp8", tensors.k_fp8, DType::kU8, {kAnyExtent, problem.head_dim});
  internal::check_tensor(kOp, "k_scale", tensors.k_scale, DType::kF32, {tensors.k_fp8.shape[0]});
  internal::check_tensor(kOp, "k_start", tensors.k_start, DType::kI32, {live_rows});
  internal::check_tensor(kOp, "k_end", tensors.k_end, DType::kI32, {live_rows});
}

void check_tensors(const IndexSelectProblem& problem, const IndexSelectTensors& tensors) {
  using internal::kAnyExtent;
  internal::check_tensor(kOp, "q_fp8", tensors.q_fp8, DType::kU8,
                         {kAnyExtent, problem.num_heads, problem.head_dim});
  const int64_t live_rows = tensors.q_fp8.shape[0];
  internal::check_tensor(kOp, "head_weight", tensors.head_weight, DType::kF32,
                         {live_rows, problem.num_heads});
  TopkSelectTensors mapped;
  mapped.row_to_request = tensors.row_to_request;
  mapped.token_table = tensors.token_table;
  // A paged layout needs the page table for its keys, whatever the transform uses.
  if (!uses_pages(problem) || !tensors.token_table.defined()) {
    mapped.page_table = tensors.page_table;
  }
  mapped.row_offset = tensors.row_offset;
  mapped.indices = tensors.indices;
  internal::check_topk_transform_tensors(kOp, internal::index_select_topk_problem(problem), mapped,
                                         live_rows);
  check_keys(problem, tensors, live_rows);
}

}  // namespace

IndexSelect IndexSelect::plan(const IndexSelectProblem& problem, const Device& device,
                              const Options& options) {
  check_problem(problem);
  return IndexSelect(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
