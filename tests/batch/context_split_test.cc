#include "fovea/context_split.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "fovea/error.h"
#include "tests/batch/step_arrays.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

using test::Tensor;
using Values = std::vector<int32_t>;

ContextSplitProblem round_robin(int ranks, int rank,
                                ExtendKvSource source = ExtendKvSource::kCache) {
  return {ranks, rank, ContextScheme::kRoundRobin, source};
}

ContextSplitProblem zigzag(int ranks, int rank) { return {ranks, rank, ContextScheme::kZigzag}; }

void expect_empty(const ContextSplit& split) {
  EXPECT_EQ(split.kv_indptr, Values{0});
  EXPECT_EQ(split.q_indptr, Values{0});
  for (const Values* array :
       {&split.rank_rows, &split.positions, &split.row_len, &split.selected, &split.ext_len,
        &split.kv_len, &split.k_start, &split.k_end, &split.row_to_request, &split.row_offset}) {
    EXPECT_TRUE(array->empty());
  }
}

TEST(ContextSplitTest, WorkedExampleOfTwoRanks) {
  const Values lens = {5, 3};
  const ContextSplit first = context_split(round_robin(2, 0), lens, lens);
  EXPECT_EQ(first.rank_rows, (Values{0, 2, 4, 6}));
  EXPECT_EQ(first.ext_len, (Values{3, 1}));
  EXPECT_EQ(first.row_len, (Values{1, 3, 5, 2}));
  EXPECT_EQ(first.positions, (Values{0, 2, 4, 1}));
  EXPECT_EQ(first.k_start, (Values{0, 0, 0, 5}));
  EXPECT_EQ(first.k_end, (Values{1, 3, 5, 7}));
  EXPECT_EQ(first.row_to_request, (Values{0, 0, 0, 1}));
  EXPECT_EQ(first.q_indptr, (Values{0, 3, 4}));
  EXPECT_EQ(first.kv_indptr, (Values{0, 5, 8}));
  EXPECT_EQ(first.selected, (Values{0, 1}));
  EXPECT_EQ(first.kv_len, (Values{5, 3}));
  const ContextSplit second = context_split(round_robin(2, 1), lens, lens);
  EXPECT_EQ(second.rank_rows, (Values{1, 3, 5, 7}));
  EXPECT_EQ(second.ext_len, (Values{2, 2}));
  EXPECT_EQ(second.row_len, (Values{2, 4, 1, 3}));
  EXPECT_EQ(second.k_start, (Values{0, 0, 5, 5}));
  EXPECT_EQ(second.k_end, (Values{2, 4, 6, 8}));
  EXPECT_EQ(second.row_to_request, (Values{0, 0, 1, 1}));
  EXPECT_EQ(second.q_indptr, (Values{0, 2, 4}));
  EXPECT_EQ(second.kv_indptr, (Values{0, 5, 8}));
}

TEST(ContextSplitTest, WorkedExampleOfARequestWithoutRowsOnARank) {
  const Values lens = {1, 1, 3};
  const ContextSplit first = context_split(round_robin(4, 0), lens, lens);
  EXPECT_EQ(first.selected, (Values{0, 2}));
  EXPECT_EQ(first.ext_len, (Values{1, 1}));
  EXPECT_EQ(first.row_len, (Values{1, 3}));
  EXPECT_EQ(first.k_start, (Values{0, 1}));
  EXPECT_EQ(first.k_end, (Values{1, 4}));
  EXPECT_EQ(first.row_to_request, (Values{0, 1}));
  EXPECT_EQ(first.kv_indptr, (Values{0, 1, 4}));
  EXPECT_EQ(first.row_offset, (Values{0, 1}));
  EXPECT_EQ(context_split(round_robin(4, 0, ExtendKvSource::kFresh), lens, lens).row_offset,
            (Values{0, 2}));
  const ContextSplit last = context_split(round_robin(4, 3), lens, lens);
  EXPECT_EQ(last.selected, (Values{2}));
  EXPECT_EQ(last.ext_len, (Values{1}));
  EXPECT_EQ(last.row_len, (Values{2}));
  EXPECT_EQ(last.k_start, (Values{0}));
  EXPECT_EQ(last.k_end, (Values{2}));
  EXPECT_EQ(last.row_offset, (Values{0}));
  EXPECT_EQ(context_split(round_robin(4, 3, ExtendKvSource::kFresh), lens, lens).row_offset,
            (Values{2}));
}

