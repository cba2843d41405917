#include "src/replay/batch_arrays.h"

#include "fovea/tensor.h"

namespace fovea::internal {
namespace {

ConstTensorView i32_view(const std::vector<int32_t>& values) {
  return make_tensor(values.data(), DType::kI32, {static_cast<int64_t>(values.size())});
}

bool has_ext_len(ForwardMode mode) {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed ||
         mode == ForwardMode::kDraftExtend;
}

}  // namespace

void BatchArrays::clear(ForwardMode mode) {
  mode_ = mode;
  rows_.clear();
  seq_len_.clear();
  pool_row_.clear();
  ext_len_.clear();
  positions_.clear();
  out_cache_loc_.clear();
  num_rows_ = 0;
}

void BatchArrays::add_request(const StepEntry& entry, int64_t seq_len, int64_t rows) {
  seq_len_.push_back(static_cast<int32_t>(seq_len));
  pool_row_.push_back(entry.pool_row);
  ext_len_.push_back(static_cast<int32_t>(rows));
}

void BatchArrays::add_row(int64_t entry_index, int64_t position, const Scheduler& scheduler,
                          const StepBatch& batch) {
  const StepEntry& entry = batch.entries[static_cast<size_t>(entry_index)];
  const uint64_t token_id = entry.is_wrong(position)
                                ? workload_->wrong_token_id(entry.request, position)
                                : workload_->token_id(entry.request, position);
  const std::vector<int32_t>& pages = scheduler.state(entry.request).pages;
  const int64_t page = pages[static_cast<size_t>(position / page_size_)];
  rows_.push_back({entry_index, position, token_id});
  positions_.push_back(static_cast<int32_t>(position));
  out_cache_loc_.push_back(static_cast<int32_t>(page * page_size_ + position % page_size_));
  ++num_rows_;
}

void BatchArrays::build(ForwardMode mode, const Scheduler& scheduler, const StepBatch& batch) {
  clear(mode);
  for (size_t e = 0; e < batch.entries.size(); ++e) {
    const StepEntry& entry = batch.entries[e];
    const int64_t end = mode == ForwardMode::kDraftExtend ? entry.kept_end : entry.end;
    add_request(entry, mode == ForwardMode::kTargetVerify ? entry.begin : end, end - entry.begin);
    for (int64_t p = entry.begin; p < end; ++p) {
      add_row(static_cast<int64_t>(e), p, scheduler, batch);
    }
  }
}

void BatchArrays::build_draft_step(int64_t step, const Scheduler& scheduler,
                                   const StepBatch& batch) {
  clear(ForwardMode::kDecode);
  for (size_t e = 0; e < batch.entries.size(); ++e) {
    const StepEntry& entry = batch.entries[e];
    add_request(entry, entry.begin, 1);
    add_row(static_cast<int64_t>(e), entry.begin + step, scheduler, batch);
  }
}

void BatchArrays::pad_requests(int64_t num_requests, int64_t rows_per_request) {
  // DRAFT_EXTEND has as many rows as ext_len says: none.
  const int64_t rows = mode_ == ForwardMode::kDraftExtend ? 0 : rows_per_request;
  while (static_cast<int64_t>(seq_len_.size()) < num_requests) {
    seq_len_.push_back(kPaddedSeqLen);
    pool_row_.push_back(kPaddedPoolRow);
    ext_len_.push_back(static_cast<int32_t>(rows));
    for (int64_t i = 0; i < rows; ++i) {
      positions_.push_back(static_cast<int32_t>(i));
      out_cache_loc_.push_back(0);
    }
    num_rows_ += rows;
  }
}

void BatchArrays::pad_rows(int64_t num_rows) {
  positions_.resize(positions_.size() + static_cast<size_t>(num_rows), 0);
  out_cache_loc_.resize(positions_.size(), -1);
}

void BatchArrays::bound_rows(int64_t num_rows) {
  pad_rows(num_rows - num_padded_rows());
  num_rows_ = num_rows;
}

ConstTensorView BatchArrays::positions() const { return i32_view(positions_); }

ConstTensorView BatchArrays::out_cache_loc() const { return i32_view(out_cache_loc_); }

ForwardBatch BatchArrays::device_batch(const ConstTensorView& req_to_token) const {
  ForwardBatch result;
  result.mode = mode_;
  result.seq_len = i32_view(seq_len_);
  result.pool_row = i32_view(pool_row_);
  result.req_to_token = req_to_token;
  result.positions = positions();
  result.out_cache_loc = out_cache_loc();
  result.num_rows = num_rows_;
  result.padded_rows = num_padded_rows();
  if (has_ext_len(mode_)) result.ext_len = i32_view(ext_len_);
  return result;
}

ForwardBatch BatchArrays::batch(const ConstTensorView& req_to_token) const {
  ForwardBatch result = device_batch(req_to_token);
  result.host_seq_len = seq_len_;
  if (has_ext_len(mode_)) result.host_ext_len = ext_len_;
  return result;
}

}  // namespace fovea::internal
