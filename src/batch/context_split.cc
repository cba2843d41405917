#include "fovea/context_split.h"

#include <algorithm>
#include <string>

#include "src/core/check.h"

namespace fovea {
namespace {

constexpr char kOp[] = "context_split";
using internal::kMaxInt32;

using Lengths = std::span<const int32_t>;

std::string of_request(size_t request) { return "request " + std::to_string(request) + ": "; }

void check_problem(const ContextSplitProblem& problem) {
  if (to_string(problem.scheme).empty()) {
    internal::invalid(kOp, "scheme = " + std::to_string(static_cast<int>(problem.scheme)) +
                               ", expected round_robin or zigzag");
  }
  internal::check_range(kOp, "ranks", problem.ranks, 1, kMaxInt32);
  internal::check_range(kOp, "rank", problem.rank, 0, problem.ranks - 1);
}

void check_num_rows(const ContextSplitProblem& problem, int64_t num_rows) {
  internal::check_range(kOp, "rows", num_rows, 0, kMaxInt32);
  if (problem.scheme == ContextScheme::kZigzag && num_rows < 2 * int64_t{problem.ranks}) {
    internal::invalid(kOp, "zigzag over " + std::to_string(problem.ranks) + " ranks with " +
                               std::to_string(num_rows) + " rows, expected at least " +
                               std::to_string(2 * int64_t{problem.ranks}) +
                               "; use round_robin or fewer ranks");
  }
}

void check_lengths(const ContextSplitProblem& problem, Lengths seq_len, Lengths ext_len) {
  if (seq_len.size() != ext_len.size()) {
    internal::invalid(kOp, "seq_len has " + std::to_string(seq_len.size()) +
                               " requests and ext_len " + std::to_string(ext_len.size()) +
                               ", expected as many");
  }
  if (problem.scheme == ContextScheme::kZigzag && ext_len.size() != 1) {
    internal::invalid(kOp, "zigzag with " + std::to_string(ext_len.size()) +
                               " requests, expected 1; use round_robin");
  }
  int64_t tokens = 0;
  for (size_t i = 0; i < ext_len.size(); ++i) {
    if (ext_len[i] < 0) {
      internal::invalid(
          kOp, of_request(i) + "ext_len = " + std::to_string(ext_len[i]) + ", expected >= 0");
    }
    if (seq_len[i] < ext_len[i]) {
      internal::invalid(kOp, of_request(i) + "seq_len = " + std::to_string(seq_len[i]) +
                                 ", expected at least ext_len = " + std::to_string(ext_len[i]) +
                                 "; seq_len counts the prefix and the new rows");
    }
    tokens += seq_len[i];
    if (tokens > kMaxInt32) {
      internal::invalid(kOp, of_request(i) + "the sum of seq_len reaches " +
                                 std::to_string(tokens) + ", expected at most " +
                                 std::to_string(kMaxInt32));
    }
  }
}

// Rows g < end of the batch with g % ranks == rank.
int64_t rows_below(const ContextSplitProblem& problem, int64_t end) {
  return (end + problem.ranks - 1 - problem.rank) / problem.ranks;
}

void add_row(ContextSplit& split, int64_t row, int64_t position) {
  split.rank_rows.push_back(static_cast<int32_t>(row));
  split.positions.push_back(static_cast<int32_t>(position));
  split.row_len.push_back(static_cast<int32_t>(position + 1));
}

ContextSplit split_round_robin(const ContextSplitProblem& problem, Lengths seq_len,
                               Lengths ext_len) {
  ContextSplit split;
  split.kv_indptr.push_back(0);
  split.q_indptr.push_back(0);
  int64_t first_row = 0;    // of the request, in the batch
  int64_t keys_of_all = 0;  // of the requests before it
  for (size_t i = 0; i < ext_len.size(); ++i) {
    const int64_t end_row = first_row + ext_len[i];
    const int64_t skipped = rows_below(problem, first_row);
    const int64_t count = rows_below(problem, end_row) - skipped;
    const int32_t row_offset = problem.extend_kv_source == ExtendKvSource::kFresh
                                   ? static_cast<int32_t>(keys_of_all)
                                   : split.kv_indptr.back();
    for (int64_t k = skipped; k < skipped + count; ++k) {
      const int64_t row = problem.rank + k * problem.ranks;
      add_row(split, row, seq_len[i] - ext_len[i] + row - first_row);
      split.k_start.push_back(split.kv_indptr.back());
      split.k_end.push_back(split.kv_indptr.back() + split.row_len.back());
      split.row_to_request.push_back(static_cast<int32_t>(split.selected.size()));
      split.row_offset.push_back(row_offset);
    }
    if (count > 0) {
      split.selected.push_back(static_cast<int32_t>(i));
      split.ext_len.push_back(static_cast<int32_t>(count));
      split.kv_len.push_back(seq_len[i]);
      split.kv_indptr.push_back(split.kv_indptr.back() + seq_len[i]);
      split.q_indptr.push_back(split.q_indptr.back() + static_cast<int32_t>(count));
    }
    first_row = end_row;
    keys_of_all += seq_len[i];
  }
  return split;
}

// 2 * ranks blocks of num_rows / (2 * ranks) rows, the first num_rows % (2 * ranks) one longer.
struct ZigzagBlocks {
  int64_t count, len, longer;

