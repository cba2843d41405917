#include "fovea/build_page_table.h"

#include <gtest/gtest.h>

#include "fovea/error.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;
using Table = std::vector<int32_t>;

struct Map {
  BuildPageTableProblem problem;
  Tensor req_to_token, pool_row, kv_len, page_table, kv_indices, kv_page_indptr;

  // Pages of the pool rows; a row of the map has width W, its slots those of the pages in order.
  Map(const std::vector<Table>& pages, int64_t width, const Table& rows, const Table& lengths,
      int64_t page_size, int64_t columns) {
    std::vector<int32_t> slots;
    for (const Table& row : pages) {
      for (int64_t j = 0; j < width; ++j) {
        const int32_t page = row[static_cast<size_t>(j / page_size)];
        slots.push_back(page < 0 ? -1
                                 : page * static_cast<int32_t>(page_size) +
                                       static_cast<int32_t>(j % page_size));
      }
    }
    const auto requests = static_cast<int64_t>(rows.size());
    problem = {.max_requests = requests, .max_pages = columns, .page_size = page_size};
    req_to_token = Tensor::i32({static_cast<int64_t>(pages.size()), width}, slots);
    pool_row = Tensor::i32({requests}, rows);
    kv_len = Tensor::i32({requests}, lengths);
    page_table = Tensor(DType::kI32, {requests, columns});
    page_table.fill_bytes(0x55);
    kv_indices = Tensor(DType::kI32, {requests * columns + 2});
    kv_indices.fill_bytes(0x55);
    kv_page_indptr = Tensor(DType::kI32, {requests + 1});
  }

  void run(const Options& options, int threads = 1, bool packed = true) {
    BuildPageTableTensors tensors;
    tensors.req_to_token = req_to_token;
    tensors.pool_row = pool_row;
    tensors.kv_len = kv_len;
    tensors.page_table = page_table;
    if (packed) {
      tensors.kv_indices = kv_indices;
      tensors.kv_page_indptr = kv_page_indptr;
    }
    test::run(BuildPageTable::plan(problem, test::device_of(options, threads), options), tensors);
  }
  Table table() const { return page_table.values<int32_t>(); }
};

class BuildPageTableTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, BuildPageTableTest,
                         testing::ValuesIn(test::targets_of("build_page_table")),
                         test::target_name);

const std::vector<Table> kPages = {{2, 7, 4, 9}, {6, 8, 11, 0}, {5, 1, 10, 3}};

