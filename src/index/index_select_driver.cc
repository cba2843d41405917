#include "src/index/index_select_driver.h"

#include <algorithm>
#include <cstdint>

#include "src/core/access.h"
#include "src/core/workspace.h"

namespace fovea::internal {
namespace {

// Logits of a chunk that stay in the last cache between scoring and selection, and the rows that
// are scored together in any case, so that keys are decoded once for many rows.
constexpr int64_t kCachedLogitsBytes = int64_t{32} << 20;
constexpr int64_t kMinSharedRows = 64;

// Floats from one row of logits to the next: rows start on cache lines.
int64_t logits_pitch(const IndexSelectProblem& problem) {
  return (problem.max_width + 15) / 16 * 16;
}

int64_t chunk_rows(const IndexSelectProblem& problem) {
  const int64_t row_bytes = std::max<int64_t>(1, logits_pitch(problem) * int64_t{sizeof(float)});
  const int64_t allowed = std::max<int64_t>(1, problem.logits_budget_bytes / row_bytes);
  const int64_t wanted = std::max(kMinSharedRows, kCachedLogitsBytes / row_bytes);
  return std::min({allowed, wanted, std::max<int64_t>(1, problem.max_rows)});
}

// The arrays of one chunk. Ragged rows are scored by (start, end), paged rows by length.
struct ChunkArrays {
  int32_t* select_len;   // entries to select from
  int32_t* score_start;  // ragged: first key to score
  int32_t* score_end;    // ragged: its end; paged: number of keys to score
  float* logits;
  char* rest;  // workspace of the part that runs