TEST(ContextSplitTest, KnownFault15UnevenSplits) {
  const Values lens = {3, 1, 6};
  const std::vector<Values> selected = {{0, 2}, {0, 2}, {0, 2}, {1, 2}};
  const std::vector<Values> counts = {{1, 2}, {1, 2}, {1, 1}, {1, 1}};
  for (int rank = 0; rank < 4; ++rank) {
    const ContextSplit split = context_split(round_robin(4, rank), lens, lens);
    EXPECT_EQ(split.selected, selected[static_cast<size_t>(rank)]) << "rank " << rank;
    EXPECT_EQ(split.ext_len, counts[static_cast<size_t>(rank)]) << "rank " << rank;
  }
  const ContextSplit first = context_split(round_robin(4, 0), lens, lens);
  EXPECT_EQ(first.row_len, (Values{1, 1, 5}));
  EXPECT_EQ(first.k_start, (Values{0, 3, 3}));
  const ContextSplit last = context_split(round_robin(4, 3), lens, lens);
  EXPECT_EQ(last.row_len, (Values{1, 4}));
  EXPECT_EQ(last.k_start, (Values{0, 1}));
}

TEST(ContextSplitTest, KnownFault15FewerRowsThanRanksLeavesRanksEmpty) {
  const ContextSplit only = context_split(round_robin(4, 0), Values{1}, Values{1});
  EXPECT_EQ(only.rank_rows, Values{0});
  EXPECT_EQ(only.q_indptr, (Values{0, 1}));
  for (int rank = 1; rank < 4; ++rank) {
    expect_empty(context_split(round_robin(4, rank), Values{1}, Values{1}));
  }
  EXPECT_EQ(context_gather_rows(round_robin(4, 0), 1), 1) << "empty ranks pad to one row";
}

TEST(ContextSplitTest, BatchesWithoutRowsAreEmptyOnEveryRank) {
  for (int rank = 0; rank < 3; ++rank) {
    expect_empty(context_split(round_robin(3, rank), {}, {}));
    expect_empty(context_split(round_robin(3, rank), Values{7, 0}, Values{0, 0}));
  }
  EXPECT_EQ(context_gather_rows(round_robin(3, 0), 0), 0);
  EXPECT_TRUE(context_gather_order(round_robin(3, 0), 0).empty());
}

TEST(ContextSplitTest, WorkedExampleOfZigzag) {
  const ContextSplit first = context_split(zigzag(2, 0), Values{10}, Values{10});
  EXPECT_EQ(first.block_len, (Values{3, 3, 2, 2}));
  EXPECT_EQ(first.rank_rows, (Values{0, 1, 2, 8, 9}));
  EXPECT_EQ(first.row_len, (Values{1, 2, 3, 9, 10}));
  EXPECT_EQ(first.kv_len, (Values{3, 10}));
  const ContextSplit second = context_split(zigzag(2, 1), Values{10}, Values{10});
  EXPECT_EQ(second.rank_rows, (Values{3, 4, 5, 6, 7}));
  EXPECT_EQ(second.kv_len, (Values{6, 8}));
  // Blocks 0, 3 of rank 0 and 1, 2 of rank 1, five rows each, back to the order 0, 1, 2, 3.
  EXPECT_EQ(context_gather_rows(zigzag(2, 0), 10), 5);
  EXPECT_EQ(context_gather_order(zigzag(2, 0), 10),
            (std::vector<int64_t>{0, 1, 2, 5, 6, 7, 8, 9, 3, 4}));
}

TEST(ContextSplitTest, ZigzagCountsThePrefix) {
  const ContextSplit split = context_split(zigzag(2, 1), Values{110}, Values{10});
  EXPECT_EQ(split.positions, (Values{103, 104, 105, 106, 107}));
  EXPECT_EQ(split.row_len, (Values{104, 105, 106, 107, 108}));
  EXPECT_EQ(split.kv_len, (Values{106, 108}));
}