TEST_P(BuildPageTableTest, WorkedCaseWithSlackAndInPlaceRebuild) {
  // P = 4, slack 3, L = 5 and 9: 8 and 12 tokens.
  Map map(kPages, 16, {2, 0}, {5, 9}, 4, 4);
  map.problem.delta = 3;
  map.run(GetParam().options());
  EXPECT_EQ(map.table(), (Table{5, 1, 0, 0, 2, 7, 4, 0}));
  EXPECT_EQ(map.kv_page_indptr.values<int32_t>(), (Table{0, 2, 5}));
  EXPECT_EQ(map.kv_indices.values<int32_t>(), (Table{5, 1, 2, 7, 4, 0, 0, 0, 0, 0}));
  // Shorter requests: no page of the longer ones survives.
  map.kv_len = Tensor::i32({2}, {1, 0});
  map.run(GetParam().options());
  EXPECT_EQ(map.table(), (Table{5, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(map.kv_page_indptr.values<int32_t>(), (Table{0, 1, 1}));
  EXPECT_EQ(map.kv_indices.values<int32_t>(), (Table{5, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
}

TEST_P(BuildPageTableTest, NoPagesForLengthsOfZeroWhateverTheSlack) {
  Map map(kPages, 16, {0, 1, 2}, {0, -5, 1}, 4, 3);
  map.problem.delta = 8;
  map.run(GetParam().options());
  EXPECT_EQ(map.table(), (Table{0, 0, 0, 0, 0, 0, 5, 1, 10}));
}

TEST_P(BuildPageTableTest, PoolRowsOutsideTheMapGiveZeros) {
  Map map(kPages, 16, {-1, 3, 2147483647, 1}, {9, 9, 9, 9}, 4, 3);
  map.run(GetParam().options());
  EXPECT_EQ(map.table(), (Table{0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 8, 11}));
}

TEST_P(BuildPageTableTest, NegativeEntriesBecomeMinusOne) {
  Map map({{2, -1, 4, -1}}, 16, {0}, {12}, 4, 4);
  map.run(GetParam().options());
  EXPECT_EQ(map.table(), (Table{2, -1, 4, 0}));
}

TEST_P(BuildPageTableTest, LengthsAreCutToMapAndTable) {
  Map map(kPages, 13, {0, 0}, {2147483647, 100}, 4, 3);  // a map of 13 slots: 4 pages; 3 columns
  map.problem.delta = 2147483647;
  map.run(GetParam().options());
  EXPECT_EQ(map.table(), (Table{2, 7, 4, 2, 7, 4}));
  Map wide(kPages, 13, {0}, {2147483647}, 4, 6);
  wide.run(GetParam().options());
  EXPECT_EQ(wide.table(), (Table{2, 7, 4, 9, 0, 0}));
  wide.problem.delta = -2147483646;
  wide.run(GetParam().options());
  EXPECT_EQ(wide.table(), (Table{2, 0, 0, 0, 0, 0}));
}

TEST_P(BuildPageTableTest, DegenerateBatchesReturn) {
  Map none(kPages, 16, {}, {}, 4, 4);
  none.run(GetParam().options());
  EXPECT_EQ(none.kv_page_indptr.values<int32_t>(), Table{0});
  Map empty(kPages, 16, Table(32, 1), Table(32, 0), 4, 2);
  empty.run(GetParam().options());
  EXPECT_EQ(empty.table(), Table(64, 0));
  Map no_columns(kPages, 16, {0}, {9}, 4, 0);
  no_columns.run(GetParam().options());
}

TEST_P(BuildPageTableTest, StridedMapAndTableAndThreads) {
  test::Rng rng(3);
  const int64_t requests = 37, width = 300, columns = 40, page_size = 8;
  std::vector<Table> pages;
  Table rows, lengths;
  for (int64_t r = 0; r < requests; ++r) {
    Table row;
    for (int64_t p = 0; p < columns; ++p) row.push_back(static_cast<int32_t>(rng.integer(-1, 900)));
    pages.push_back(row);
    rows.push_back(static_cast<int32_t>(rng.integer(-1, requests)));
    lengths.push_back(static_cast<int32_t>(rng.integer(-3, 330)));
  }
  Map expected(pages, width, rows, lengths, page_size, columns);
  expected.run({"ref"});
  for (const int threads : {1, 2, 5}) {
    Map map(pages, width, rows, lengths, page_size, columns);
    map.run(GetParam().options(), threads);
    EXPECT_EQ(map.table(), expected.table());
    EXPECT_EQ(map.kv_indices.bytes(), expected.kv_indices.bytes());
    EXPECT_EQ(map.kv_page_indptr.bytes(), expected.kv_page_indptr.bytes());
  }
  // A table row pitch above its width, starting at 4 bytes past an alignment.
  Map map(pages, width, rows, lengths, page_size, columns);
  Tensor wide(DType::kI32, {requests * (columns + 3) + 1});
  wide.fill_bytes(0x55);
  BuildPageTableTensors tensors;
  tensors.req_to_token = map.req_to_token;
  tensors.pool_row = map.pool_row;
  tensors.kv_len = map.kv_len;
  tensors.page_table = map.page_table;
  tensors.page_table.data = wide.data<int32_t>() + 1;
  tensors.page_table.stride[0] = columns + 3;
  test::run(BuildPageTable::plan(map.problem, GetParam().device(2), GetParam().options()), tensors);
  for (int64_t r = 0; r < requests; ++r) {
    for (int64_t p = 0; p < columns + 3; ++p) {
      EXPECT_EQ(wide.data<int32_t>()[1 + r * (columns + 3) + p],
                p < columns ? expected.table()[static_cast<size_t>(r * columns + p)] : 0x55555555);
    }
  }
}

TEST_P(BuildPageTableTest, RunDoesNotAllocate) {
  Map map(kPages, 16, {2, 0}, {5, 9}, 4, 4);
  BuildPageTableTensors tensors;
  tensors.req_to_token = map.req_to_token;
  tensors.pool_row = map.pool_row;
  tensors.kv_len = map.kv_len;
  tensors.page_table = map.page_table;
  const BuildPageTable plan =
      BuildPageTable::plan(map.problem, GetParam().device(1), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST(BuildPageTable, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  const BuildPageTableProblem good{.max_requests = 2, .max_pages = 4, .page_size = 4};
  const auto refuse_plan = [&](auto change) {
    BuildPageTableProblem problem = good;
    change(problem);
    EXPECT_THROW(BuildPageTable::plan(problem, cpu), Error);
  };
  refuse_plan([](BuildPageTableProblem& p) { p.max_requests = -1; });
  refuse_plan([](BuildPageTableProblem& p) { p.max_pages = int64_t{1} << 31; });
  refuse_plan([](BuildPageTableProblem& p) { p.page_size = 0; });
  refuse_plan([](BuildPageTableProblem& p) { p.delta = int64_t{1} << 31; });

  const auto refuse_run = [&](auto change) {
    Map map(kPages, 16, {2, 0}, {5, 9}, 4, 4);
    BuildPageTableTensors tensors{.req_to_token = map.req_to_token,
                                  .pool_row = map.pool_row,
                                  .kv_len = map.kv_len,
                                  .page_table = map.page_table};
    change(tensors, map);
    EXPECT_THROW(test::run(BuildPageTable::plan(good, cpu), tensors), Error);
    EXPECT_EQ(map.table(), Table(8, 0x55555555));
  };
  refuse_run([](BuildPageTableTensors& t, Map&) { t.req_to_token = {}; });
  refuse_run([](BuildPageTableTensors& t, Map&) { t.kv_len.shape[0] = 1; });
  refuse_run([](BuildPageTableTensors& t, Map&) { t.page_table.shape[1] = 5; });
  refuse_run([](BuildPageTableTensors& t, Map&) { t.page_table.dtype = DType::kF32; });
  refuse_run([](BuildPageTableTensors& t, Map& map) { t.kv_indices = map.kv_indices; });
  refuse_run([](BuildPageTableTensors& t, Map& map) {
    t.kv_indices = map.kv_indices;
    t.kv_page_indptr = map.kv_page_indptr;
    t.kv_indices.shape[0] = 7;  // R * max_pages is 8
  });
}

}  // namespace
}  // namespace fovea