  ChunkArrays(WorkspaceCutter& cutter, const IndexSelectProblem& problem, size_t rest_bytes) {
    const int64_t rows = chunk_rows(problem);
    select_len = cutter.take<int32_t>(rows);
    score_start = cutter.take<int32_t>(rows);
    score_end = cutter.take<int32_t>(rows);
    logits = cutter.take<float>(rows * logits_pitch(problem));
    rest = cutter.take<char>(static_cast<int64_t>(rest_bytes));
  }
};

size_t rest_bytes(const IndexSelectProblem& problem, const Device& device,
                  const IndexSelectParts& parts) {
  size_t bytes = 0;
  if (parts.logits_workspace != nullptr) {
    bytes = parts.logits_workspace(index_select_logits_problem(problem), device);
  }
  if (parts.topk_workspace != nullptr) {
    bytes = std::max(bytes, parts.topk_workspace(index_select_topk_problem(problem), device));
  }
  return bytes;
}

// Fills the arrays for rows [begin, end). A row that selects every key it has is not scored.
void fill_lengths(const IndexSelectProblem& problem, const IndexSelectTensors& tensors,
                  int64_t begin, int64_t end, const ChunkArrays& chunk) {
  const auto k_start = access<const int32_t, 1>(tensors.k_start);
  const auto k_end = access<const int32_t, 1>(tensors.k_end);
  const auto row_len = access<const int32_t, 1>(tensors.row_len);
  const auto row_to_request = access<const int32_t, 1>(tensors.row_to_request);
  const bool ragged = problem.layout == IndexLayout::kRagged;
  for (int64_t t = begin; t < end; ++t) {
    int64_t start = 0;
    int64_t len = 0;
    if (ragged) {
      const int64_t num_keys = tensors.k_fp8.shape[0];
      start = std::clamp<int64_t>(k_start(t), 0, num_keys);
      len = std::clamp<int64_t>(k_end(t), 0, num_keys) - start;
    } else {
      const int64_t request = row_to_request(t);
      if (request >= 0 && request < tensors.page_table.shape[0]) len = row_len(t);
    }
    len = std::clamp<int64_t>(len, 0, problem.max_width);
    const int64_t scored = len > problem.topk ? len : 0;
    chunk.select_len[t - begin] = static_cast<int32_t>(len);
    chunk.score_start[t - begin] = static_cast<int32_t>(start);
    chunk.score_end[t - begin] = static_cast<int32_t>(start + scored);
  }
}

// Rows [begin, end) of an optional tensor; the rows that it lacks are left out.
ConstTensorView rows_of(const ConstTensorView& tensor, int64_t begin, int64_t end) {
  if (!tensor.defined()) return {};
  const int64_t rows = tensor.shape[0];
  return slice_rows(tensor, std::min(begin, rows), std::min(end, rows));
}

ConstTensorView array_of(const int32_t* data, int64_t count) {
  return make_tensor(data, DType::kI32, {count});
}

IndexLogitsTensors logits_tensors(const IndexSelectProblem& problem,
                                  const IndexSelectTensors& tensors, int64_t begin, int64_t end,
                                  const ChunkArrays& chunk, const TensorView& logits) {
  IndexLogitsTensors part;
  part.q_fp8 = slice_rows(tensors.q_fp8, begin, end);
  part.head_weight = slice_rows(tensors.head_weight, begin, end);
  part.logits = logits;
  if (problem.layout == IndexLayout::kRagged) {
    part.k_fp8 = tensors.k_fp8;
    part.k_scale = tensors.k_scale;
    part.k_start = array_of(chunk.score_start, end - begin);
    part.k_end = array_of(chunk.score_end, end - begin);
  } else {
    part.index_pool = tensors.index_pool;
    part.page_table = tensors.page_table;
    part.row_to_request = slice_rows(tensors.row_to_request, begin, end);
    part.row_len = array_of(chunk.score_end, end - begin);
  }
  return part;
}

// Rows [begin, out_end) of the output; those from `end` on are padding.
TopkSelectTensors topk_tensors(const IndexSelectProblem& problem, const IndexSelectTensors& tensors,
                               int64_t begin, int64_t end, int64_t out_end,
                               const ChunkArrays& chunk, const TensorView& logits) {
  TopkSelectTensors part;
  part.logits = logits;
  part.row_len = array_of(chunk.select_len, end - begin);
  part.indices = slice_rows(tensors.indices, begin, out_end);
  if (problem.transform == IndexTransform::kRagged) {
    part.row_offset = rows_of(tensors.row_offset, begin, out_end);
  }
  if (problem.transform == IndexTransform::kPaged) {
    part.row_to_request = rows_of(tensors.row_to_request, begin, out_end);
    // Without a map, row t of the batch uses row t of the token table.
    const bool by_row = !tensors.row_to_request.defined();
    part.token_table = by_row ? rows_of(tensors.token_table, begin, out_end) : tensors.token_table;
    if (!tensors.token_table.defined()) part.page_table = tensors.page_table;
  }
  return part;
}

}  // namespace

IndexLogitsProblem index_select_logits_problem(const IndexSelectProblem& problem) {
  return {.layout = problem.layout,
          .max_rows = problem.max_rows,
          .num_heads = problem.num_heads,
          .head_dim = problem.head_dim,
          .page_size = problem.page_size};
}

TopkSelectProblem index_select_topk_problem(const IndexSelectProblem& problem) {
  return {.max_rows = problem.max_rows,
          .max_width = problem.max_width,
          .topk = problem.topk,
          .transform = problem.transform,
          .page_size = problem.page_size};
}

size_t index_select_workspace(const IndexSelectProblem& problem, const Device& device,
                              const IndexSelectParts& parts) {
  WorkspaceCutter cutter({});
  ChunkArrays(cutter, problem, rest_bytes(problem, device, parts));
  return cutter.used_bytes();
}

void run_index_select(const IndexSelectProblem& problem, const Device& device,
                      const IndexSelectTensors& tensors, Workspace workspace,
                      const IndexSelectParts& parts) {
  const size_t part_bytes = rest_bytes(problem, device, parts);
  WorkspaceCutter cutter(workspace);
  const ChunkArrays chunk(cutter, problem, part_bytes);
  const Workspace rest{chunk.rest, part_bytes};
  const IndexLogitsProblem logits_problem = index_select_logits_problem(problem);
  const TopkSelectProblem topk_problem = index_select_topk_problem(problem);
  const int64_t live_rows = tensors.q_fp8.shape[0];
  int64_t begin = 0;
  // At least once: the last chunk also writes the padding rows.
  do {
    const int64_t end = std::min(live_rows, begin + chunk_rows(problem));
    const int64_t out_end = end == live_rows ? tensors.indices.shape[0] : end;
    TensorView logits = make_tensor(chunk.logits, DType::kF32, {end - begin, problem.max_width});
    logits.stride[0] = logits_pitch(problem);
    fill_lengths(problem, tensors, begin, end, chunk);
    parts.logits(logits_problem, device,
                 logits_tensors(problem, tensors, begin, end, chunk, logits), rest);
    parts.topk(topk_problem, device,
               topk_tensors(problem, tensors, begin, end, out_end, chunk, logits), rest);
    begin = end;
  } while (begin < live_rows);
}

}  // namespace fovea::internal
