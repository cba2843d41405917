#pragma once

#include <cstdint>
#include <vector>

#include "fovea/dsa_backend.h"
#include "src/replay/scheduler.h"
#include "src/replay/workload.h"

/// The arrays of one forward call, made from scheduled entries.
namespace fovea::internal {

/// One row of a forward call.
struct StepRow {
  int64_t entry = 0;  ///< Index into StepBatch::entries.
  int64_t position = 0;
  uint64_t token_id = 0;
};

/// What a backend reads of a batch. Views stay valid until the next build.
class BatchArrays {
 public:
  BatchArrays(const Workload& workload, int64_t page_size)
      : workload_(&workload), page_size_(page_size) {}

  /// The rows that `mode` computes of every entry: in kDraftExtend those that stay, else all.
  void build(ForwardMode mode, const Scheduler& scheduler, const StepBatch& batch);

  /// Step `step` of a chain of drafts: the row of position begin + step of every entry; seq_len is
  /// the committed length.
  void build_draft_step(int64_t step, const Scheduler& scheduler, const StepBatch& batch);

  /// Appends requests of padding up to `num_requests`, each with the rows that the mode fixes: they
  /// read and write the dummy page.
  void pad_requests(int64_t num_requests, int64_t rows_per_request);

  /// Appends rows of padding, which belong to no request.
  void pad_rows(int64_t num_rows);

  /// Appends rows of padding up to `num_rows`, which becomes the batch's bound of rows: an engine
  /// that replays a captured DRAFT_EXTEND does not know how many rows stay.
  void bound_rows(int64_t num_rows);

  ForwardBatch batch(const ConstTensorView& req_to_token) const;
  /// The same without host lengths, as an engine has it that replays a captured step.
  ForwardBatch device_batch(const ConstTensorView& req_to_token) const;

  ForwardMode mode() const { return mode_; }
  /// Rows of entries, in the order of entries; rows of padding come after them.
  const std::vector<StepRow>& rows() const { return rows_; }
  /// T.
  int64_t num_padded_rows() const { return static_cast<int64_t>(positions_.size()); }
  ConstTensorView positions() const;
  ConstTensorView out_cache_loc() const;

 private:
  void clear(ForwardMode mode);
  void add_request(const StepEntry& entry, int64_t seq_len, int64_t rows);
  void add_row(int64_t entry_index, int64_t position, const Scheduler& scheduler,
               const StepBatch& batch);

  const Workload* workload_;
  int64_t page_size_;
  ForwardMode mode_ = ForwardMode::kIdle;
  std::vector<StepRow> rows_;
  std::vector<int32_t> seq_len_, pool_row_, ext_len_, positions_, out_cache_loc_;
  int64_t num_rows_ = 0;  // E
};

}  // namespace fovea::internal
