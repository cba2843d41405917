#include "fovea/swa_indices.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <numeric>

#include "fovea/error.h"
#include "tests/mla/sparse_mla_case.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::StridedTensor;
using test::Tensor;

struct WindowBatch {
  std::vector<int32_t> q_indptr;
  std::vector<int32_t> kv_len;
  std::vector<std::vector<int32_t>> page_table;  // a row of each request, of one width
  std::vector<uint8_t> row_valid = {};           // empty: absent
  int64_t rows = 0;
  int64_t window = 0;
  int64_t width = 0;
  int64_t page_size = 1;
  WindowStorage storage = WindowStorage::kPaged;
  int64_t pages = -1;
};

struct Windows {
  std::vector<std::vector<int32_t>> indices;
  std::vector<int32_t> row_len;
  bool operator==(const Windows&) const = default;
};

// By the definition, row by row.
Windows by_definition(const WindowBatch& batch) {
  Windows result;
  for (int64_t t = 0; t < batch.rows; ++t) {
    std::vector<int32_t> row;
    int64_t begin = std::clamp<int64_t>(batch.q_indptr[0], 0, batch.rows);
    for (size_t r = 0; r < batch.kv_len.size(); ++r) {
      const int64_t end =
          std::max(begin, std::clamp<int64_t>(batch.q_indptr[r + 1], 0, batch.rows));
      const bool valid = batch.row_valid.empty() || batch.row_valid[static_cast<size_t>(t)] != 0;
      if (t >= begin && t < end && valid) {
        const int64_t p = batch.kv_len[r] - (end - begin) + (t - begin);
        for (int64_t token = std::max<int64_t>(0, p - batch.window + 1); token <= p; ++token) {
          const int64_t column =
              batch.storage == WindowStorage::kRing ? 0 : token / batch.page_size;
          const std::vector<int32_t>& table = batch.page_table[r];
          int64_t slot = -1;
          if (column < static_cast<int64_t>(table.size())) {
            const int64_t page = table[static_cast<size_t>(column)];
            if (page >= 0 && (batch.pages < 0 || page < batch.pages))
              slot = page * batch.page_size + token % batch.page_size;
          }
          row.push_back(static_cast<int32_t>(slot > INT_MAX ? -1 : slot));
        }
      }
      begin = end;
    }
    result.row_len.push_back(static_cast<int32_t>(row.size()));
    row.resize(static_cast<size_t>(batch.width), -1);
    result.indices.push_back(row);
  }
  return result;
}

SwaIndicesProblem problem_of(const WindowBatch& batch) {
  return {.max_rows = batch.rows,
          .max_requests = static_cast<int64_t>(batch.kv_len.size()),
          .window = batch.window,
          .width = batch.width,
          .page_size = batch.page_size,
          .storage = batch.storage,
          .pages = batch.pages};
}

Windows run(const WindowBatch& batch, const Options& options, int threads = 1) {
  const auto requests = static_cast<int64_t>(batch.kv_len.size());
  const auto columns =
      static_cast<int64_t>(batch.page_table.empty() ? 1 : batch.page_table[0].size());
  const Tensor q_indptr = Tensor::i32({requests + 1}, batch.q_indptr);
  const Tensor kv_len = Tensor::i32({requests}, batch.kv_len);
  const Tensor valid =
      Tensor::from(DType::kU8, {batch.rows},
                   batch.row_valid.empty() ? std::vector<uint8_t>(static_cast<size_t>(batch.rows))
                                           : batch.row_valid);
  const StridedTensor table(DType::kI32, {requests, columns}, {0, 3}, 0x7F);
  for (int64_t r = 0; r < requests; ++r) {
    for (int64_t c = 0; c < columns; ++c)
      table.at<int32_t>({r, c}) = batch.page_table[static_cast<size_t>(r)][static_cast<size_t>(c)];
  }
  const StridedTensor indices(DType::kI32, {batch.rows, batch.width}, {0, 5}, 0x55);
  const StridedTensor row_len(DType::kI32, {batch.rows}, {0}, 0x55);
  SwaIndicesTensors tensors;
  tensors.q_indptr = q_indptr;
  tensors.kv_len = kv_len;
  tensors.page_table = table.view();
  if (!batch.row_valid.empty()) tensors.row_valid = valid;
  tensors.indices = indices.view();
  tensors.row_len = row_len.view();
  test::run(BuildSwaIndices::plan(problem_of(batch), test::device_of(options, threads), options),
            tensors);
  EXPECT_TRUE(indices.gaps_untouched());
  Windows result;
  for (int64_t t = 0; t < batch.rows; ++t) {
    const int32_t* row = batch.width > 0 ? &indices.at<int32_t>({t, 0}) : nullptr;
    result.indices.emplace_back(row, row + batch.width);
    result.row_len.push_back(row_len.at<int32_t>({t}));
  }
  return result;
}

class BuildSwaIndicesTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }
};
INSTANTIATE_TEST_SUITE_P(Targets, BuildSwaIndicesTest,
                         testing::ValuesIn(test::targets_of("build_swa_indices")),
                         test::target_name);

TEST_P(BuildSwaIndicesTest, KnownFault18TheWindowIncludesTheRowItself) {
  for (const int32_t length : {1, 127, 128, 129, 191, 192, 193, 300}) {
    WindowBatch batch{.q_indptr = {0, 1}, .kv_len = {length}, .page_table = {{4, 1, 3, 0, 2}}};
    batch.rows = 1;
    batch.window = batch.width = 128;
    batch.page_size = 64;
    // Pages wholly before the window are gone.
    for (int32_t c = 0; (c + 1) * 64 <= length - 128; ++c)
      batch.page_table[0][static_cast<size_t>(c)] = -1;
    const Windows windows = run(batch, options());
    EXPECT_EQ(windows.row_len[0], std::min(length, 128));
    const int32_t first = std::max(0, length - 128);
    const int32_t order[] = {4, 1, 3, 0, 2};
    for (int32_t j = 0; j < windows.row_len[0]; ++j) {
      const int32_t token = first + j;
      EXPECT_EQ(windows.indices[0][static_cast<size_t>(j)], order[token / 64] * 64 + token % 64);
    }
  }
}

TEST_P(BuildSwaIndicesTest, EveryRowOfAStepHasItsOwnWindow) {
  WindowBatch batch{.q_indptr = {0, 3, 4}, .kv_len = {6, 2}, .page_table = {{7}, {2}}};
  batch.rows = 6;  // two of nobody
  batch.window = 4;
  batch.width = 5;
  batch.page_size = 10;
  const Windows expected{{{70, 71, 72, 73, -1},
                          {71, 72, 73, 74, -1},
                          {72, 73, 74, 75, -1},
                          {20, 21, -1, -1, -1},
                          {-1, -1, -1, -1, -1},
                          {-1, -1, -1, -1, -1}},
                         {4, 4, 4, 2, 0, 0}};
  EXPECT_EQ(run(batch, options()), expected);
  batch.row_valid = {1, 0, 1, 1, 1, 1};
  const Windows masked = run(batch, options());
  EXPECT_EQ(masked.row_len, (std::vector<int32_t>{4, 0, 4, 2, 0, 0}));
  EXPECT_EQ(masked.indices[1], std::vector<int32_t>(5, -1));
}

TEST_P(BuildSwaIndicesTest, ARingTurns) {
  WindowBatch batch{.q_indptr = {0, 2}, .kv_len = {11}, .page_table = {{3}}};
  batch.rows = 2;
  batch.window = batch.width = 4;
  batch.page_size = 5;
  batch.storage = WindowStorage::kRing;
  const Windows expected{{{16, 17, 18, 19}, {17, 18, 19, 15}}, {4, 4}};  // tokens 6..9, 7..10
  EXPECT_EQ(run(batch, options()), expected);
}

TEST_P(BuildSwaIndicesTest, KnownFault8LengthsOfZeroAndBelow) {
  WindowBatch batch{.q_indptr = {0, 3, 3, 4, 5},
                    .kv_len = {2, 0, 0, INT_MIN},
                    .page_table = {{0}, {1}, {2}, {3}}};
  batch.rows = 5;
  batch.window = batch.width = 2;
  batch.page_size = 4;
  // The first of 3 rows over 2 tokens stands before the first token.
  const Windows expected{{{-1, -1}, {0, -1}, {0, 1}, {-1, -1}, {-1, -1}}, {0, 1, 2, 0, 0}};
  EXPECT_EQ(run(batch, options()), expected);
  const WindowBatch none{
      .q_indptr = {0}, .kv_len = {}, .page_table = {}, .rows = 2, .window = 1, .width = 1};
  EXPECT_EQ(run(none, options()), (Windows{{{-1}, {-1}}, {0, 0}}));
}

TEST_P(BuildSwaIndicesTest, SlotsBeyondInt32AreNowhere) {
  WindowBatch batch{.q_indptr = {0, 1}, .kv_len = {64}, .page_table = {{33554431, 0}}};
  batch.rows = 1;
  batch.window = batch.width = 64;
  batch.page_size = 64;
  EXPECT_EQ(run(batch, options()).indices[0].back(), INT_MAX);
  batch.page_size = 65;  // 33554431 * 65 does not fit
  EXPECT_EQ(run(batch, options()).indices[0], std::vector<int32_t>(64, -1));
  batch.page_table = {{INT_MAX, 0}};
  EXPECT_EQ(run(batch, options()).indices[0], std::vector<int32_t>(64, -1));
}

