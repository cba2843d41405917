#include "fovea/device_memory.h"
#include "fovea/stream.h"
#include "src/batch/metadata_refresh_impl.h"
#include "src/core/check.h"
#include "src/core/workspace.h"

namespace fovea {
namespace {

constexpr char kOp[] = "metadata_refresh";

// How much of a field a refresh writes.
enum class Extent : uint8_t { kOne, kRequests, kRequestSums, kPages, kRows, kRowSums, kWhole };

struct Field {
  const char* name;
  TensorView MetadataFields::*view;
  Extent extent;
};

constexpr Field kFields[] = {
    {"kv_len", &MetadataFields::kv_len, Extent::kRequests},
    {"kv_indptr", &MetadataFields::kv_indptr, Extent::kRequestSums},
    {"max_kv_len", &MetadataFields::max_kv_len, Extent::kOne},
    {"q_indptr", &MetadataFields::q_indptr, Extent::kRequestSums},
    {"max_q_len", &MetadataFields::max_q_len, Extent::kOne},
    {"page_table", &MetadataFields::page_table, Extent::kPages},
    {"row_to_request", &MetadataFields::row_to_request, Extent::kRows},
    {"row_len", &MetadataFields::row_len, Extent::kRows},
    {"topk_length", &MetadataFields::topk_length, Extent::kRows},
    {"topk_indptr", &MetadataFields::topk_indptr, Extent::kRowSums},
    {"ext_len", &MetadataFields::ext_len, Extent::kRequests},
    {"k_start", &MetadataFields::k_start, Extent::kRows},
    {"k_end", &MetadataFields::k_end, Extent::kRows},
    {"row_offset", &MetadataFields::row_offset, Extent::kRows},
    {"schedule", &MetadataFields::schedule, Extent::kWhole},
    {"split_schedule", &MetadataFields::split_schedule, Extent::kWhole},
    {"split_indptr", &MetadataFields::split_indptr, Extent::kRowSums},
};

bool has_field(const MetadataProblem& problem, const Field& field) {
  const auto is = [&](auto... views) { return ((field.view == views) || ...); };
  if (is(&MetadataFields::k_start, &MetadataFields::k_end)) {
    return internal::is_extend(problem.mode);
  }
  if (is(&MetadataFields::row_offset)) return internal::has_row_offset(problem);
  if (is(&MetadataFields::schedule)) return !internal::is_extend(problem.mode);
  if (is(&MetadataFields::split_schedule, &MetadataFields::split_indptr)) {
    return problem.split_parts > 0;
  }
  return true;
}

int64_t table_columns(const MetadataProblem& problem) {
  return (problem.table_width + problem.page_size - 1) / problem.page_size;
}

// The part of a step's field that a refresh may write, as a packed shape.
TensorShape written_shape(const MetadataProblem& problem, const MetadataTensors& tensors,
                          const Field& field, const TensorView& view) {
  const int64_t requests = tensors.seq_len.shape[0];
  switch (field.extent) {
    case Extent::kOne:
      return packed_shape(DType::kI32, {1});
    case Extent::kRequests:
      return packed_shape(DType::kI32, {requests});
    case Extent::kRequestSums:
      return packed_shape(DType::kI32, {requests + 1});
    case Extent::kPages:
      return packed_shape(DType::kI32, {requests, std::min(view.shape[1], table_columns(problem))});
    case Extent::kRows:
      return packed_shape(DType::kI32, {internal::written_rows(tensors, view.shape[0])});
    case Extent::kRowSums:
      return packed_shape(DType::kI32, {internal::written_rows(tensors, view.shape[0] - 1) + 1});
    case Extent::kWhole:
      break;
  }
  return packed_shape(DType::kI32, {view.shape[0], view.shape[1]});
}

// Entries of one step at the bounds.
int64_t scratch_entries(const MetadataProblem& problem) {
  return 4 * (problem.max_requests + 1) + problem.max_requests * table_columns(problem) +
         8 * (problem.max_rows + 1) + 2 * (problem.workers + 1) + 8 * problem.split_parts + 2;
}

size_t entry_bytes(int64_t entries) {
  if (entries > (int64_t{1} << 60)) {
    throw Error(ErrorCode::kOutOfMemory,
                std::string(kOp) + ": verification at these bounds needs scratch for " +
                    std::to_string(entries) + " entries; use smaller bounds");
  }
  return static_cast<size_t>(entries) * sizeof(int32_t);
}

struct Comparison {
  int64_t compared = 0;
  int64_t differing = 0;
  int64_t row = 0, column = 0;  // of the first difference
  int32_t found = 0, expected = 0;