TEST(ContextSplitTest, ZigzagHasNoFieldsOfSelectedRequests) {
  const ContextSplit split = context_split(zigzag(2, 1), Values{110}, Values{10});
  EXPECT_TRUE(split.selected.empty() && split.ext_len.empty() && split.k_start.empty());
  EXPECT_TRUE(split.kv_indptr.empty() && split.q_indptr.empty() && split.row_offset.empty());
}

// The fields of metadata_refresh for whole requests, the definition of what a rank needs.
struct WholeBatch {
  WholeBatch(const Values& seq_len, const Values& ext_len)
      : arrays(problem_of(seq_len, ext_len), static_cast<int64_t>(seq_len.size()), rows_of(ext_len),
               rows_of(ext_len), 1) {
    const MetadataProblem problem = problem_of(seq_len, ext_len);
    const auto requests = static_cast<int64_t>(seq_len.size());
    const Tensor seq = Tensor::i32({requests}, seq_len), ext = Tensor::i32({requests}, ext_len);
    Tensor pool_row(DType::kI32, {requests}), table(DType::kI32, {1, problem.table_width});
    MetadataTensors tensors;
    tensors.seq_len = seq;
    tensors.pool_row = pool_row;
    tensors.ext_len = ext;
    tensors.req_to_token = table;
    tensors.steps[0] = arrays.fields();
    MetadataRefresh::plan(problem, Device::cpu(1), {"ref"}).run(tensors, {});
  }

  static int64_t rows_of(const Values& ext_len) {
    return std::accumulate(ext_len.begin(), ext_len.end(), int64_t{0});
  }

  static MetadataProblem problem_of(const Values& seq_len, const Values& ext_len) {
    MetadataProblem problem;
    problem.mode = ForwardMode::kExtend;
    problem.max_requests = static_cast<int64_t>(seq_len.size());
    problem.max_rows = rows_of(ext_len);
    problem.table_width = 256;
    problem.topk = 16;
    problem.page_size = 256;
    problem.transform = IndexTransform::kRagged;
    problem.workers = 1;
    return problem;
  }

  test::StepArrays arrays;
};

// Compares one rank's part with whole-batch metadata: `batch` of all requests, and that of the
// selected requests with all their rows.
void expect_part_of(const ContextSplit& split, const Values& seq_len, const Values& ext_len,
                    ExtendKvSource source) {
  Values selected_seq, selected_ext, row_of_selection;
  Values first_row(ext_len.size() + 1, 0);
  std::partial_sum(ext_len.begin(), ext_len.end(), first_row.begin() + 1);
  for (const int32_t request : split.selected) {
    selected_seq.push_back(seq_len[static_cast<size_t>(request)]);
    selected_ext.push_back(ext_len[static_cast<size_t>(request)]);
    for (int32_t row = first_row[static_cast<size_t>(request)];
         row < first_row[static_cast<size_t>(request) + 1]; ++row) {
      row_of_selection.push_back(row);
    }
  }
  WholeBatch all(seq_len, ext_len), selection(selected_seq, selected_ext);
  EXPECT_EQ(split.kv_len, selection.arrays.kv_len.values<int32_t>());
  EXPECT_EQ(split.kv_indptr, selection.arrays.kv_indptr.values<int32_t>());
  const Values row_to_request = selection.arrays.row_to_request.values<int32_t>();
  Values counts(split.selected.size(), 0);
  size_t i = 0;
  for (size_t k = 0; k < row_of_selection.size(); ++k) {
    if (i == split.rank_rows.size() || split.rank_rows[i] != row_of_selection[k]) continue;
    const auto row = static_cast<size_t>(row_of_selection[k]);
    EXPECT_EQ(split.row_len[i], all.arrays.row_len.values<int32_t>()[row]);
    EXPECT_EQ(split.positions[i], split.row_len[i] - 1);
    EXPECT_EQ(split.k_start[i], selection.arrays.k_start.values<int32_t>()[k]);
    EXPECT_EQ(split.k_end[i], selection.arrays.k_end.values<int32_t>()[k]);
    EXPECT_EQ(split.row_to_request[i], row_to_request[k]);
    EXPECT_EQ(split.row_offset[i], source == ExtendKvSource::kFresh
                                       ? all.arrays.row_offset.values<int32_t>()[row]
                                       : selection.arrays.row_offset.values<int32_t>()[k]);
    ++counts[static_cast<size_t>(row_to_request[k])];
    ++i;
  }
  EXPECT_EQ(i, split.rank_rows.size()) << "every row of the rank is a row of a selected request";
  EXPECT_EQ(split.ext_len, counts);
  Values q_indptr(1, 0);
  for (const int32_t count : counts) q_indptr.push_back(q_indptr.back() + count);
  EXPECT_EQ(split.q_indptr, q_indptr);
}