TEST_P(BuildSwaIndicesTest, RandomAndHostileBatchesFollowTheDefinition) {
  test::Rng rng(5);
  for (int round = 0; round < 60; ++round) {
    WindowBatch batch;
    const auto requests = rng.integer(0, 6);
    const auto columns = rng.integer(1, 9);
    batch.rows = rng.integer(0, 40);
    batch.window = rng.integer(1, 70);
    batch.width = batch.window + rng.integer(0, 5);
    batch.page_size = rng.integer(1, 17);
    batch.storage = rng.integer(0, 3) == 0 ? WindowStorage::kRing : WindowStorage::kPaged;
    batch.pages = rng.integer(0, 1) == 0 ? -1 : 20;
    const bool hostile = rng.integer(0, 1) == 0;
    const auto pick = [&](int64_t lowest, int64_t highest) {
      const int32_t bad[] = {INT_MIN, -1, -77, 20, 1 << 30, INT_MAX};
      if (hostile && rng.uniform() < 0.2) return bad[rng.integer(0, 5)];
      return static_cast<int32_t>(rng.integer(lowest, highest));
    };
    int32_t offset = static_cast<int32_t>(rng.integer(0, 2));
    batch.q_indptr.push_back(offset);
    for (int64_t r = 0; r < requests; ++r) {
      offset += static_cast<int32_t>(rng.integer(0, 9));
      batch.q_indptr.push_back(hostile ? pick(0, batch.rows) : offset);
      // Lengths that make a window of INT_MAX tokens too long for the oracle are left out.
      batch.kv_len.push_back(static_cast<int32_t>(rng.integer(hostile ? -9 : 0, 120)));
      batch.page_table.emplace_back();
      for (int64_t c = 0; c < (batch.storage == WindowStorage::kRing ? 1 : columns); ++c)
        batch.page_table.back().push_back(pick(0, 19));
    }
    if (rng.integer(0, 1) == 0) {
      for (int64_t t = 0; t < batch.rows; ++t)
        batch.row_valid.push_back(static_cast<uint8_t>(rng.integer(0, 2)));
    }
    const Windows expected = by_definition(batch);
    EXPECT_EQ(run(batch, options()), expected) << "round " << round;
    EXPECT_EQ(run(batch, options(), 3), expected) << "round " << round;
  }
}

TEST(BuildSwaIndices, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  const SwaIndicesProblem good{
      .max_rows = 2, .max_requests = 1, .window = 4, .width = 5, .page_size = 3};
  const auto refuse_plan = [&](auto&& change) {
    SwaIndicesProblem problem = good;
    change(problem);
    EXPECT_THROW(BuildSwaIndices::plan(problem, cpu), Error);
  };
  refuse_plan([](SwaIndicesProblem& p) { p.max_rows = -1; });
  refuse_plan([](SwaIndicesProblem& p) { p.window = 0; });
  refuse_plan([](SwaIndicesProblem& p) { p.width = 3; });
  refuse_plan([](SwaIndicesProblem& p) { p.page_size = 0; });
  refuse_plan([](SwaIndicesProblem& p) { p.pages = -2; });
  const auto refuse_run = [&](auto&& change, WindowStorage storage = WindowStorage::kPaged) {
    const Tensor q_indptr = Tensor::i32({2}, {0, 2}), kv_len = Tensor::i32({1}, {2});
    const Tensor table = Tensor::i32({1, 2}, {0, 1}), valid(DType::kU8, {2});
    Tensor indices(DType::kI32, {2, 5}), row_len(DType::kI32, {2});
    indices.fill_bytes(0x55);
    SwaIndicesTensors tensors{q_indptr, kv_len, table, valid, indices, row_len};
    change(tensors);
    SwaIndicesProblem problem = good;
    problem.storage = storage;
    const BuildSwaIndices plan = BuildSwaIndices::plan(problem, cpu);
    HostBuffer scratch(plan.workspace_bytes());
    EXPECT_THROW(plan.run(tensors, scratch.workspace()), Error);
    EXPECT_EQ(indices.bytes(), std::vector<uint8_t>(40, 0x55));
  };
  refuse_run([](SwaIndicesTensors& t) { t.q_indptr.shape[0] = 1; });
  refuse_run([](SwaIndicesTensors& t) { t.kv_len.shape[0] = 0; });
  refuse_run([](SwaIndicesTensors& t) { t.page_table.dtype = DType::kI64; });
  refuse_run([](SwaIndicesTensors& t) { t.row_valid.shape[0] = 1; });
  refuse_run([](SwaIndicesTensors& t) { t.indices.shape[1] = 4; });
  refuse_run([](SwaIndicesTensors& t) { t.row_len.shape[0] = 1; });
  refuse_run([](SwaIndicesTensors&) {}, WindowStorage::kRing);  // the table has two columns
}

}  // namespace
}  // namespace fovea
