#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fovea/metadata.h"
#include "tests/support/memory.h"

namespace fovea::test {

/// Value of every element that a refresh has not written.
inline constexpr int32_t kUntouched = -77777;

/// The arrays of one step, filled with kUntouched.
struct StepArrays {
  StepArrays(const MetadataProblem& problem, int64_t requests, int64_t rows, int64_t padded_rows,
             int64_t columns)
      : kv_len(DType::kI32, {requests}),
        kv_indptr(DType::kI32, {requests + 1}),
        max_kv_len(DType::kI32, {1}),
        q_indptr(DType::kI32, {requests + 1}),
        max_q_len(DType::kI32, {1}),
        page_table(DType::kI32, {requests, columns}),
        row_to_request(DType::kI32, {padded_rows}),
        row_len(DType::kI32, {rows}),
        topk_length(DType::kI32, {padded_rows}),
        topk_indptr(DType::kI32, {padded_rows + 1}),
        ext_len(DType::kI32, {requests}),
        k_start(DType::kI32, {rows}),
        k_end(DType::kI32, {rows}),
        row_offset(DType::kI32, {rows}),
        schedule(DType::kI32, {problem.workers + 1, 2}),
        split_schedule(DType::kI32, {problem.split_parts, 8}),
        split_indptr(DType::kI32, {padded_rows + 1}) {
    for (const auto& [name, tensor] : named()) {
      std::fill_n(tensor->data<int32_t>(), tensor->view().num_elements(), kUntouched);
    }
  }

  MetadataFields fields() {
    MetadataFields views;
    views.kv_len = kv_len;
    views.kv_indptr = kv_indptr;
    views.max_kv_len = max_kv_len;
    views.q_indptr = q_indptr;
    views.max_q_len = max_q_len;
    views.page_table = page_table;
    views.row_to_request = row_to_request;
    views.row_len = row_len;
    views.topk_length = topk_length;
    views.topk_indptr = topk_indptr;
    views.ext_len = ext_len;
    views.k_start = k_start;
    views.k_end = k_end;
    views.row_offset = row_offset;
    views.schedule = schedule;
    views.split_schedule = split_schedule;
    views.split_indptr = split_indptr;
    return views;
  }

  std::vector<std::pair<std::string, Tensor*>> named() {
    return {{"kv_len", &kv_len},
            {"kv_indptr", &kv_indptr},
            {"max_kv_len", &max_kv_len},
            {"q_indptr", &q_indptr},
            {"max_q_len", &max_q_len},
            {"page_table", &page_table},
            {"row_to_request", &row_to_request},
            {"row_len", &row_len},
            {"topk_length", &topk_length},
            {"topk_indptr", &topk_indptr},
            {"ext_len", &ext_len},
            {"k_start", &k_start},
            {"k_end", &k_end},
            {"row_offset", &row_offset},
            {"schedule", &schedule},
            {"split_schedule", &split_schedule},
            {"split_indptr", &split_indptr}};
  }

  Tensor kv_len, kv_indptr, max_kv_len, q_indptr, max_q_len, page_table, row_to_request, row_len,
      topk_length, topk_indptr, ext_len, k_start, k_end, row_offset, schedule, split_schedule,
      split_indptr;
};

}  // namespace fovea::test