TEST(ContextSplitTest, RanksTogetherAreTheWholeBatch) {
  test::Rng rng(29);
  for (int repeat = 0; repeat < 40; ++repeat) {
    Values seq_len, ext_len;
    for (int64_t i = rng.integer(0, 6); i > 0; --i) {
      ext_len.push_back(static_cast<int32_t>(rng.integer(0, 9)));
      seq_len.push_back(ext_len.back() + static_cast<int32_t>(rng.integer(0, 30)));
    }
    const int64_t rows = WholeBatch::rows_of(ext_len);
    for (int ranks = 1; ranks <= 8; ++ranks) {
      SCOPED_TRACE("ranks " + std::to_string(ranks) + ", rows " + std::to_string(rows));
      std::vector<int> seen(static_cast<size_t>(rows), 0);
      for (int rank = 0; rank < ranks; ++rank) {
        for (const auto source : {ExtendKvSource::kCache, ExtendKvSource::kFresh}) {
          const ContextSplit split =
              context_split(round_robin(ranks, rank, source), seq_len, ext_len);
          expect_part_of(split, seq_len, ext_len, source);
          if (source == ExtendKvSource::kFresh) continue;
          for (const int32_t row : split.rank_rows) {
            EXPECT_EQ(row % ranks, rank);
            ++seen[static_cast<size_t>(row)];
          }
        }
      }
      EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(rows), 1)) << "a partition";
    }
  }
}

TEST(ContextSplitTest, ZigzagRanksTogetherAreTheRequest) {
  test::Rng rng(31);
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      const auto rows = static_cast<int32_t>(rng.integer(2 * ranks, 70));
      const auto prefix = static_cast<int32_t>(rng.integer(0, 50));
      SCOPED_TRACE("ranks " + std::to_string(ranks) + ", rows " + std::to_string(rows));
      std::vector<int> seen(static_cast<size_t>(rows), 0);
      for (int rank = 0; rank < ranks; ++rank) {
        const ContextSplit split =
            context_split(zigzag(ranks, rank), Values{prefix + rows}, Values{rows});
        ASSERT_EQ(split.kv_len.size(), 2u);
        const auto first_call = static_cast<size_t>(split.block_len[static_cast<size_t>(rank)]);
        for (size_t i = 0; i < split.rank_rows.size(); ++i) {
          ++seen[static_cast<size_t>(split.rank_rows[i])];
          EXPECT_EQ(split.row_len[i], prefix + split.rank_rows[i] + 1);
          // Each sub-call ends with the row that sees all its keys.
          if (i + 1 == first_call) {
            EXPECT_EQ(split.row_len[i], split.kv_len[0]);
          }
        }
        EXPECT_EQ(split.row_len.back(), split.kv_len[1]);
        EXPECT_EQ(std::accumulate(split.block_len.begin(), split.block_len.end(), 0), rows);
      }
      EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(rows), 1));
    }
  }
}

