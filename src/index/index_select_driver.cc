#include "src/index/index_select_driver.h"

#include <algorithm>
#include <cstdint>

#include "src/core/access.h"
#include "src/core/workspace.h"

namespace fovea::internal {
namespace {

// Rows that are scored together in any case, so that keys are decoded once for many rows.
constexpr int64_t kMinSharedRows = 64;

// Floats from one row of logits to the next: rows start on cache lines.
int64_t logits_pitch(const IndexSelectProblem& problem) {
  return (problem.max_width + 15) / 16 * 16;
}

int64_t chunk_rows(const IndexSelectProblem& problem, const IndexSelectParts& parts) {
  const int64_t row_bytes = std::max<int64_t>(1, logits_pitch(problem) * int64_t{sizeof(float)});
  const int64_t allowed = std::max<int64_t>(1, problem.logits_budget_bytes / row_bytes);
  const int64_t wanted = std::max(kMinSharedRows, parts.chunk_bytes / row_bytes);
  return std::min({allowed, wanted, std::max<int64_t>(1, problem.max_rows)});
}

// The workspace.
struct ChunkArrays {
  IndexSelectChunk rows;
  float* logits;
  char* rest;  // workspace of the part that runs

  ChunkArrays(WorkspaceCutter& cutter, const IndexSelectProblem& problem,
              const IndexSelectParts& parts, size_t rest_bytes) {
    const int64_t num_rows = chunk_rows(problem, parts);
    rows.select_len = cutter.take<int32_t>(num_rows);
    rows.score_start = cutter.take<int32_t>(num_rows);
    rows.score_end = cutter.take<int32_t>(num_rows);
    logits = cutter.take<float>(num_rows * logits_pitch(problem));
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
                                  const IndexSelectChunk& chunk, const TensorView& logits) {
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
                               const IndexSelectChunk& chunk, const TensorView& logits) {
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

IndexSelectRows::IndexSelectRows(const IndexSelectProblem& problem,
                                 const IndexSelectTensors& tensors)
    : ragged(problem.layout == IndexLayout::kRagged),
      topk(problem.topk),
      max_width(problem.max_width) {
  if (ragged) {
    num_keys = tensors.k_fp8.shape[0];
    k_start = access<const int32_t, 1>(tensors.k_start);
    k_end = access<const int32_t, 1>(tensors.k_end);
  } else {
    num_requests = tensors.page_table.shape[0];
    row_len = access<const int32_t, 1>(tensors.row_len);
    row_to_request = access<const int32_t, 1>(tensors.row_to_request);
  }
}

void fill_index_select_chunk(const IndexSelectRows& rows, int64_t begin, int64_t end, const Device&,
                             const IndexSelectChunk& chunk, Stream) {
  for (int64_t t = begin; t < end; ++t) rows.fill(t, begin, chunk);
}

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
  ChunkArrays(cutter, problem, parts, rest_bytes(problem, device, parts));
  return cutter.used_bytes();
}

void run_index_select(const IndexSelectProblem& problem, const Device& device,
                      const IndexSelectTensors& tensors, Workspace workspace, Stream stream,
                      const IndexSelectParts& parts) {
  const size_t part_bytes = rest_bytes(problem, device, parts);
  WorkspaceCutter cutter(workspace);
  const ChunkArrays chunk(cutter, problem, parts, part_bytes);
  const Workspace rest{chunk.rest, part_bytes};
  const IndexLogitsProblem logits_problem = index_select_logits_problem(problem);
  const TopkSelectProblem topk_problem = index_select_topk_problem(problem);
  const IndexSelectRows rows(problem, tensors);
  const int64_t live_rows = tensors.q_fp8.shape[0];
  int64_t begin = 0;
  // At least once: the last chunk also writes the padding rows.
  do {
    const int64_t end = std::min(live_rows, begin + chunk_rows(problem, parts));
    const int64_t out_end = end == live_rows ? tensors.indices.shape[0] : end;
    TensorView logits = make_tensor(chunk.logits, DType::kF32, {end - begin, problem.max_width});
    logits.stride[0] = logits_pitch(problem);
    parts.fill(rows, begin, end, device, chunk.rows, stream);
    parts.logits(logits_problem, device,
                 logits_tensors(problem, tensors, begin, end, chunk.rows, logits), rest, stream);
    parts.topk(topk_problem, device,
               topk_tensors(problem, tensors, begin, end, out_end, chunk.rows, logits), rest,
               stream);
    begin = end;
  } while (begin < live_rows);
}

}  // namespace fovea::internal