  ZigzagBlocks(const ContextSplitProblem& problem, int64_t num_rows)
      : count(2 * int64_t{problem.ranks}), len(num_rows / count), longer(num_rows % count) {}

  int64_t begin(int64_t block) const { return block * len + std::min(block, longer); }
  int64_t end(int64_t block) const { return begin(block + 1); }
};

ContextSplit split_zigzag(const ContextSplitProblem& problem, int32_t seq_len, int32_t ext_len) {
  ContextSplit split;
  const ZigzagBlocks blocks(problem, ext_len);
  const int64_t prefix = int64_t{seq_len} - ext_len;
  for (const int64_t block : {int64_t{problem.rank}, blocks.count - 1 - problem.rank}) {
    for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
      add_row(split, row, prefix + row);
    }
    split.kv_len.push_back(static_cast<int32_t>(prefix + blocks.end(block)));
  }
  for (int64_t block = 0; block < blocks.count; ++block) {
    split.block_len.push_back(static_cast<int32_t>(blocks.end(block) - blocks.begin(block)));
  }
  return split;
}

int64_t most_rows(const ContextSplitProblem& problem, int64_t num_rows) {
  return (num_rows + problem.ranks - 1) / problem.ranks;
}

}  // namespace

std::string_view to_string(ContextScheme scheme) noexcept {
  switch (scheme) {
    case ContextScheme::kRoundRobin:
      return "round_robin";
    case ContextScheme::kZigzag:
      return "zigzag";
  }
  return "";
}

ContextSplit context_split(const ContextSplitProblem& problem, Lengths seq_len, Lengths ext_len) {
  check_problem(problem);
  check_lengths(problem, seq_len, ext_len);
  if (problem.scheme == ContextScheme::kRoundRobin) {
    return split_round_robin(problem, seq_len, ext_len);
  }
  check_num_rows(problem, ext_len[0]);
  return split_zigzag(problem, seq_len[0], ext_len[0]);
}

int64_t context_gather_rows(const ContextSplitProblem& problem, int64_t num_rows) {
  check_problem(problem);
  check_num_rows(problem, num_rows);
  return most_rows(problem, num_rows);
}

std::vector<int64_t> context_gather_order(const ContextSplitProblem& problem, int64_t num_rows) {
  check_problem(problem);
  check_num_rows(problem, num_rows);
  const int64_t rows_of_rank = most_rows(problem, num_rows);
  std::vector<int64_t> order(static_cast<size_t>(num_rows));
  if (problem.scheme == ContextScheme::kRoundRobin) {
    for (int64_t row = 0; row < num_rows; ++row) {
      order[static_cast<size_t>(row)] = row % problem.ranks * rows_of_rank + row / problem.ranks;
    }
    return order;
  }
  const ZigzagBlocks blocks(problem, num_rows);
  for (int64_t rank = 0; rank < problem.ranks; ++rank) {
    int64_t place = rank * rows_of_rank;
    for (const int64_t block : {rank, blocks.count - 1 - rank}) {
      for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
        order[static_cast<size_t>(row)] = place++;
      }
    }
  }
  return order;
}

}  // namespace fovea
