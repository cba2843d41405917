#include "src/serving/dsa_split.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string>

#include "src/batch/forward_modes.h"
#include "src/core/check.h"
#include "src/serving/dsa_checks.h"
#include "src/serving/step_rows.h"

namespace fovea::internal {
namespace {

// A zigzag split has one request and leaves the arrays of requests empty.
bool is_zigzag(const ContextSplit& split) { return !split.block_len.empty(); }

int64_t size_of(const std::vector<int32_t>& values) { return static_cast<int64_t>(values.size()); }

// One selected request.
struct Selected {
  int64_t request;  // of the batch
  int64_t kv_len;
  int64_t rows;
};

Selected selected(const ContextSplit& split, int64_t i) {
  if (is_zigzag(split)) return {0, split.kv_len.back(), size_of(split.row_len)};
  const auto at = static_cast<size_t>(i);
  return {split.selected[at], split.kv_len[at], split.ext_len[at]};
}

[[noreturn]] void bad_entry(const char* field, int64_t index, int64_t found,
                            const std::string& expected) {
  invalid(kDsaOp, "context_split." + std::string(field) + "[" + std::to_string(index) +
                      "] = " + std::to_string(found) + ", expected " + expected);
}

void check_sizes(const ForwardBatch& batch, const ContextSplit& split) {
  const auto check_size = [](const char* field, int64_t found, int64_t expected) {
    if (found == expected) return;
    invalid(kDsaOp, "context_split." + std::string(field) + " has " + std::to_string(found) +
                        " entries, expected " + std::to_string(expected));
  };
  check_size("row_len", size_of(split.row_len), batch.num_rows);
  if (is_zigzag(split)) {
    check_size("kv_len", size_of(split.kv_len), 2);
    check_range(kDsaOp, "requests of a zigzag split", batch.seq_len.shape[0], 1, 1);
    return;
  }
  check_size("ext_len", size_of(split.ext_len), size_of(split.selected));
  check_size("kv_len", size_of(split.kv_len), size_of(split.selected));
  check_size("row_to_request", size_of(split.row_to_request), batch.num_rows);
}

void check_selected(const DsaConfig& config, const ForwardBatch& batch, const ContextSplit& split,
                    int64_t i) {
  const Selected item = selected(split, i);
  const int64_t after = i > 0 ? selected(split, i - 1).request + 1 : 0;
  if (item.request < after || item.request >= batch.seq_len.shape[0]) {
    bad_entry("selected", i, item.request, "an ascending list of requests of the batch");
  }
  int64_t longest = config.table_width;
  if (!batch.host_seq_len.empty()) {
    longest = batch.host_seq_len[static_cast<size_t>(item.request)];
  }
  if (item.kv_len < 0 || item.kv_len > longest) {
    bad_entry("kv_len", i, item.kv_len, "at most " + std::to_string(longest));
  }
}

}  // namespace

int64_t selected_requests(const ContextSplit& split) {
  return is_zigzag(split) ? 1 : size_of(split.selected);
}

int64_t selected_kv_len(const ContextSplit& split) {
  int64_t sum = 0;
  for (int64_t i = 0; i < selected_requests(split); ++i) sum += selected(split, i).kv_len;
  return sum;
}

void check_context_split(const DsaConfig& config, const ForwardBatch& batch) {
  if (!config.context_parallel) {
    invalid(kDsaOp, "context_split is given, but the configuration has context_parallel = false");
  }
  if (!is_extend(batch.mode)) {
    unsupported(kDsaOp, "context_split in mode " + std::string(to_string(batch.mode)) +
                            ", expected extend or mixed");
  }
  if (batch.padded_rows > batch.num_rows) {
    invalid(kDsaOp, "padded_rows = " + std::to_string(batch.padded_rows) +
                        " with a context split, expected no padding beyond num_rows = " +
                        std::to_string(batch.num_rows));
  }
  const ContextSplit& split = *batch.context_split;
  check_sizes(batch, split);
  int64_t row = 0;
  for (int64_t i = 0; i < selected_requests(split); ++i) {
    check_selected(config, batch, split, i);
    const Selected item = selected(split, i);
    if (item.rows < 0 || item.rows > batch.num_rows - row) {
      bad_entry("ext_len", i, item.rows,
                "a share of the " + std::to_string(batch.num_rows) + " rows of this rank");
    }
    for (const int64_t end = row + item.rows; row < end; ++row) {
      const auto at = static_cast<size_t>(row);
      if (!is_zigzag(split) && split.row_to_request[at] != i) {
        bad_entry("row_to_request", row, split.row_to_request[at], std::to_string(i));
      }
      if (split.row_len[at] < 1 || split.row_len[at] > item.kv_len) {
        bad_entry("row_len", row, split.row_len[at], "1.." + std::to_string(item.kv_len));
      }
    }
  }
  if (row != batch.num_rows) {
    invalid(kDsaOp, "context_split.ext_len sums to " + std::to_string(row) +
                        ", expected num_rows = " + std::to_string(batch.num_rows));
  }
}

int64_t selected_rows(const ContextSplit& split, int64_t i) { return selected(split, i).rows; }
int64_t selected_kv_len(const ContextSplit& split, int64_t i) { return selected(split, i).kv_len; }

namespace {

int32_t saturate(int64_t value) {
  return static_cast<int32_t>(std::min<int64_t>(value, std::numeric_limits<int32_t>::max()));
}

// One value per selected request, `value(item)`.
template <class Value>
std::span<const int32_t> of_requests(const ContextSplit& split, const SplitWriter& writer,
                                     Value value) {
  const int64_t count = selected_requests(split);
  int32_t* const entries = writer.entries->data();
  for (int64_t i = 0; i < count; ++i) entries[i] = saturate(value(selected(split, i)));
  return {entries, static_cast<size_t>(count)};
}

// One value per row of the rank, `value(row, keys of the selected requests before its own, keys of
// the requests of the batch before it)`.
template <class Value>
std::span<const int32_t> of_rows(const ForwardBatch& batch, const SplitWriter& writer,
                                 Value value) {
  const ContextSplit& split = *batch.context_split;
  int32_t* const entries = writer.entries->data();
  int64_t row = 0, request = 0, selected_keys = 0, batch_keys = 0;
  for (int64_t i = 0; i < selected_requests(split); ++i) {
    const Selected item = selected(split, i);
    for (; request < item.request && !batch.host_seq_len.empty(); ++request) {
      batch_keys += batch.host_seq_len[static_cast<size_t>(request)];
    }
    for (const int64_t end = row + item.rows; row < end; ++row) {
      entries[row] = saturate(value(row, selected_keys, batch_keys));
    }
    selected_keys += item.kv_len;
  }
  return {entries, static_cast<size_t>(row)};
}

}  // namespace

MetadataTensors select_requests(const ForwardBatch& batch, const StepArrays& arrays,
                                const SplitWriter& writer) {
  const ContextSplit& split = *batch.context_split;
  const StepArrays::SelectedInputs to = arrays.selected_inputs(selected_requests(split));
  const auto kv_len = [](const Selected& item) { return item.kv_len; };
  const auto rows = [](const Selected& item) { return item.rows; };
  const auto request = [](const Selected& item) { return item.request; };
  put_entries(of_requests(split, writer, kv_len), to.seq_len, writer.device, writer.stream);
  put_entries(of_requests(split, writer, rows), to.ext_len, writer.device, writer.stream);
  pick_entries(batch.pool_row, of_requests(split, writer, request), to.pool_row, writer.device,
               writer.stream);
  MetadataTensors tensors;
  tensors.seq_len = to.seq_len;
  tensors.pool_row = to.pool_row;
  tensors.ext_len = to.ext_len;
  tensors.req_to_token = batch.req_to_token;
  return tensors;
}

void fill_split_rows(const ForwardBatch& batch, bool fresh_kv, int64_t topk,
                     const MetadataFields& fields, const SplitWriter& writer) {
  const std::vector<int32_t>& row_len = batch.context_split->row_len;
  const auto len = [&](int64_t row) { return int64_t{row_len[static_cast<size_t>(row)]}; };
  const auto put = [&](std::span<const int32_t> values, const TensorView& to) {
    put_entries(values, to, writer.device, writer.stream);
  };
  put(of_rows(batch, writer, [&](int64_t row, int64_t, int64_t) { return len(row); }),
      fields.row_len);
  put(of_rows(batch, writer,
              [&](int64_t row, int64_t, int64_t) { return std::min(len(row), topk); }),
      fields.topk_length);
  put(of_rows(batch, writer,
              [&](int64_t row, int64_t before, int64_t) { return before + len(row); }),
      fields.k_end);
  // Fresh keys are those of the whole batch, cached ones are gathered for these requests only.
  put(of_rows(batch, writer,
              [&](int64_t, int64_t selected_keys, int64_t batch_keys) {
                return fresh_kv ? batch_keys : selected_keys;
              }),
      fields.row_offset);
  int64_t entries = 0;
  const auto entries_before = [&](int64_t row, int64_t, int64_t) {
    const int64_t before = entries;
    entries += std::min(len(row), topk);
    return before;
  };
  const std::span<const int32_t> starts = of_rows(batch, writer, entries_before);
  (*writer.entries)[starts.size()] = saturate(entries);
  put({starts.data(), starts.size() + 1}, fields.topk_indptr);
}

}  // namespace fovea::internal
