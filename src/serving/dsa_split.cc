#include "src/serving/dsa_split.h"

#include <algorithm>
#include <limits>
#include <string>

#include "src/batch/forward_modes.h"
#include "src/core/access.h"
#include "src/core/check.h"
#include "src/serving/dsa_checks.h"

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

MetadataTensors select_requests(const ForwardBatch& batch, const StepArrays& arrays) {
  const ContextSplit& split = *batch.context_split;
  const int64_t count = selected_requests(split);
  const StepArrays::SelectedInputs to = arrays.selected_inputs(count);
  const auto seq_len = access<int32_t, 1>(to.seq_len), pool_row = access<int32_t, 1>(to.pool_row),
             ext_len = access<int32_t, 1>(to.ext_len);
  const auto all_pool_rows = access<const int32_t, 1>(batch.pool_row);
  for (int64_t i = 0; i < count; ++i) {
    const Selected item = selected(split, i);
    seq_len(i) = static_cast<int32_t>(item.kv_len);
    pool_row(i) = all_pool_rows(item.request);
    ext_len(i) = static_cast<int32_t>(item.rows);
  }
  MetadataTensors tensors;
  tensors.seq_len = to.seq_len;
  tensors.pool_row = to.pool_row;
  tensors.ext_len = to.ext_len;
  tensors.req_to_token = batch.req_to_token;
  return tensors;
}

void fill_split_rows(const ForwardBatch& batch, bool fresh_kv, int64_t topk,
                     const MetadataFields& fields) {
  const ContextSplit& split = *batch.context_split;
  const auto row_len = access<int32_t, 1>(fields.row_len),
             topk_length = access<int32_t, 1>(fields.topk_length),
             topk_indptr = access<int32_t, 1>(fields.topk_indptr),
             k_start = access<int32_t, 1>(fields.k_start), k_end = access<int32_t, 1>(fields.k_end),
             row_offset = access<int32_t, 1>(fields.row_offset);
  int64_t row = 0, entries = 0, request = 0, keys_before = 0;
  topk_indptr(0) = 0;
  for (int64_t i = 0; i < selected_requests(split); ++i) {
    const Selected item = selected(split, i);
    // Fresh keys are those of the whole batch, cached ones are gathered for these requests only.
    for (; fresh_kv && request < item.request; ++request) {
      keys_before += batch.host_seq_len[static_cast<size_t>(request)];
    }
    for (const int64_t end = row + item.rows; row < end; ++row) {
      const int32_t len = split.row_len[static_cast<size_t>(row)];
      const auto kept = static_cast<int32_t>(std::min<int64_t>(len, topk));
      entries += kept;
      row_len(row) = len;
      topk_length(row) = kept;
      topk_indptr(row + 1) =
          static_cast<int32_t>(std::min<int64_t>(entries, std::numeric_limits<int32_t>::max()));
      k_end(row) = k_start(row) + len;
      row_offset(row) = fresh_kv ? static_cast<int32_t>(keys_before) : k_start(row);
    }
  }
}

}  // namespace fovea::internal
