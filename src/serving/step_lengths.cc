#include "src/serving/step_lengths.h"

#include <algorithm>

#include "src/batch/forward_modes.h"
#include "src/serving/dsa_checks.h"
#include "src/serving/dsa_split.h"

namespace fovea::internal {
namespace {

TensorView view_of(std::vector<int32_t>& values, int64_t count) {
  return make_tensor(static_cast<void*>(values.data()), DType::kI32, {count});
}

// Rows of a request that only the device knows: E shared out evenly, and no more than the mode
// allows.
int64_t even_share(const DsaConfig& config, const ForwardBatch& batch, int64_t requests,
                   int64_t request, int64_t rows_left) {
  if (batch.mode == ForwardMode::kDraftExtend) return std::min(rows_left, config.rows_per_request);
  return (rows_left + requests - request - 1) / (requests - request);
}

}  // namespace

StepLengths::StepLengths(int64_t max_requests, int64_t max_rows)
    : kv_len_(static_cast<size_t>(max_requests)),
      q_indptr_(static_cast<size_t>(max_requests) + 1),
      row_len_(static_cast<size_t>(max_rows)),
      topk_length_(static_cast<size_t>(max_rows)) {}

void StepLengths::add_request(const DsaConfig& config, int64_t request, int64_t rows,
                              int64_t kv_len) {
  const auto at = static_cast<size_t>(request);
  const int64_t first = q_indptr_[at];
  kv_len_[at] = static_cast<int32_t>(kv_len);
  q_indptr_[at + 1] = static_cast<int32_t>(first + rows);
  for (int64_t i = 0; i < rows; ++i) {
    const auto row = static_cast<size_t>(first + i);
    row_len_[row] = static_cast<int32_t>(kv_len - rows + 1 + i);
    topk_length_[row] = static_cast<int32_t>(std::clamp<int64_t>(row_len_[row], 0, config.topk));
  }
}

void StepLengths::fill(const DsaConfig& config, const ForwardBatch& batch, const StepShape& shape,
                       int32_t kv_len_delta) {
  q_indptr_[0] = 0;
  int64_t rows_left = shape.num_rows;
  for (int64_t r = 0; r < shape.num_requests; ++r) {
    const auto at = static_cast<size_t>(r);
    int64_t rows = fixed_rows(config, batch.mode), kv_len = config.table_width;
    if (batch.context_split != nullptr) {
      rows = selected_rows(*batch.context_split, r);
      kv_len = selected_kv_len(*batch.context_split, r);
    } else {
      if (!batch.host_ext_len.empty()) rows = batch.host_ext_len[at];
      if (!batch.host_seq_len.empty()) {
        kv_len = batch.host_seq_len[at] + length_addend(config, batch.mode, kv_len_delta);
      }
      const bool is_known = fixed_rows(config, batch.mode) > 0 || !batch.host_ext_len.empty();
      if (!is_known) rows = even_share(config, batch, shape.num_requests, r, rows_left);
    }
    rows_left -= rows;
    add_request(config, r, rows, kv_len);
  }
  if (batch.context_split != nullptr) {
    for (size_t row = 0; row < batch.context_split->row_len.size(); ++row) {
      const int32_t len = batch.context_split->row_len[row];
      row_len_[row] = len;
      topk_length_[row] = static_cast<int32_t>(std::min<int64_t>(len, config.topk));
    }
  }
  fields_.kv_len = view_of(kv_len_, shape.num_requests);
  fields_.q_indptr = view_of(q_indptr_, shape.num_requests + 1);
  fields_.row_len = view_of(row_len_, shape.num_rows);
  fields_.topk_length = view_of(topk_length_, shape.padded_rows);
}

}  // namespace fovea::internal
