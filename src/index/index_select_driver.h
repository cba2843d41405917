#pragma once

#include "fovea/index_logits.h"
#include "fovea/index_select.h"
#include "fovea/topk_select.h"
#include "src/core/access.h"
#include "src/core/implementation_list.h"

/// The driver of index_select: chunks of rows through an implementation of index_logits, then one
/// of topk_select.
namespace fovea::internal {

/// What the rows of a chunk select from and score. Ragged rows are scored by (start, end), paged
/// rows by length.
struct IndexSelectChunk {
  int32_t* select_len;   ///< entries to select from
  int32_t* score_start;  ///< ragged: first key to score
  int32_t* score_end;    ///< ragged: its end; paged: number of keys to score
};

/// Where the lengths of a chunk come from.
struct IndexSelectRows {
  bool ragged;
  int64_t topk;
  int64_t max_width;
  int64_t num_keys = 0;      ///< ragged
  int64_t num_requests = 0;  ///< paged
  Accessor<const int32_t, 1> k_start, k_end, row_len, row_to_request;

  IndexSelectRows(const IndexSelectProblem& problem, const IndexSelectTensors& tensors);

  /// Writes entry t - begin of the chunk. A row that selects every key it has is not scored.
  FOVEA_HOST_DEVICE void fill(int64_t t, int64_t begin, const IndexSelectChunk& chunk) const {
    int64_t start = 0;
    int64_t len = 0;
    if (ragged) {
      start = cut(k_start(t), num_keys);
      len = cut(k_end(t), num_keys) - start;
    } else {
      const int64_t request = row_to_request(t);
      if (request >= 0 && request < num_requests) len = row_len(t);
    }
    len = cut(len, max_width);
    chunk.select_len[t - begin] = static_cast<int32_t>(len);
    chunk.score_start[t - begin] = static_cast<int32_t>(start);
    chunk.score_end[t - begin] = static_cast<int32_t>(len > topk ? start + len : start);
  }

 private:
  FOVEA_HOST_DEVICE static int64_t cut(int64_t x, int64_t limit) {
    return x < 0 ? 0 : x > limit ? limit : x;
  }
};

/// Fills the chunk for rows [begin, end).
using FillChunk = void (*)(const IndexSelectRows& rows, int64_t begin, int64_t end,
                           const Device& device, const IndexSelectChunk& chunk, Stream stream);
void fill_index_select_chunk(const IndexSelectRows& rows, int64_t begin, int64_t end,
                             const Device& device, const IndexSelectChunk& chunk, Stream stream);
void fill_index_select_chunk_cuda(const IndexSelectRows& rows, int64_t begin, int64_t end,
                                  const Device& device, const IndexSelectChunk& chunk,
                                  Stream stream);

/// The two implementations that one of index_select is made of. A null workspace function: none
/// needed.
struct IndexSelectParts {
  LaunchFunction<IndexLogitsProblem, IndexLogitsTensors> logits;
  size_t (*logits_workspace)(const IndexLogitsProblem& problem, const Device& device);
  LaunchFunction<TopkSelectProblem, TopkSelectTensors> topk;
  size_t (*topk_workspace)(const TopkSelectProblem& problem, const Device& device);
  FillChunk fill = fill_index_select_chunk;
  /// Logits of a chunk that are worth writing before selecting from them; the budget limits them in
  /// any case.
  int64_t chunk_bytes;
};

/// The problems that the parts see.
IndexLogitsProblem index_select_logits_problem(const IndexSelectProblem& problem);
TopkSelectProblem index_select_topk_problem(const IndexSelectProblem& problem);

size_t index_select_workspace(const IndexSelectProblem& problem, const Device& device,
                              const IndexSelectParts& parts);
void run_index_select(const IndexSelectProblem& problem, const Device& device,
                      const IndexSelectTensors& tensors, Workspace workspace, Stream stream,
                      const IndexSelectParts& parts);

}  // namespace fovea::internal