TEST(ContextSplitTest, GatheredRowsComeBackInTokenOrder) {
  for (const auto scheme : {ContextScheme::kRoundRobin, ContextScheme::kZigzag}) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (int32_t rows = scheme == ContextScheme::kZigzag ? 2 * ranks : 0; rows < 50; ++rows) {
        const ContextSplitProblem problem{ranks, 0, scheme};
        const int64_t rows_of_rank = context_gather_rows(problem, rows);
        // What an all-gather holds: each rank's rows, then padding that no row may stand in.
        Values gathered(static_cast<size_t>(ranks * rows_of_rank), -1);
        size_t most = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const Values part =
              context_split({ranks, rank, scheme}, Values{rows}, Values{rows}).rank_rows;
          most = std::max(most, part.size());
          ASSERT_LE(static_cast<int64_t>(part.size()), rows_of_rank);
          std::copy(part.begin(), part.end(), gathered.begin() + rank * rows_of_rank);
        }
        EXPECT_EQ(static_cast<int64_t>(most), rows_of_rank) << "no more padding than needed";
        const std::vector<int64_t> order = context_gather_order(problem, rows);
        ASSERT_EQ(static_cast<int64_t>(order.size()), rows);
        for (int32_t row = 0; row < rows; ++row) {
          EXPECT_EQ(gathered[static_cast<size_t>(order[static_cast<size_t>(row)])], row);
        }
      }
    }
  }
}

template <class Function>
std::string refusal(Function function) {
  try {
    function();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

TEST(ContextSplitTest, RefusesWhatTheHostCanSee) {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  const auto text = [](const ContextSplitProblem& problem, const Values& seq_len,
                       const Values& ext_len) {
    return refusal([&] { context_split(problem, seq_len, ext_len); });
  };
  const auto expect = [](const std::string& actual, const std::string& fragment) {
    EXPECT_NE(actual.find("context_split: "), std::string::npos) << actual;
    EXPECT_NE(actual.find(fragment), std::string::npos) << actual;
  };
  expect(text(round_robin(0, 0), {4}, {4}), "ranks = 0, expected 1..");
  expect(text(round_robin(2, 2), {4}, {4}), "rank = 2, expected 0..1");
  expect(text(round_robin(2, -1), {4}, {4}), "rank = -1, expected 0..1");
  expect(text({2, 0, static_cast<ContextScheme>(7)}, {4}, {4}), "scheme = 7");
  expect(text(round_robin(2, 0), {4, 4}, {4}), "seq_len has 2 requests and ext_len 1");
  expect(text(round_robin(2, 0), {4, 4}, {4, -1}), "request 1: ext_len = -1");
  expect(text(round_robin(2, 0), {4, 4, 3}, {4, 4, 4}), "request 2: seq_len = 3");
  expect(text(round_robin(2, 0), {-5}, {0}), "request 0: seq_len = -5");
  expect(text(round_robin(2, 0), {kMax, 1}, {1, 1}), "request 1: the sum of seq_len");
  expect(text(zigzag(2, 0), {9, 9}, {9, 9}), "zigzag with 2 requests, expected 1");
  expect(text(zigzag(2, 0), {}, {}), "zigzag with 0 requests, expected 1");
  expect(text(zigzag(2, 0), {30}, {3}), "zigzag over 2 ranks with 3 rows, expected at least 4");
  expect(refusal([] { context_gather_rows(zigzag(2, 0), 3); }), "expected at least 4");
  expect(refusal([] { context_gather_order(round_robin(2, 0), -1); }), "rows = -1");
  expect(refusal([] { context_gather_order(round_robin(0, 0), 4); }), "ranks = 0");
  EXPECT_EQ(text(round_robin(2, 0), {kMax}, {1}), "accepted");
}

TEST(ContextSplitTest, ManyRanksNeedNoMemoryOfTheirOwn) {
  constexpr int kRanks = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(context_split(round_robin(kRanks, 1), Values{5}, Values{5}).rank_rows, Values{1});
  expect_empty(context_split(round_robin(kRanks, kRanks - 1), Values{5}, Values{5}));
}

TEST(ContextSplitTest, SchemesHaveNames) {
  EXPECT_EQ(to_string(ContextScheme::kRoundRobin), "round_robin");
  EXPECT_EQ(to_string(ContextScheme::kZigzag), "zigzag");
}

}  // namespace
}  // namespace fovea
