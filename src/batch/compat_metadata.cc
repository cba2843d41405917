#include "fovea/compat_metadata.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "src/batch/metadata_refresh_impl.h"
#include "src/core/access.h"
#include "src/core/check.h"

namespace fovea::compat {
namespace {

using internal::access;
using internal::kAnyExtent;

using internal::kMaxInt32;
constexpr int32_t kDummySlot = 0;

std::string of_request(int64_t request) { return "request " + std::to_string(request) + ": "; }

void check_mode(const char* op, ForwardMode mode) {
  if (!to_string(mode).empty()) return;
  internal::invalid(op, "mode = " + std::to_string(static_cast<int>(mode)) +
                            ", expected one of the seven forward modes");
}

// ---- host fields

constexpr char kHostFields[] = "host_fields";

void check_lengths(const BatchLengths& lengths) {
  check_mode(kHostFields, lengths.mode);
  const size_t expected = internal::reads_ext_len(lengths.mode) ? lengths.seq_len.size() : 0;
  if (lengths.ext_len.size() != expected) {
    internal::invalid(kHostFields, "ext_len has " + std::to_string(lengths.ext_len.size()) +
                                       " requests in mode " + std::string(to_string(lengths.mode)) +
                                       ", expected " + std::to_string(expected));
  }
  internal::check_range(kHostFields, "rows_per_request", lengths.rows_per_request, 1, kMaxInt32);
  if (lengths.is_context_split && !internal::is_extend(lengths.mode)) {
    internal::invalid(kHostFields, "a context split in mode " +
                                       std::string(to_string(lengths.mode)) +
                                       ", expected extend or mixed");
  }
}

// [0, x0, x0 + x1, ...]; the sum was checked.
std::vector<int32_t> cumulative(std::span<const int32_t> values) {
  std::vector<int32_t> sums(values.size() + 1, 0);
  std::partial_sum(values.begin(), values.end(), sums.begin() + 1);
  return sums;
}

std::vector<int32_t> count_to(int64_t last) {
  std::vector<int32_t> values(static_cast<size_t>(last) + 1);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

// ---- tables of slots

constexpr char kTable[] = "build_page_table_1";

bool has_table_row_per_query(ForwardMode mode) {
  return mode == ForwardMode::kTargetVerify || mode == ForwardMode::kDraftExtend ||
         mode == ForwardMode::kDraftExtendV2;
}

void check_table_inputs(const PageTable1Tensors& tensors, int64_t columns) {
  internal::check_tensor(kTable, "kv_len", tensors.kv_len, DType::kI32, {kAnyExtent});
  internal::check_tensor(kTable, "pool_row", tensors.pool_row, DType::kI32,
                         {tensors.kv_len.shape[0]});
  internal::check_tensor(kTable, "req_to_token", tensors.req_to_token, DType::kI32,
                         {kAnyExtent, kAnyExtent});
  const auto kv_len = access<const int32_t, 1>(tensors.kv_len);
  const int64_t width = tensors.req_to_token.shape[1];
  for (int64_t r = 0; r < kv_len.shape[0]; ++r) {
    if (kv_len(r) >= 0 && kv_len(r) <= std::min(width, columns)) continue;
    internal::invalid(kTable, of_request(r) + "kv_len = " + std::to_string(kv_len(r)) +
                                  ", expected 0.." + std::to_string(std::min(width, columns)) +
                                  ", the columns of " +
                                  (width <= columns ? "req_to_token" : "page_table_1"));
  }
}

// The slots of positions 0..L-1 of a request.
void copy_slots(const PageTable1Tensors& tensors, int64_t request, int32_t* slots) {
  const auto req_to_token = access<const int32_t, 2>(tensors.req_to_token);
  const int64_t row = access<const int32_t, 1>(tensors.pool_row)(request);
  const int64_t len = access<const int32_t, 1>(tensors.kv_len)(request);
  if (row < 0 || row >= req_to_token.shape[0]) {
    std::fill_n(slots, len, -1);
  } else {
    std::copy_n(req_to_token.row(row), len, slots);
  }
}

// ---- copies

constexpr char kCopy[] = "fused_metadata_copy";

// What a destination holds after the rows of the source.
enum class Tail { kNotWritten, kZero, kMinusOne, kLastValue };

// One array of a step, 1-D or 2-D, on both sides.
struct ArrayCopy {
  const char* name;
  TensorView source, destination;
  Tail tail;
  bool is_cumulative;  // element 0 is never written

  bool is_table() const { return source.rank == 2; }
  int64_t source_rows() const { return is_table() ? source.shape[0] : 1; }
  int64_t written_rows() const {
    if (!is_table()) return 1;
    return tail == Tail::kNotWritten ? source.shape[0] : destination.shape[0];
  }
  int64_t source_columns() const { return source.shape[source.rank == 2 ? 1 : 0]; }
  int64_t first_column() const { return is_cumulative ? 1 : 0; }
  // End of what is written in a row: a table row of padding is written whole.
  int64_t end_column(int64_t row) const {
    if (is_table()) return row < source.shape[0] ? source.shape[1] : destination.shape[1];
    return tail == Tail::kNotWritten ? source.shape[0] : destination.shape[0];
  }

  static int32_t* row(const TensorView& view, int64_t row) {
    return static_cast<int32_t*>(view.data) + (view.rank == 2 ? row * view.stride[0] : 0);
  }

  int32_t tail_value() const {
    if (tail == Tail::kLastValue) return row(source, 0)[source.shape[0] - 1];
    return tail == Tail::kMinusOne ? -1 : kDummySlot;
  }

  int32_t expected(int64_t r, int64_t column) const {
    const bool is_source = r < source_rows() && column < source_columns();
    return is_source ? row(source, r)[column] : tail_value();
  }

  void copy() const {
    for (int64_t r = 0; r < written_rows(); ++r) {
      int32_t* const to = row(destination, r);
      const int64_t copied = r < source_rows() ? source_columns() : first_column();
      if (r < source_rows()) {
        const int32_t* const from = row(source, r);
        std::copy(from + first_column(), from + copied, to + first_column());
      }
      if (copied < end_column(r)) std::fill(to + copied, to + end_column(r), tail_value());
    }
  }

  void verify(int64_t number) const {
    int64_t differing = 0, entries = 0;
    std::string first;
    for (int64_t r = 0; r < written_rows(); ++r) {
      const int32_t* const actual = row(destination, r);
      for (int64_t c = first_column(); c < end_column(r); ++c, ++entries) {
        if (actual[c] == expected(r, c) || ++differing > 1) continue;
        const std::string place =
            is_table() ? std::to_string(r) + ", " + std::to_string(c) : std::to_string(c);
        first = "[" + place + "] = " + std::to_string(actual[c]) + ", expected " +
                std::to_string(expected(r, c));
      }
    }
    if (differing == 0) return;
    throw Error(ErrorCode::kMismatch, std::string(kCopy) + ": destination " +
                                          std::to_string(number) + ": " + name + first + "; " +
                                          std::to_string(differing) + " of " +
                                          std::to_string(entries) + " entries differ");
  }
};

// The arrays that a mode copies. Absent on both sides: left out.
class CopyList {
 public:
  CopyList(ForwardMode mode, const StepArrays& source, const StepArrays& destination) {
    const MetadataFields& from = source.fields;
    const MetadataFields& to = destination.fields;
    add("kv_len", from.kv_len, to.kv_len, Tail::kNotWritten);
    add("kv_indptr", from.kv_indptr, to.kv_indptr, Tail::kNotWritten, true);
    add("page_table_1", source.page_table_1, destination.page_table_1, Tail::kZero);
    add("topk_length", from.topk_length, to.topk_length, Tail::kZero);
    add("topk_indptr", from.topk_indptr, to.topk_indptr, Tail::kLastValue, true);
    if (!internal::is_decode(mode)) add("row_len", from.row_len, to.row_len, Tail::kZero);
    num_required_ = count_;
    add("page_table", from.page_table, to.page_table, Tail::kNotWritten);
    add("schedule", from.schedule, to.schedule, Tail::kNotWritten);
    add("split_schedule", from.split_schedule, to.split_schedule, Tail::kNotWritten);
    add("split_indptr", from.split_indptr, to.split_indptr, Tail::kLastValue, true);
    if (mode != ForwardMode::kDraftExtend) return;
    add("q_indptr", from.q_indptr, to.q_indptr, Tail::kNotWritten, true);
    add("row_to_request", from.row_to_request, to.row_to_request, Tail::kMinusOne);
  }

  size_t num_required() const { return num_required_; }
  const ArrayCopy* begin() const { return arrays_.data(); }
  const ArrayCopy* end() const { return arrays_.data() + count_; }

 private:
  void add(const char* name, const TensorView& source, const TensorView& destination, Tail tail,
           bool is_cumulative = false) {
    arrays_[count_++] = {name, source, destination, tail, is_cumulative};
  }

  std::array<ArrayCopy, 12> arrays_{};
  size_t count_ = 0;
  size_t num_required_ = 0;
};

constexpr char kSource[] = "fused_metadata_copy: source";
constexpr char kDestination[] = "fused_metadata_copy: destination";

void check_array(const char* op, const char* name, const TensorView& view) {
  const std::string_view word = name;
  if (word.ends_with("schedule") || word.starts_with("page_table")) {
    internal::check_tensor(op, name, view, DType::kI32, {kAnyExtent, kAnyExtent});
  } else {
    internal::check_tensor(op, name, view, DType::kI32, {kAnyExtent});
  }
}

// Sizes of the source: R requests, E rows, T padded rows.
void check_source(ForwardMode mode, const CopyList& list, const StepArrays& source) {
  const ArrayCopy* array = list.begin();
  for (; array < list.end(); ++array) {
    const bool is_required = array < list.begin() + list.num_required();
    if (is_required || array->source.defined()) check_array(kSource, array->name, array->source);
  }
  const MetadataFields& fields = source.fields;
  const auto check_extent = [&](const char* name, const TensorView& view, int64_t lowest,
                                int64_t highest) {
    if (!view.defined() || (view.shape[0] >= lowest && view.shape[0] <= highest)) return;
    internal::check_range(kSource, (std::string(name) + ".shape[0]").c_str(), view.shape[0], lowest,
                          highest);
  };
  const int64_t requests = fields.kv_len.shape[0], padded = fields.topk_length.shape[0];
  const int64_t rows = internal::is_decode(mode) ? requests : fields.row_len.shape[0];
  check_extent("kv_indptr", fields.kv_indptr, requests + 1, requests + 1);
  check_extent("topk_length", fields.topk_length, rows, kMaxInt32);
  check_extent("topk_indptr", fields.topk_indptr, padded + 1, padded + 1);
  check_extent("page_table_1", source.page_table_1, rows, padded);
  check_extent("page_table", fields.page_table, requests, requests);
  check_extent("split_indptr", fields.split_indptr, padded + 1, padded + 1);
  if (mode == ForwardMode::kDraftExtend) {
    check_extent("q_indptr", fields.q_indptr, requests + 1, requests + 1);
    check_extent("row_to_request", fields.row_to_request, padded, padded);
  }
  const auto check_pair = [](const char* name, const TensorView& view, const char* other_name,
                             const TensorView& other) {
    if (view.defined() == other.defined()) return;
    internal::invalid(kSource, std::string(view.defined() ? name : other_name) +
                                   " is given without " + (view.defined() ? other_name : name));
  };
  check_pair("split_schedule", fields.split_schedule, "split_indptr", fields.split_indptr);
  if (mode == ForwardMode::kDraftExtend) {
    check_pair("q_indptr", fields.q_indptr, "row_to_request", fields.row_to_request);
  }
}

void check_destination(const CopyList& list) {
  for (const ArrayCopy& array : list) {
    const TensorView& from = array.source;
    const TensorView& to = array.destination;
    if (from.defined() != to.defined()) {
      internal::invalid(kCopy, std::string(array.name) + " is given in the " +
                                   (from.defined() ? "source" : "destination") +
                                   " only, expected in both or in neither");
    }
    if (!from.defined()) continue;
    check_array(kDestination, array.name, to);
    const bool is_schedule = std::string_view(array.name).ends_with("schedule");
    bool fits = true;
    for (size_t axis = 0; axis < static_cast<size_t>(from.rank); ++axis) {
      fits &= is_schedule ? to.shape[axis] == from.shape[axis] : to.shape[axis] >= from.shape[axis];
    }
    if (fits) continue;
    internal::invalid(kDestination, std::string(array.name) + " = " + to_string(to) +
                                        (is_schedule ? ", expected " : ", expected at least ") +
                                        to_string(from));
  }
}

// Everything is checked before anything is written.
void check_copies(ForwardMode mode, const StepArrays& source,
                  std::span<const StepArrays> destinations) {
  check_mode(kCopy, mode);
  if (internal::is_extend(mode)) {
    internal::unsupported(kCopy, "mode = " + std::string(to_string(mode)) +
                                     "; its arrays do not persist, use metadata_refresh");
  }
  internal::check_range(kCopy, "destinations", static_cast<int64_t>(destinations.size()), 1,
                        kMaxCopies);
  check_source(mode, CopyList(mode, source, source), source);
  for (const StepArrays& destination : destinations) {
    check_destination(CopyList(mode, source, destination));
  }
}

}  // namespace

HostFields host_fields(const BatchLengths& lengths) {
  check_lengths(lengths);
  const ForwardMode mode = lengths.mode;
  const bool is_extend = internal::is_extend(mode), is_decode = internal::is_decode(mode);
  HostFields fields;
  std::vector<int32_t> kv_len;
  int64_t rows = 0, keys = 0;
  int32_t max_kv_len = 0, max_rows = 0;
  bool has_prefix = false;
  for (size_t i = 0; i < lengths.seq_len.size(); ++i) {
    int64_t n = is_decode ? 1 : lengths.rows_per_request;
    if (internal::reads_ext_len(mode)) n = lengths.ext_len[i];
    const bool is_verify = mode == ForwardMode::kTargetVerify;
    const int64_t len = lengths.seq_len[i] + (is_verify ? n : 0);
    if (n < 0 || len < n) {
      internal::invalid(kHostFields, of_request(static_cast<int64_t>(i)) + std::to_string(n) +
                                         " rows and a KV length of " + std::to_string(len) +
                                         ", expected 0 <= rows <= length");
    }
    rows += n;
    keys += len;
    if (rows > kMaxInt32 - 1 || keys > kMaxInt32) {
      internal::invalid(kHostFields, of_request(static_cast<int64_t>(i)) +
                                         "the lengths sum to more than " +
                                         std::to_string(kMaxInt32));
    }
    has_prefix |= len > n;
    fields.extend_lens.push_back(static_cast<int32_t>(n));
    kv_len.push_back(static_cast<int32_t>(len));
    max_kv_len = std::max(max_kv_len, kv_len.back());
    max_rows = std::max(max_rows, fields.extend_lens.back());
  }
  if (lengths.padded_rows != 0) {
    internal::check_range(kHostFields, "padded_rows", lengths.padded_rows, rows, kMaxInt32 - 1);
  }
  fields.nsa_cu_seqlens_q = count_to(std::max(rows, lengths.padded_rows));
  if (!is_extend) {
    fields.cu_seqlens_q = count_to(rows);
    fields.max_seqlen_q = rows > 0 ? 1 : 0;
    return fields;
  }
  fields.seq_lens_sum = keys;
  const bool is_partial = has_prefix || lengths.is_context_split;
  fields.cu_seqlens_q = cumulative(is_partial ? fields.extend_lens : kv_len);
  fields.max_seqlen_q = is_partial ? (kv_len.empty() ? 1 : max_rows) : max_kv_len;
  return fields;
}

void compute_cu_seqlens(const ConstTensorView& lengths, const TensorView& cu_seqlens) {
  constexpr char kOp[] = "compute_cu_seqlens";
  internal::check_tensor(kOp, "lengths", lengths, DType::kI32, {kAnyExtent});
  internal::check_tensor(kOp, "cu_seqlens", cu_seqlens, DType::kI32, {lengths.shape[0] + 1});
  const auto from = access<const int32_t, 1>(lengths);
  const auto to = access<int32_t, 1>(cu_seqlens);
  int64_t sum = 0;
  for (int64_t i = 0; i <= from.shape[0]; ++i) {
    to(i) = internal::saturate_i32(sum);
    if (i < from.shape[0]) sum += std::max(0, from(i));
  }
}

void compute_nsa_seqlens(const ConstTensorView& lengths, int64_t topk,
                         const TensorView& nsa_seqlens) {
  constexpr char kOp[] = "compute_nsa_seqlens";
  internal::check_tensor(kOp, "lengths", lengths, DType::kI32, {kAnyExtent});
  internal::check_tensor(kOp, "nsa_seqlens", nsa_seqlens, DType::kI32, {lengths.shape[0]});
  internal::check_range(kOp, "topk", topk, 1, kMaxInt32);
  const auto from = access<const int32_t, 1>(lengths);
  const auto to = access<int32_t, 1>(nsa_seqlens);
  for (int64_t i = 0; i < from.shape[0]; ++i) {
    to(i) = std::clamp(from(i), 0, static_cast<int32_t>(topk));
  }
}

void pad_nsa_cache_seqlens(const ConstTensorView& lengths, const TensorView& padded) {
  constexpr char kOp[] = "pad_nsa_cache_seqlens";
  internal::check_tensor(kOp, "lengths", lengths, DType::kI32, {kAnyExtent});
  internal::check_tensor(kOp, "padded", padded, DType::kI32, {kAnyExtent});
  internal::check_range(kOp, "padded.shape[0]", padded.shape[0], lengths.shape[0], kMaxInt32);
  const auto* const from = static_cast<const int32_t*>(lengths.data);
  auto* const to = static_cast<int32_t*>(padded.data);
  if (from != to) std::copy_n(from, lengths.shape[0], to);
  std::fill(to + lengths.shape[0], to + padded.shape[0], 0);
}

void build_page_table_1(ForwardMode mode, const PageTable1Tensors& tensors,
                        const TensorView& page_table_1) {
  check_mode(kTable, mode);
  internal::check_tensor(kTable, "page_table_1", page_table_1, DType::kI32,
                         {kAnyExtent, kAnyExtent});
  check_table_inputs(tensors, page_table_1.shape[1]);
  const int64_t requests = tensors.kv_len.shape[0];
  const bool per_query = has_table_row_per_query(mode);
  if (per_query) {
    internal::check_tensor(kTable, "row_to_request", tensors.row_to_request, DType::kI32,
                           {kAnyExtent});
  } else if (tensors.row_to_request.defined()) {
    internal::invalid(kTable, "row_to_request is given, but mode " + std::string(to_string(mode)) +
                                  " has one table row per request; leave it out");
  }
  const int64_t rows = per_query ? tensors.row_to_request.shape[0] : requests;
  internal::check_range(kTable, "page_table_1.shape[0]", page_table_1.shape[0], rows, kMaxInt32);
  const auto row_to_request = access<const int32_t, 1>(tensors.row_to_request);
  const auto table = access<int32_t, 2>(page_table_1);
  for (int64_t t = 0; t < table.shape[0]; ++t) {
    const int64_t request = t >= rows ? -1 : per_query ? row_to_request(t) : t;
    if (request >= 0 && request < requests) {
      copy_slots(tensors, request, table.row(t));
    } else {
      std::fill_n(table.row(t), table.shape[1], kDummySlot);
    }
  }
}

void build_page_table_1_flattened(const PageTable1Tensors& tensors,
                                  const TensorView& page_table_1_flattened) {
  check_table_inputs(tensors, kMaxInt32);
  const auto kv_len = access<const int32_t, 1>(tensors.kv_len);
  int64_t slots = 0;
  for (int64_t r = 0; r < kv_len.shape[0]; ++r) slots += kv_len(r);
  internal::check_tensor(kTable, "page_table_1_flattened", page_table_1_flattened, DType::kI32,
                         {slots});
  auto* to = static_cast<int32_t*>(page_table_1_flattened.data);
  for (int64_t r = 0; r < kv_len.shape[0]; ++r) {
    copy_slots(tensors, r, to);
    to += kv_len(r);
  }
}

void fused_metadata_copy_multi(ForwardMode mode, const StepArrays& source,
                               std::span<const StepArrays> destinations) {
  check_copies(mode, source, destinations);
  for (const StepArrays& destination : destinations) {
    for (const ArrayCopy& array : CopyList(mode, source, destination)) {
      if (array.source.defined()) array.copy();
    }
  }
}

void fused_metadata_copy(ForwardMode mode, const StepArrays& source,
                         const StepArrays& destination) {
  fused_metadata_copy_multi(mode, source, {&destination, 1});
}

void verify_metadata_copy(ForwardMode mode, const StepArrays& source,
                          std::span<const StepArrays> destinations) {
  check_copies(mode, source, destinations);
  for (size_t i = 0; i < destinations.size(); ++i) {
    for (const ArrayCopy& array : CopyList(mode, source, destinations[i])) {
      if (array.source.defined()) array.verify(static_cast<int64_t>(i));
    }
  }
}

}  // namespace fovea::compat
