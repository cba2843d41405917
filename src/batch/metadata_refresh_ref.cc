#include "src/batch/metadata_refresh_impl.h"
#include "src/batch/paged_schedule_impl.h"
#include "src/batch/split_schedule_impl.h"
#include "src/core/access.h"

namespace fovea::internal {
namespace {

// One step, element by element, as docs/metadata.md writes the formulas.
class StepReference {
 public:
  StepReference(const MetadataProblem& problem, const MetadataTensors& tensors, size_t step)
      : problem_(problem),
        tensors_(tensors),
        fields_(tensors.steps[step]),
        delta_(tensors.kv_len_delta[step]),
        requests_(tensors.seq_len.shape[0]) {}

  void fill() const {
    fill_requests();
    fill_page_table();
    fill_rows();
    if (problem_.split_parts > 0) fill_split();
    if (is_extend(problem_.mode)) return;
    const int64_t rows = access<const int32_t, 1>(fields_.q_indptr)(requests_);
    paged_schedule_ref({problem_.max_rows, problem_.workers, 1}, {},
                       {slice_rows(fields_.row_len, 0, rows), fields_.schedule}, {});
  }

 private:
  int64_t kv_len(int64_t request) const {
    int64_t len = access<const int32_t, 1>(tensors_.seq_len)(request);
    if (problem_.mode == ForwardMode::kTargetVerify) len += problem_.rows_per_request;
    if (is_decode(problem_.mode)) len += delta_;
    return std::clamp<int64_t>(len, 0, kv_capacity(problem_, fields_));
  }

  int64_t num_rows(int64_t request) const {
    if (is_decode(problem_.mode)) return 1;
    if (!reads_ext_len(problem_.mode)) return problem_.rows_per_request;
    return std::max<int64_t>(0, access<const int32_t, 1>(tensors_.ext_len)(request));
  }

  void fill_requests() const {
    const auto kv_indptr = access<int32_t, 1>(fields_.kv_indptr);
    const auto q_indptr = access<int32_t, 1>(fields_.q_indptr);
    const int64_t capacity = row_capacity(problem_, tensors_, fields_);
    int64_t tokens = 0, rows = 0, longest = 0, most_rows = 0;
    for (int64_t r = 0; r < requests_; ++r) {
      kv_indptr(r) = saturate_i32(tokens);
      q_indptr(r) = saturate_i32(std::min(rows, capacity));
      tokens += kv_len(r);
      rows += num_rows(r);
      const int64_t kept_rows = std::min(rows, capacity) - q_indptr(r);
      access<int32_t, 1>(fields_.kv_len)(r) = static_cast<int32_t>(kv_len(r));
      access<int32_t, 1>(fields_.ext_len)(r) = static_cast<int32_t>(kept_rows);
      longest = std::max(longest, kv_len(r));
      most_rows = std::max(most_rows, kept_rows);
    }
    kv_indptr(requests_) = saturate_i32(tokens);
    q_indptr(requests_) = saturate_i32(std::min(rows, capacity));
    if (requests_ == 0 && is_extend(problem_.mode)) most_rows = 1;
    access<int32_t, 1>(fields_.max_kv_len)(0) = static_cast<int32_t>(longest);
    access<int32_t, 1>(fields_.max_q_len)(0) = static_cast<int32_t>(most_rows);
  }

  int32_t page(int64_t request, int64_t column) const {
    const auto req_to_token = access<const int32_t, 2>(tensors_.req_to_token);
    const int64_t row = access<const int32_t, 1>(tensors_.pool_row)(request);
    if (row < 0 || row >= req_to_token.shape[0]) return -1;
    const int64_t slot = req_to_token(row, column * problem_.page_size);
    return slot < 0 ? -1 : static_cast<int32_t>(slot / problem_.page_size);
  }

  void fill_page_table() const {
    const auto page_table = access<int32_t, 2>(fields_.page_table);
    for (int64_t r = 0; r < requests_; ++r) {
      for (int64_t j = 0; j * problem_.page_size < kv_len(r); ++j) page_table(r, j) = page(r, j);
    }
  }

  // The request that row t belongs to; -1 for padding.
  int64_t request_of(int64_t row) const {
    const auto q_indptr = access<const int32_t, 1>(fields_.q_indptr);
    for (int64_t r = 0; r < requests_; ++r) {
      if (row >= q_indptr(r) && row < q_indptr(r + 1)) return r;
    }
    return -1;
  }

  int64_t row_len(int64_t request, int64_t row) const {
    if (request < 0) return 0;
    const int64_t i = row - access<const int32_t, 1>(fields_.q_indptr)(request);
    return kv_len(request) - num_rows(request) + 1 + i;
  }

  int64_t k_start(int64_t request) const {
    return request < 0 ? 0 : access<const int32_t, 1>(fields_.kv_indptr)(request);
  }

  template <class Value>
  void fill_array(const TensorView& field, Value value) const {
    const auto out = access<int32_t, 1>(field);
    for (int64_t t = 0; t < written_rows(tensors_, out.shape[0]); ++t) {
      out(t) = saturate_i32(value(request_of(t), t));
    }
  }

  void fill_rows() const {
    const auto topk_length = [&](int64_t request, int64_t row) {
      return std::min(std::max<int64_t>(row_len(request, row), 0), problem_.topk);
    };
    fill_array(fields_.row_to_request, [&](int64_t request, int64_t) { return request; });
    fill_array(fields_.row_len, [&](int64_t request, int64_t t) { return row_len(request, t); });
    fill_array(fields_.topk_length, topk_length);
    const auto topk_indptr = access<int32_t, 1>(fields_.topk_indptr);
    topk_indptr(0) = 0;
    int64_t entries = 0;
    for (int64_t t = 0; t < written_rows(tensors_, topk_indptr.shape[0] - 1); ++t) {
      entries += topk_length(request_of(t), t);
      topk_indptr(t + 1) = saturate_i32(entries);
    }
    if (!is_extend(problem_.mode)) return;
    fill_array(fields_.k_start, [&](int64_t request, int64_t) { return k_start(request); });
    fill_array(fields_.k_end,
               [&](int64_t request, int64_t t) { return k_start(request) + row_len(request, t); });
    if (!has_row_offset(problem_)) return;
    fill_array(fields_.row_offset, [&](int64_t request, int64_t) { return k_start(request); });
  }

  void fill_split() const {
    const int64_t rows = split_rows(tensors_, fields_);
    split_schedule_ref({rows, problem_.split_parts}, {},
                       {slice_rows(fields_.topk_length, 0, rows), fields_.split_schedule,
                        slice_rows(fields_.split_indptr, 0, rows + 1)},
                       {});
    // Rows past the schedule have no piece.
    const auto split_indptr = access<int32_t, 1>(fields_.split_indptr);
    for (int64_t t = rows; t < written_rows(tensors_, split_indptr.shape[0] - 1); ++t) {
      split_indptr(t + 1) = split_indptr(t);
    }
  }

  const MetadataProblem& problem_;
  const MetadataTensors& tensors_;
  const MetadataFields& fields_;
  const int64_t delta_;
  const int64_t requests_;
};

}  // namespace

void metadata_refresh_ref(const MetadataProblem& problem, const Device&,
                          const MetadataTensors& tensors, Workspace) {
  for (int step = 0; step < tensors.num_steps; ++step) {
    StepReference(problem, tensors, static_cast<size_t>(step)).fill();
  }
}

}  // namespace fovea::internal
