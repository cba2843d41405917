#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "fovea/metadata.h"
#include "src/batch/forward_modes.h"

/// The implementations of metadata_refresh, and the extents of their outputs.
namespace fovea::internal {

void metadata_refresh_ref(const MetadataProblem& problem, const Device& device,
                          const MetadataTensors& tensors, Workspace workspace);
void metadata_refresh_cpu(const MetadataProblem& problem, const Device& device,
                          const MetadataTensors& tensors, Workspace workspace);
size_t metadata_refresh_cuda_workspace(const MetadataProblem& problem, const Device& device);
void metadata_refresh_cuda_portable(const MetadataProblem& problem, const Device& device,
                                    const MetadataTensors& tensors, Workspace workspace,
                                    Stream stream);

/// Throws Error(kInvalidArgument) for tensors that do not fit the problem.
void check_metadata_tensors(const MetadataProblem& problem, const MetadataTensors& tensors);

inline bool has_row_offset(const MetadataProblem& problem) {
  return is_extend(problem.mode) && problem.transform == IndexTransform::kRagged;
}

/// Entries of an array of rows that are written, out of its extent.
inline int64_t written_rows(const MetadataTensors& tensors, int64_t extent) {
  return tensors.padded_rows > 0 ? std::min(extent, tensors.padded_rows) : extent;
}

/// Rows that fit every array of rows: E is cut to it.
inline int64_t row_capacity(const MetadataProblem& problem, const MetadataTensors& tensors,
                            const MetadataFields& fields) {
  int64_t capacity =
      std::min({fields.row_to_request.shape[0], fields.row_len.shape[0],
                fields.topk_length.shape[0], fields.topk_indptr.shape[0] - 1, problem.max_rows});
  if (is_extend(problem.mode)) {
    capacity = std::min({capacity, fields.k_start.shape[0], fields.k_end.shape[0]});
  }
  if (has_row_offset(problem)) capacity = std::min(capacity, fields.row_offset.shape[0]);
  if (problem.split_parts > 0) capacity = std::min(capacity, fields.split_indptr.shape[0] - 1);
  return written_rows(tensors, capacity);
}

/// Rows that split_schedule cuts: all that topk_length and split_indptr hold, padding included, so
/// that somebody writes the zeros of a padding row.
inline int64_t split_rows(const MetadataTensors& tensors, const MetadataFields& fields) {
  return written_rows(tensors,
                      std::min(fields.topk_length.shape[0], fields.split_indptr.shape[0] - 1));
}

/// Longest KV length that W and the page table hold.
inline int64_t kv_capacity(const MetadataProblem& problem, const MetadataFields& fields) {
  return std::min(problem.table_width, fields.page_table.shape[1] * problem.page_size);
}

inline int32_t saturate_i32(int64_t value) {
  return static_cast<int32_t>(std::min<int64_t>(value, std::numeric_limits<int32_t>::max()));
}

}  // namespace fovea::internal
