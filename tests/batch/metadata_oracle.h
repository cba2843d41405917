#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fovea/metadata.h"

/// The arrays of a step, from their definitions, on lists. Independent of the library's code.
namespace fovea::test {

using Values = std::vector<int32_t>;

/// The two arrays of split_schedule.
struct SplitArrays {
  Values parts;
  Values indptr;
  bool operator==(const SplitArrays&) const = default;
};

inline int64_t split_blocks_of(int32_t len) { return len <= 64 ? 1 : (int64_t{len} - 1) / 64 + 1; }

/// Every piece that a part takes, then everything that follows from the list of pieces.
inline SplitArrays split_oracle(const Values& lens, int64_t num_parts) {
  struct Piece {
    int64_t part, row, begin, end;
  };
  constexpr int64_t kOverhead = 5;
  std::vector<Piece> pieces;
  int64_t cost = 0;
  for (const int32_t len : lens) cost += split_blocks_of(len) + kOverhead;
  const int64_t cap = (cost + num_parts - 1) / num_parts + kOverhead;
  int64_t part = 0, budget = cap;
  for (size_t row = 0; row < lens.size(); ++row) {
    int64_t begin = 0;
    while (begin < split_blocks_of(lens[row])) {
      const int64_t rest = split_blocks_of(lens[row]) - begin;
      int64_t taken = 0;
      if (budget >= rest + kOverhead) {
        taken = rest;
        budget -= rest + kOverhead;
      } else {
        if (budget > kOverhead) taken = budget - kOverhead;
        budget = 0;
      }
      if (taken > 0) pieces.push_back({part, static_cast<int64_t>(row), begin, begin + taken});
      begin += taken;
      if (budget == 0) {
        ++part;
        budget = cap;
      }
    }
  }
  std::map<int64_t, int32_t> pieces_of_row;
  for (const Piece& piece : pieces) ++pieces_of_row[piece.row];
  SplitArrays result;
  result.indptr.push_back(0);
  for (size_t row = 0; row < lens.size(); ++row) {
    result.indptr.push_back(result.indptr.back() + pieces_of_row[static_cast<int64_t>(row)]);
  }
  const auto rows = static_cast<int32_t>(lens.size());
  for (int64_t p = 0; p < num_parts; ++p) {
    Values line = {rows, rows - 1, 0, 0, 0, 0, 0, 0};
    for (const Piece& piece : pieces) {
      if (piece.part != p) continue;
      if (line[0] == rows) {
        for (const Piece& other : pieces) {
          if (other.row == piece.row && other.part < p) ++line[4];
        }
        line[0] = static_cast<int32_t>(piece.row);
        line[2] = static_cast<int32_t>(piece.begin);
        line[5] = pieces_of_row[piece.row] > 1 ? 1 : 0;
      }
      line[1] = static_cast<int32_t>(piece.row);
      line[3] = static_cast<int32_t>(piece.end);
      line[6] = pieces_of_row[piece.row] > 1 ? 1 : 0;
    }
    result.parts.insert(result.parts.end(), line.begin(), line.end());
  }
  return result;
}

/// Every segment of 256 tokens in a list; a worker starts at its index in the list.
inline Values paged_schedule_oracle(const Values& lens, int64_t workers) {
  std::vector<std::pair<int32_t, int32_t>> segments;
  for (size_t row = 0; row < lens.size(); ++row) {
    for (int32_t s = 0; int64_t{s} * 256 < lens[row]; ++s) {
      segments.emplace_back(static_cast<int32_t>(row), s);
    }
  }
  const auto total = static_cast<int64_t>(segments.size());
  Values schedule;
  for (int64_t i = 0; i < workers; ++i) {
    const int64_t longer = std::max<int64_t>(0, i - (workers - total % workers));
    const auto start = static_cast<size_t>(i * (total / workers) + longer);
    schedule.push_back(total == 0 ? 0 : segments[start].first);
    schedule.push_back(total == 0 ? 0 : segments[start].second);
  }
  schedule.push_back(static_cast<int32_t>(lens.size()));
  schedule.push_back(0);
  return schedule;
}

/// A batch on the host.
struct Batch {
  Values seq_len, pool_row, ext_len;
  std::vector<Values> req_to_token;
};

/// Every field of one step; page_table as one list of each request's pages. Lengths are within the
/// table and rows within `padded`; everything else may be anything.
inline std::map<std::string, Values> metadata_oracle(const MetadataProblem& problem,
                                                     const Batch& batch, int32_t delta,
                                                     size_t padded) {
  const bool decode = problem.mode == ForwardMode::kDecode || problem.mode == ForwardMode::kIdle;
  const bool extend = problem.mode == ForwardMode::kExtend || problem.mode == ForwardMode::kMixed;
  std::map<std::string, Values> out;
  for (const char* name : {"kv_indptr", "q_indptr", "topk_indptr"}) out[name] = {0};
  out["max_kv_len"] = {0};
  out["max_q_len"] = {extend && batch.seq_len.empty() ? 1 : 0};
  for (const char* name : {"kv_len", "ext_len", "page_table", "row_to_request", "row_len",
                           "topk_length", "k_start", "k_end"}) {
    out[name] = {};
  }
  for (size_t r = 0; r < batch.seq_len.size(); ++r) {
    int32_t len = batch.seq_len[r] + (decode ? delta : 0);
    int32_t rows = decode ? 1 : static_cast<int32_t>(problem.rows_per_request);
    if (problem.mode == ForwardMode::kTargetVerify) len += rows;
    if (extend || problem.mode == ForwardMode::kDraftExtend) rows = batch.ext_len[r];
    const int32_t start = out["kv_indptr"].back();
    out["kv_len"].push_back(len);
    out["kv_indptr"].push_back(start + len);
    out["ext_len"].push_back(rows);
    out["q_indptr"].push_back(out["q_indptr"].back() + rows);
    out["max_kv_len"][0] = std::max(out["max_kv_len"][0], len);
    out["max_q_len"][0] = std::max(out["max_q_len"][0], rows);
    const Values& slots = batch.req_to_token[static_cast<size_t>(batch.pool_row[r])];
    for (int32_t pos = 0; pos < len; pos += static_cast<int32_t>(problem.page_size)) {
      const int32_t slot = slots[static_cast<size_t>(pos)];
      out["page_table"].push_back(slot / static_cast<int32_t>(problem.page_size));
    }
    for (int32_t row_len = len - rows + 1; row_len <= len; ++row_len) {
      const auto topk = static_cast<int32_t>(problem.topk);
      out["row_to_request"].push_back(static_cast<int32_t>(r));
      out["row_len"].push_back(row_len);
      out["topk_length"].push_back(std::min(std::max(row_len, 0), topk));
      out["k_start"].push_back(start);
      out["k_end"].push_back(start + row_len);
    }
  }
  if (!extend) out["schedule"] = paged_schedule_oracle(out["row_len"], problem.workers);
  out["row_to_request"].resize(padded, -1);
  for (const char* name : {"row_len", "topk_length", "k_start", "k_end"}) out[name].resize(padded);
  for (const int32_t len : out["topk_length"]) {
    out["topk_indptr"].push_back(out["topk_indptr"].back() + len);
  }
  if (problem.split_parts > 0) {
    const SplitArrays split = split_oracle(out["topk_length"], problem.split_parts);
    out["split_schedule"] = split.parts;
    out["split_indptr"] = split.indptr;
  }
  if (problem.transform == IndexTransform::kRagged) out["row_offset"] = out["k_start"];
  if (!extend) {
    out.erase("k_start");
    out.erase("k_end");
  }
  return out;
}

}  // namespace fovea::test
