#include "fovea/metadata_check.h"

#include "src/batch/metadata_check_impl.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"

namespace fovea {
namespace {

constexpr char kOp[] = "metadata_check";

constexpr internal::Implementation<MetadataCheckProblem, MetadataCheckTensors> kImplementations[] =
    {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr,
         internal::metadata_check_cuda_workspace, nullptr, internal::metadata_check_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::metadata_check_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::metadata_check_ref},
};

const internal::OperatorRegistration kRegistration("batch", kOp, [] {
  return internal::list_implementations(kImplementations);
});

using internal::kMaxInt32;

void check_problem(const MetadataCheckProblem& problem) {
  internal::check_mode(kOp, problem.mode);
  internal::check_range(kOp, "max_requests", problem.max_requests, 0, kMaxInt32 - 1);
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMaxInt32 - 1);
  internal::check_range(kOp, "table_width", problem.table_width, 1, kMaxInt32);
  internal::check_range(kOp, "rows_per_request", problem.rows_per_request, 1, kMaxInt32);
  internal::check_range(kOp, "page_size", problem.page_size, 1, 256);
  internal::check_range(kOp, "topk", problem.topk, 0, kMaxInt32);
  internal::check_range(kOp, "capacity", problem.capacity, 0, kMaxInt32);
}

// Rows that the host knows must fit the arrays of rows; what only ext_len knows is reported.
void check_known_rows(const MetadataCheckProblem& problem, const MetadataCheckTensors& tensors) {
  if (internal::reads_ext_len(problem.mode)) return;
  const int64_t per_request = internal::is_decode(problem.mode) ? 1 : problem.rows_per_request;
  const int64_t rows = tensors.seq_len.shape[0] * per_request;
  internal::check_range(kOp, "rows (requests * rows per request)", rows, 0, problem.max_rows);
  const auto check_rows = [&](const char* name, const ConstTensorView& tensor) {
    if (!tensor.defined() || tensor.shape[0] >= rows) return;
    internal::invalid(kOp, std::string(name) + " = " + to_string(tensor) + ", expected at least " +
                               std::to_string(rows) + " rows");
  };
  check_rows("out_cache_loc", tensors.out_cache_loc);
  check_rows("topk_indices", tensors.topk_indices);
}

void check_tensors(const MetadataCheckProblem& problem, const MetadataCheckTensors& tensors) {
  using internal::kAnyExtent;
  internal::check_tensor(kOp, "seq_len", tensors.seq_len, DType::kI32, {kAnyExtent});
  const int64_t requests = tensors.seq_len.shape[0];
  internal::check_range(kOp, "seq_len.shape[0]", requests, 0, problem.max_requests);
  internal::check_tensor(kOp, "pool_row", tensors.pool_row, DType::kI32, {requests});
  internal::check_tensor(kOp, "req_to_token", tensors.req_to_token, DType::kI32,
                         {kAnyExtent, problem.table_width});
  if (internal::reads_ext_len(problem.mode)) {
    internal::check_tensor(kOp, "ext_len", tensors.ext_len, DType::kI32, {requests});
  } else if (tensors.ext_len.defined()) {
    internal::invalid(kOp, "ext_len is given, but mode " + std::string(to_string(problem.mode)) +
                               " has a fixed number of rows per request; leave it out");
  }
  if (!internal::is_decode(problem.mode) && tensors.kv_len_delta != 0) {
    internal::invalid(kOp, "kv_len_delta = " + std::to_string(tensors.kv_len_delta) + " in mode " +
                               std::string(to_string(problem.mode)) +
                               ", expected 0; only decode steps shift their lengths");
  }
  internal::check_optional(kOp, "out_cache_loc", tensors.out_cache_loc, DType::kI32, {kAnyExtent});
  if (tensors.topk_indices.defined() && problem.topk == 0) {
    internal::invalid(kOp, "topk_indices is given, but the plan has topk = 0; plan with its width");
  }
  internal::check_optional(kOp, "topk_indices", tensors.topk_indices, DType::kI32,
                           {kAnyExtent, problem.topk});
  check_known_rows(problem, tensors);
  internal::check_tensor(kOp, "error_word", tensors.error_word, DType::kI32, {8});
}

}  // namespace

std::string_view to_string(MetadataFault fault) noexcept {
  switch (fault) {
    case MetadataFault::kNone:
      return "none";
    case MetadataFault::kNegativeLength:
      return "negative_length";
    case MetadataFault::kRowsOverLength:
      return "rows_over_length";
    case MetadataFault::kLengthOverWidth:
      return "length_over_width";
    case MetadataFault::kNegativeRows:
      return "negative_rows";
    case MetadataFault::kRowCount:
      return "row_count";
    case MetadataFault::kPoolRow:
      return "pool_row";
    case MetadataFault::kSlotRange:
      return "slot_range";
    case MetadataFault::kSlotLayout:
      return "slot_layout";
    case MetadataFault::kStoreSlot:
      return "store_slot";
    case MetadataFault::kIndexRange:
      return "index_range";
  }
  return "";
}

std::string to_string(const MetadataReport& report) {
  const std::string request = "request " + std::to_string(report.request);
  const std::string row = "row " + std::to_string(report.request);
  const std::string position = std::to_string(report.position);
  const std::string value = std::to_string(report.value), limit = std::to_string(report.limit);
  const std::string outside = " is outside the capacity of " + limit;
  const auto such = [&](const char* one, const char* many) {
    return " (" + std::to_string(report.count) + " such " + (report.count == 1 ? one : many) + ")";
  };
  switch (report.fault) {
    case MetadataFault::kNone:
      return "";
    case MetadataFault::kNegativeLength:
      return request + ": length " + value + " is negative" + such("length", "lengths");
    case MetadataFault::kRowsOverLength:
      return request + ": " + value + " rows are more than its length of " + limit +
             such("request", "requests");
    case MetadataFault::kLengthOverWidth:
      return request + ": length " + value + " is over the table width of " + limit +
             such("length", "lengths");
    case MetadataFault::kNegativeRows:
      return request + ": ext_len " + value + " is negative" + such("request", "requests");
    case MetadataFault::kRowCount:
      return request + ": " + value + " rows up to its end are more than the " + limit +
             " of the arrays" + such("request", "requests");
    case MetadataFault::kPoolRow:
      return request + ": pool row " + value + " is outside the " + limit +
             " rows of req_to_token" + such("row", "rows");
    case MetadataFault::kSlotRange:
      return request + ", position " + position + ": slot " + value + outside +
             such("slot", "slots");
    case MetadataFault::kSlotLayout:
      return request + ", position " + position + ": slot " + value + " is not slot " + limit +
             ", its place in the page of its first slot" + such("slot", "slots");
    case MetadataFault::kStoreSlot:
      return row + ": slot " + value + " of out_cache_loc" + outside + such("slot", "slots");
    case MetadataFault::kIndexRange:
      return row + ", column " + position + ": index " + value + outside + such("index", "indices");
  }
  return "unknown fault " + std::to_string(static_cast<int32_t>(report.fault));
}

MetadataCheck MetadataCheck::plan(const MetadataCheckProblem& problem, const Device& device,
                                  const Options& options) {
  check_problem(problem);
  return MetadataCheck(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