  void add(const int32_t* actual, const int32_t* reference, int64_t count, int64_t row_index) {
    compared += count;
    for (int64_t i = 0; i < count; ++i) {
      if (actual[i] == reference[i]) continue;
      if (differing++ > 0) continue;
      row = row_index;
      column = i;
      found = actual[i];
      expected = reference[i];
    }
  }
};

Comparison compare(const MetadataProblem& problem, const Field& field, const TensorView& actual,
                   const TensorView& reference, const MetadataFields& reference_fields) {
  Comparison result;
  const auto data = [](const TensorView& view, int64_t row) {
    return static_cast<const int32_t*>(view.data) + row * view.stride[0];
  };
  if (reference.rank == 1) {
    result.add(data(actual, 0), data(reference, 0), reference.shape[0], 0);
    return result;
  }
  const auto* kv_len = static_cast<const int32_t*>(reference_fields.kv_len.data);
  for (int64_t r = 0; r < reference.shape[0]; ++r) {
    int64_t columns = reference.shape[1];
    if (field.extent == Extent::kPages) {
      columns = (kv_len[r] + problem.page_size - 1) / problem.page_size;
    }
    result.add(data(actual, r), data(reference, r), columns, r);
  }
  return result;
}

[[noreturn]] void mismatch(int step, const Field& field, int rank, const Comparison& result) {
  std::string index = "[" + std::to_string(result.column) + "]";
  if (rank == 2) index = "[" + std::to_string(result.row) + "]" + index;
  throw Error(ErrorCode::kMismatch, std::string(kOp) + ": step " + std::to_string(step) + ": " +
                                        field.name + index + " = " + std::to_string(result.found) +
                                        ", expected " + std::to_string(result.expected) + "; " +
                                        std::to_string(result.differing) + " of " +
                                        std::to_string(result.compared) + " entries differ");
}

}  // namespace

namespace {

// From the first to the last element of a view.
int64_t spanned_entries(const TensorShape& view) {
  int64_t last = 0;
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
    if (view.shape[axis] == 0) return 0;
    last += (view.shape[axis] - 1) * view.stride[axis];
  }
  return last + 1;
}

// Calls fn(view) for every array that a refresh reads or writes.
template <class Fn>
void for_each_array(MetadataTensors& tensors, Fn fn) {
  fn(tensors.seq_len);
  fn(tensors.pool_row);
  fn(tensors.req_to_token);
  fn(tensors.ext_len);
  for (int step = 0; step < tensors.num_steps; ++step) {
    for (const Field& field : kFields) fn(tensors.steps[static_cast<size_t>(step)].*field.view);
  }
}

}  // namespace

MetadataVerifier::MetadataVerifier(const MetadataProblem& problem, const Device& device)
    : problem_(problem),
      device_(device),
      reference_(MetadataRefresh::plan(
          problem, device.kind == DeviceKind::kCpu ? device : Device::cpu(1), Options{"ref"})) {
  scratch_.reserve(entry_bytes(scratch_entries(problem)));
}

// The same views of copies, once the stream is done.
MetadataTensors MetadataVerifier::on_host(const MetadataTensors& tensors, Stream stream) {
  if (is_capturing(device_, stream)) {
    internal::unsupported(kOp,
                          "verification while the stream is being captured: it waits for the "
                          "device; verify steps outside of graphs");
  }
  MetadataTensors copies = tensors;
  internal::WorkspaceCutter measure({});
  for_each_array(copies, [&](const auto& view) {
    if (view.defined()) measure.take<int32_t>(spanned_entries(view));
  });
  copies_.reserve(measure.used_bytes());
  internal::WorkspaceCutter cutter(copies_.workspace());
  for_each_array(copies, [&](auto& view) {
    if (!view.defined()) return;
    const int64_t entries = spanned_entries(view);
    int32_t* const copy = cutter.take<int32_t>(entries);
    copy_bytes(copy, Device::cpu(1), view.data, device_, entry_bytes(entries), stream);
    view.data = copy;
  });
  synchronize(device_, stream);
  return copies;
}

void MetadataVerifier::verify(const MetadataTensors& given, Stream stream) {
  internal::check_metadata_tensors(problem_, given);
  const MetadataTensors tensors = device_.kind == DeviceKind::kCpu ? given : on_host(given, stream);
  for (int step = 0; step < tensors.num_steps; ++step) {
    const MetadataFields& actual = tensors.steps[static_cast<size_t>(step)];
    MetadataTensors alone = tensors;
    alone.num_steps = 1;
    alone.kv_len_delta[0] = tensors.kv_len_delta[static_cast<size_t>(step)];
    MetadataFields& expected = alone.steps[0];
    expected = {};
    int64_t entries = 0;
    for (const Field& field : kFields) {
      if (!has_field(problem_, field)) continue;
      static_cast<TensorShape&>(expected.*field.view) =
          written_shape(problem_, tensors, field, actual.*field.view);
      entries += (expected.*field.view).num_elements();
    }
    // Arrays of rows may be longer than the bounds, because all of them is written.
    scratch_.reserve(entry_bytes(entries));
    auto* next = static_cast<int32_t*>(scratch_.data());
    for (const Field& field : kFields) {
      if (!has_field(problem_, field)) continue;
      (expected.*field.view).data = next;
      next += (expected.*field.view).num_elements();
    }
    reference_.run(alone, {});
    for (const Field& field : kFields) {
      if (!has_field(problem_, field)) continue;
      const TensorView& reference = expected.*field.view;
      const Comparison result = compare(problem_, field, actual.*field.view, reference, expected);
      if (result.differing > 0) mismatch(step, field, reference.rank, result);
    }
  }
}

}  // namespace fovea
