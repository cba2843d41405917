#include "src/batch/metadata_refresh_impl.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"

namespace fovea {
namespace {

constexpr char kOp[] = "metadata_refresh";

constexpr internal::Implementation<MetadataProblem, MetadataTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr,
     internal::metadata_refresh_cuda_workspace, nullptr, internal::metadata_refresh_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::metadata_refresh_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::metadata_refresh_ref},
};

const internal::OperatorRegistration kRegistration("batch", kOp, [] {
  return internal::list_implementations(kImplementations);
});

// Every bound is a value that some i32 array may have to hold.
using internal::kMaxInt32;

void check_problem(const MetadataProblem& problem) {
  internal::check_mode(kOp, problem.mode);
  internal::check_range(kOp, "max_requests", problem.max_requests, 0, kMaxInt32 - 1);
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMaxInt32 - 1);
  internal::check_range(kOp, "table_width", problem.table_width, 1, kMaxInt32);
  internal::check_range(kOp, "rows_per_request", problem.rows_per_request, 1, kMaxInt32);
  internal::check_range(kOp, "topk", problem.topk, 1, kMaxInt32);
  internal::check_range(kOp, "page_size", problem.page_size, 1, 256);
  internal::check_range(kOp, "workers", problem.workers, 1, kMaxInt32 - 1);
  internal::check_range(kOp, "split_parts", problem.split_parts, 0, kMaxInt32 - problem.max_rows);
  if (to_string(problem.transform).empty()) {
    internal::invalid(kOp, "transform = " + std::to_string(static_cast<int>(problem.transform)) +
                               ", expected local, paged or ragged");
  }
  if (problem.transform == IndexTransform::kRagged && !internal::is_extend(problem.mode)) {
    internal::invalid(kOp, "transform = ragged in mode " + std::string(to_string(problem.mode)) +
                               ", expected extend or mixed; the other modes are paged");
  }
}

// A field must hold at least `extent` entries on its first axis; the text is built on failure only.
void check_field(const char* name, const TensorView& field, int rank, int64_t extent) {
  using internal::kAnyExtent;
  if (rank == 1)
    internal::check_tensor(kOp, name, field, DType::kI32, {kAnyExtent});
  else
    internal::check_tensor(kOp, name, field, DType::kI32, {kAnyExtent, kAnyExtent});
  if (field.shape[0] >= extent) return;
  internal::invalid(kOp, std::string(name) + " = " + to_string(field) + ", expected at least " +
                             std::to_string(extent) + " entries on axis 0");
}

void check_inputs(const MetadataProblem& problem, const MetadataTensors& tensors) {
  internal::check_tensor(kOp, "seq_len", tensors.seq_len, DType::kI32, {internal::kAnyExtent});
  const int64_t requests = tensors.seq_len.shape[0];
  internal::check_range(kOp, "seq_len.shape[0]", requests, 0, problem.max_requests);
  internal::check_tensor(kOp, "pool_row", tensors.pool_row, DType::kI32, {requests});
  internal::check_tensor(kOp, "req_to_token", tensors.req_to_token, DType::kI32,
                         {internal::kAnyExtent, problem.table_width});
  if (internal::reads_ext_len(problem.mode)) {
    internal::check_tensor(kOp, "ext_len", tensors.ext_len, DType::kI32, {requests});
    internal::check_optional(kOp, "prefix_len", tensors.prefix_len, DType::kI32, {requests});
  } else if (tensors.ext_len.defined() || tensors.prefix_len.defined()) {
    internal::invalid(kOp, std::string(tensors.ext_len.defined() ? "ext_len" : "prefix_len") +
                               " is given, but mode " + std::string(to_string(problem.mode)) +
                               " has a fixed number of rows per request; leave it out");
  }
}

