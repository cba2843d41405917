#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "fovea/metadata_check.h"
#include "src/batch/metadata_refresh_impl.h"
#include "src/core/access.h"

/// The implementations of metadata_check, and what they agree on.
namespace fovea::internal {

void metadata_check_ref(const MetadataCheckProblem& problem, const Device& device,
                        const MetadataCheckTensors& tensors, Workspace workspace);
void metadata_check_cpu(const MetadataCheckProblem& problem, const Device& device,
                        const MetadataCheckTensors& tensors, Workspace workspace);

size_t metadata_check_cuda_workspace(const MetadataCheckProblem& problem, const Device& device);
void metadata_check_cuda_portable(const MetadataCheckProblem& problem, const Device& device,
                                  const MetadataCheckTensors& tensors, Workspace workspace,
                                  Stream stream);

/// The batch as the checks read it: lengths before any clamping, in 64 bits.
struct CheckedBatch {
  const MetadataCheckProblem& problem;
  const MetadataCheckTensors& tensors;

  int64_t num_requests() const { return tensors.seq_len.shape[0]; }

  /// seq_len with the step's delta: what may not be negative.
  int64_t given_len(int64_t request) const {
    return int64_t{access<const int32_t, 1>(tensors.seq_len)(request)} + tensors.kv_len_delta;
  }

  /// L, which counts the rows of the step.
  int64_t kv_len(int64_t request) const {
    const bool is_verify = problem.mode == ForwardMode::kTargetVerify;
    return given_len(request) + (is_verify ? problem.rows_per_request : 0);
  }

  /// L as the refresh cuts it: positions that are used.
  int64_t used_len(int64_t request) const {
    return std::clamp<int64_t>(kv_len(request), 0, problem.table_width);
  }

  int64_t ext_len(int64_t request) const {
    return access<const int32_t, 1>(tensors.ext_len)(request);
  }

  int64_t num_rows(int64_t request) const {
    if (reads_ext_len(problem.mode)) return std::max<int64_t>(0, ext_len(request));
    return is_decode(problem.mode) ? 1 : problem.rows_per_request;
  }

  /// Rows that every array of rows holds.
  int64_t row_capacity() const {
    int64_t rows = problem.max_rows;
    if (tensors.out_cache_loc.defined()) rows = std::min(rows, tensors.out_cache_loc.shape[0]);
    if (tensors.topk_indices.defined()) rows = std::min(rows, tensors.topk_indices.shape[0]);
    return rows;
  }

  int64_t pool_row(int64_t request) const {
    return access<const int32_t, 1>(tensors.pool_row)(request);
  }
  bool is_padded(int64_t request) const { return pool_row(request) == kPaddedPoolRow; }

  /// Whether each row sees a key. The one token of a padded request stands for all its rows.
  bool has_keys_for_rows(int64_t request) const {
    const bool is_one_token = problem.mode == ForwardMode::kDraftExtendV2 && is_padded(request) &&
                              given_len(request) == kPaddedSeqLen;
    return is_one_token || num_rows(request) <= kv_len(request);
  }

  /// Whether `slot` may be where `expected` belongs, in a run of positions on `page`.
  bool is_in_place(int64_t request, int64_t page, int64_t slot, int64_t expected) const {
    const bool is_dummy = page == 0 && slot >= 0 && slot < problem.page_size;
    return slot == expected || (is_dummy && is_padded(request));
  }

  bool is_pool_row(int64_t row) const { return row >= 0 && row < tensors.req_to_token.shape[0]; }
  bool is_slot(int64_t slot) const { return slot >= 0 && slot < problem.capacity; }
};

inline int32_t clamp_i32(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, std::numeric_limits<int32_t>::min(),
                                                  std::numeric_limits<int32_t>::max()));
}

/// The faults of the smallest kind that was found, and the first of them.
struct FaultTally {
  MetadataFault fault = MetadataFault::kNone;
  int64_t request = 0, position = 0, value = 0, limit = 0;
  int64_t count = 0;

  MetadataReport report() const {
    return {fault,
            clamp_i32(request),
            clamp_i32(position),
            clamp_i32(value),
            clamp_i32(limit),
            clamp_i32(count),
            {}};
  }
};

}  // namespace fovea::internal
