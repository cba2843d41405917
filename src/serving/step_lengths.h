#pragma once

#include <cstdint>
#include <vector>

#include "fovea/dsa_backend.h"

/// What the host knows of the lengths of a step.
namespace fovea::internal {

struct StepShape {
  int64_t num_requests = 0;   ///< R; with a context split those that have a row here.
  int64_t num_rows = 0;       ///< E
  int64_t padded_rows = 0;    ///< T >= E
  int64_t num_tokens = 0;     ///< Stored by every layer: E; with a context split all of the batch.
  int64_t padded_tokens = 0;  ///< Rows of k and index_k: T, or num_tokens.
  int64_t sum_kv_len = 0;     ///< Of num_requests; with host lengths only.
};

/// Host copies of kv_len, q_indptr, row_len and topk_length for a profile, whose figures must not
/// wait for a device: from the host lengths of the batch, and where it has none from bounds (every
/// request table_width long, rows shared out evenly, at most rows_per_request where a mode says
/// so).
class StepLengths {
 public:
  StepLengths(int64_t max_requests, int64_t max_rows);

  void fill(const DsaConfig& config, const ForwardBatch& batch, const StepShape& shape,
            int32_t kv_len_delta);

  /// The four arrays, in host memory.
  const MetadataFields& fields() const { return fields_; }

 private:
  void add_request(const DsaConfig& config, int64_t request, int64_t rows, int64_t kv_len);

  std::vector<int32_t> kv_len_, q_indptr_, row_len_, topk_length_;
  MetadataFields fields_;
};

}  // namespace fovea::internal