void check_fields(const MetadataProblem& problem, const MetadataTensors& tensors,
                  const MetadataFields& fields) {
  const int64_t requests = tensors.seq_len.shape[0];
  check_field("kv_len", fields.kv_len, 1, requests);
  check_field("kv_indptr", fields.kv_indptr, 1, requests + 1);
  check_field("max_kv_len", fields.max_kv_len, 1, 1);
  check_field("q_indptr", fields.q_indptr, 1, requests + 1);
  check_field("max_q_len", fields.max_q_len, 1, 1);
  check_field("page_table", fields.page_table, 2, requests);
  check_field("ext_len", fields.ext_len, 1, requests);
  // Rows that the host knows must fit; those that only ext_len knows are cut to what fits.
  int64_t rows = 0;
  if (internal::is_decode(problem.mode))
    rows = requests;
  else if (!internal::reads_ext_len(problem.mode))
    rows = requests * problem.rows_per_request;
  internal::check_range(kOp, "rows (requests * rows per request)", rows, 0, problem.max_rows);
  if (tensors.padded_rows > 0 && rows > tensors.padded_rows) {
    internal::invalid(kOp, "padded_rows = " + std::to_string(tensors.padded_rows) +
                               ", expected at least the " + std::to_string(rows) +
                               " rows of the batch, or 0");
  }
  const int64_t padded = std::max(rows, tensors.padded_rows);
  check_field("row_to_request", fields.row_to_request, 1, padded);
  check_field("row_len", fields.row_len, 1, rows);
  check_field("topk_length", fields.topk_length, 1, padded);
  check_field("topk_indptr", fields.topk_indptr, 1, padded + 1);
  if (problem.split_parts > 0) {
    internal::check_tensor(kOp, "split_schedule", fields.split_schedule, DType::kI32,
                           {problem.split_parts, 8});
    check_field("split_indptr", fields.split_indptr, 1, padded + 1);
  }
  if (internal::is_extend(problem.mode)) {
    check_field("k_start", fields.k_start, 1, 0);
    check_field("k_end", fields.k_end, 1, 0);
    if (internal::has_row_offset(problem)) check_field("row_offset", fields.row_offset, 1, 0);
  } else {
    internal::check_tensor(kOp, "schedule", fields.schedule, DType::kI32, {problem.workers + 1, 2});
  }
}

}  // namespace

std::string_view to_string(ForwardMode mode) noexcept {
  switch (mode) {
    case ForwardMode::kExtend:
      return "extend";
    case ForwardMode::kDecode:
      return "decode";
    case ForwardMode::kIdle:
      return "idle";
    case ForwardMode::kTargetVerify:
      return "target_verify";
    case ForwardMode::kDraftExtend:
      return "draft_extend";
    case ForwardMode::kDraftExtendV2:
      return "draft_extend_v2";
    case ForwardMode::kMixed:
      return "mixed";
  }
  return "";
}

std::string_view to_string(IndexTransform transform) noexcept {
  switch (transform) {
    case IndexTransform::kLocal:
      return "local";
    case IndexTransform::kPaged:
      return "paged";
    case IndexTransform::kRagged:
      return "ragged";
  }
  return "";
}

std::string_view to_string(ExtendKvSource source) noexcept {
  return source == ExtendKvSource::kCache ? "cache" : "fresh";
}

void internal::check_metadata_tensors(const MetadataProblem& problem,
                                      const MetadataTensors& tensors) {
  check_inputs(problem, tensors);
  internal::check_range(kOp, "padded_rows", tensors.padded_rows, 0, problem.max_rows);
  internal::check_range(kOp, "num_steps", tensors.num_steps, 1, kMaxRefreshSteps);
  for (int i = 0; i < tensors.num_steps; ++i) {
    const auto step = static_cast<size_t>(i);
    if (!internal::is_decode(problem.mode) && tensors.kv_len_delta[step] != 0) {
      internal::invalid(kOp, "kv_len_delta[" + std::to_string(i) +
                                 "] = " + std::to_string(tensors.kv_len_delta[step]) + " in mode " +
                                 std::string(to_string(problem.mode)) +
                                 ", expected 0; only decode steps shift their lengths");
    }
    check_fields(problem, tensors, tensors.steps[step]);
  }
}

MetadataRefresh MetadataRefresh::plan(const MetadataProblem& problem, const Device& device,
                                      const Options& options) {
  check_problem(problem);
  return MetadataRefresh(internal::make_plan(kOp, kImplementations, problem, device, options,
                                             internal::check_metadata_tensors));
}

}  // namespace fovea
