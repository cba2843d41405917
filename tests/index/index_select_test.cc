#include "fovea/index_select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "fovea/error.h"
#include "fovea/topk_select.h"
#include "tests/index/index_logits_case.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::LogitsCase;
using test::Tensor;

Tensor i32(const std::vector<int32_t>& values) {
  return Tensor::i32({static_cast<int64_t>(values.size())}, values);
}

// The same implementation of a part, or "cpu" where the part has no such name.
Options part_options(const char* op, const std::string& implementation) {
  for (const OperatorInfo& info : operators()) {
    if (info.name != op) continue;
    for (const ImplementationInfo& entry : info.implementations) {
      if (entry.name == implementation) return {implementation};
    }
  }
  return {"cpu"};
}

// Problem and tensors of one call, with the memory of what the tests change.
struct SelectCase {
  LogitsCase c;
  IndexSelectProblem problem;
  Tensor k_start, k_end, row_len, row_to_request, row_offset, page_table, token_table, pool;
  Tensor indices;

  SelectCase(IndexLayout layout, IndexTransform transform, int64_t topk, const LogitsCase& inputs)
      : c(inputs) {
    problem.layout = layout;
    problem.max_rows = c.rows;
    problem.max_width = c.keys;
    problem.num_heads = c.heads;
    problem.head_dim = c.dim;
    problem.topk = topk;
    problem.transform = transform;
    set_padding(0);
  }

  void set_padding(int64_t rows) {
    problem.max_rows = c.rows + rows;
    indices = Tensor(DType::kI32, {c.rows + rows, problem.topk});
    indices.fill_bytes(0x55);
  }

  static ConstTensorView optional(const Tensor& tensor) {
    return tensor.view().dtype == DType::kNone ? ConstTensorView() : tensor.view();
  }

  IndexSelectTensors tensors() {
    IndexSelectTensors t;
    t.q_fp8 = c.q();
    t.head_weight = c.weight();
    if (problem.layout == IndexLayout::kRagged) {
      const IndexLogitsTensors keys = c.ragged({}, {}, {});
      t.k_fp8 = keys.k_fp8;
      t.k_scale = keys.k_scale;
      t.k_start = k_start;
      t.k_end = k_end;
    } else {
      t.index_pool = pool;
      t.row_len = row_len;
    }
    t.page_table = optional(page_table);
    t.token_table = optional(token_table);
    t.row_to_request = optional(row_to_request);
    t.row_offset = optional(row_offset);
    t.indices = indices;
    return t;
  }

  std::vector<int32_t> select(const Options& options, int threads = 1) {
    const IndexSelect plan = IndexSelect::plan(problem, test::device_of(options, threads), options);
    HostBuffer buffer(plan.workspace_bytes());
    indices.fill_bytes(0x55);
    plan.run(tensors(), buffer.workspace());
    return indices.values<int32_t>();
  }

  // index_logits into a matrix of the whole batch, then topk_select. Rows without a request, which
  // index_logits leaves unspecified, count as empty.
  std::vector<int32_t> select_in_two_steps(const std::string& implementation) {
    const IndexSelectTensors all = tensors();
    Tensor logits(DType::kF32, {c.rows, problem.max_width});
    logits.fill_bytes(0xFF);
    IndexLogitsTensors scoring{
        all.q_fp8,      all.head_weight, all.k_fp8,          all.k_scale, all.k_start, all.k_end,
        all.index_pool, all.page_table,  all.row_to_request, all.row_len, {},          logits};
    if (problem.layout == IndexLayout::kPaged) {
      scoring.row_to_request.shape[0] = c.rows;  // without padding
    }
    const IndexLogits logits_plan =
        IndexLogits::plan({problem.layout, c.rows, c.heads, c.dim, problem.page_size},
                          test::device_of(part_options("index_logits", implementation), 1),
                          part_options("index_logits", implementation));
    HostBuffer buffer(logits_plan.workspace_bytes());
    logits_plan.run(scoring, buffer.workspace());

    std::vector<int32_t> lengths(static_cast<size_t>(c.rows));
    for (int64_t t = 0; t < c.rows; ++t) {
      int32_t& len = lengths[static_cast<size_t>(t)];
      if (problem.layout == IndexLayout::kRagged) {
        const auto cut = [&](int32_t key) {
          return std::clamp<int32_t>(key, 0, static_cast<int32_t>(c.keys));
        };
        len = cut(k_end.data<int32_t>()[t]) - cut(k_start.data<int32_t>()[t]);
      } else {
        const int32_t request = row_to_request.data<int32_t>()[t];
        const bool exists = request >= 0 && request < page_table.view().shape[0];
        len = exists ? row_len.data<int32_t>()[t] : 0;
      }
    }
    TopkSelectTensors selection;
    const Tensor row_lengths = i32(lengths);
    Tensor out = indices;
    selection.logits = logits;
    selection.row_len = row_lengths;
    selection.token_table = all.token_table;
    if (!all.token_table.defined()) selection.page_table = all.page_table;
    selection.row_to_request = all.row_to_request;
    selection.row_offset = all.row_offset;
    selection.indices = out;
    const int64_t table_page = all.token_table.defined() ? 0 : problem.page_size;
    const TopkSelect topk_plan = TopkSelect::plan(
        {problem.max_rows, problem.max_width, problem.topk, problem.transform, table_page},
        test::device_of(part_options("topk_select", implementation), 1),
        part_options("topk_select", implementation));
    buffer.reserve(topk_plan.workspace_bytes());
    topk_plan.run(selection, buffer.workspace());
    return out.values<int32_t>();
  }
};

class IndexSelectTest : public test::TargetTest {
 protected:
  // Against the two operators in turn, for several thread counts and chunk sizes.
  void expect_two_steps(SelectCase& c) {
    const std::vector<int32_t> expected = c.select_in_two_steps(GetParam().implementation);
    for (const int threads : {1, 2, 3}) {
      EXPECT_EQ(c.select(GetParam().options(), threads), expected) << threads << " threads";
    }
    const int64_t budget = c.problem.logits_budget_bytes;
    for (const int64_t bytes : {int64_t{1}, 2 * 4 * (c.problem.max_width + 16)}) {
      c.problem.logits_budget_bytes = bytes;
      EXPECT_EQ(c.select(GetParam().options(), 2), expected) << bytes << " bytes of logits";
    }
    c.problem.logits_budget_bytes = budget;
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, IndexSelectTest,
                         testing::ValuesIn(test::targets_of("index_select")), test::target_name);

// Starts and ends of five rows over 300 keys: long, short (<= 16 keys), empty, reversed, cut.
SelectCase ragged_case(IndexTransform transform) {
  SelectCase c(IndexLayout::kRagged, transform, 16, LogitsCase(1, 6, 4, 32, 300));
  c.k_start = i32({0, 100, 70, 200, 120, -9});
  c.k_end = i32({300, 116, 70, 150, 400, 299});
  return c;
}

// Three requests on shuffled pages of a pool, with a hole (page -1) in the second and a page
// outside the pool in the third; rows of no request among the rows.
SelectCase paged_case(IndexTransform transform, int64_t page_size = 8) {
  SelectCase c(IndexLayout::kPaged, transform, 16, LogitsCase(2, 7, 4, 32, 96));
  c.problem.page_size = page_size;
  const LogitsCase::Pool pool = c.c.paged(page_size, 0, 96, 0x7F);
  c.pool = pool.pool;
  const auto columns = static_cast<int64_t>(pool.pages.size());
  std::vector<int32_t> table;
  for (int64_t r = 0; r < 3; ++r) {
    table.insert(table.end(), pool.pages.begin(), pool.pages.end());
    std::rotate(table.end() - columns, table.end() - columns + r, table.end());
  }
  table[static_cast<size_t>(columns + 1)] = -1;
  table[static_cast<size_t>(2 * columns)] = 0x7FFFFFF0 / static_cast<int32_t>(page_size);
  c.page_table = Tensor::i32({3, columns}, table);
  c.row_to_request = i32({0, 1, 2, -1, 3, 1, 0});
  c.row_len = i32({96, 95, 33, 50, 50, 16, 17});
  return c;
}

TEST_P(IndexSelectTest, RaggedEqualsTheTwoOperatorsInTurn) {
  SelectCase local = ragged_case(IndexTransform::kLocal);
  expect_two_steps(local);
  SelectCase ragged = ragged_case(IndexTransform::kRagged);
  ragged.row_offset = i32({0, 100, 70, 200, 120, -5});
  expect_two_steps(ragged);
  SelectCase paged = ragged_case(IndexTransform::kPaged);
  paged.problem.page_size = 100;
  paged.page_table = Tensor::i32({2, 3}, {7, -1, 9, 1, 2, 3});
  paged.row_to_request = i32({0, 1, 1, 0, 5, -1});
  expect_two_steps(paged);
}

TEST_P(IndexSelectTest, PagedEqualsTheTwoOperatorsInTurn) {
  for (const IndexTransform transform : {IndexTransform::kLocal, IndexTransform::kPaged}) {
    for (const int64_t page_size : {1, 8, 61}) {
      SelectCase c = paged_case(transform, page_size);
      expect_two_steps(c);
    }
  }
  SelectCase ragged = paged_case(IndexTransform::kRagged);
  ragged.row_offset = i32({0, 1000, 2000, 3, 4, 5, 6});
  expect_two_steps(ragged);
}

TEST_P(IndexSelectTest, TokenTablesAreFollowedRowByRowOrByRequest) {
  std::vector<int32_t> slots(4 * 280);
  std::iota(slots.begin(), slots.end(), 5000);
  SelectCase by_row = ragged_case(IndexTransform::kPaged);
  by_row.token_table = Tensor::i32({4, 280}, slots);  // rows 4 and 5 have none
  expect_two_steps(by_row);
  SelectCase by_request = ragged_case(IndexTransform::kPaged);
  by_request.token_table = Tensor::i32({4, 280}, slots);
  by_request.row_to_request = i32({3, 3, 0, 0, 2, 9});
  expect_two_steps(by_request);
  SelectCase paged = paged_case(IndexTransform::kPaged);
  paged.token_table = Tensor::i32({4, 280}, slots);
  expect_two_steps(paged);
}

TEST_P(IndexSelectTest, PaddingRowsAreHoles) {
  for (const int64_t budget : {int64_t{1}, int64_t{1} << 20}) {
    SelectCase c = paged_case(IndexTransform::kPaged);
    c.problem.logits_budget_bytes = budget;
    const std::vector<int32_t> live = c.select(GetParam().options());
    c.set_padding(3);
    c.row_to_request = i32({0, 1, 2, -1, 3, 1, 0, -1, -1, -1});
    std::vector<int32_t> expected = live;
    expected.resize(expected.size() + 3 * 16, -1);
    EXPECT_EQ(c.select(GetParam().options()), expected);
  }
  // No live row at all.
  SelectCase none(IndexLayout::kRagged, IndexTransform::kLocal, 4, LogitsCase(3, 0, 2, 8, 5));
  none.k_start = none.k_end = Tensor(DType::kI32, {0});
  EXPECT_EQ(none.select(GetParam().options()), std::vector<int32_t>());
  none.set_padding(2);
  EXPECT_EQ(none.select(GetParam().options()), std::vector<int32_t>(8, -1));
}

TEST_P(IndexSelectTest, RowsThatSelectEverythingReadNoKeyAndNoQuery) {
  test::GuardedMemory guard(4096);
  const void* unreadable = static_cast<const char*>(guard.data()) + 4096;
  SelectCase ragged(IndexLayout::kRagged, IndexTransform::kLocal, 8, LogitsCase(4, 3, 2, 16, 20));
  ragged.k_start = i32({0, 5, 9});
  ragged.k_end = i32({8, 8, 2});
  IndexSelectTensors tensors = ragged.tensors();
  tensors.q_fp8.data = tensors.head_weight.data = tensors.k_fp8.data = unreadable;
  tensors.k_scale.data = unreadable;
  const IndexSelect plan =
      IndexSelect::plan(ragged.problem, GetParam().device(1), GetParam().options());
  HostBuffer buffer(plan.workspace_bytes());
  plan.run(tensors, buffer.workspace());
  EXPECT_EQ(ragged.indices.values<int32_t>(),
            (std::vector<int32_t>{0,  1,  2,  3,  4,  5,  6,  7,  0,  1,  2,  -1,
                                  -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}));
}

TEST_P(IndexSelectTest, KnownFault5TailsOfPagesHaveNoInfluence) {
  for (const int32_t len : {17, 23, 24, 25, 65, 95}) {
    std::vector<int32_t> first;
    for (const uint8_t background : std::initializer_list<uint8_t>{0x00, 0xFF, 0x7E}) {
      SelectCase c(IndexLayout::kPaged, IndexTransform::kLocal, 16, LogitsCase(5, 1, 4, 32, 96));
      c.problem.page_size = 24;
      const LogitsCase::Pool pool = c.c.paged(24, 0, len, background);
      c.pool = pool.pool;
      c.page_table = Tensor::i32({1, static_cast<int64_t>(pool.pages.size())}, pool.pages);
      c.row_to_request = i32({0});
      c.row_len = i32({len});
      const std::vector<int32_t> selected = c.select(GetParam().options());
      if (background == 0) first = selected;
      EXPECT_EQ(selected, first) << "length " << len;
    }
  }
}

TEST_P(IndexSelectTest, KnownFault20LaterChunksSelectFromTheWholePrefix) {
  // Two requests with prefixes 300 and 400 and a chunk of 3 tokens each; the 16 best keys of every
  // row lie in its request's prefix beyond the first 64 keys.
  const int64_t prefixes[] = {300, 400}, heads = 2, dim = 16, topk = 16;
  SelectCase c(IndexLayout::kRagged, IndexTransform::kLocal, topk,
               LogitsCase(6, 6, heads, dim, 706));
  std::fill(c.c.q_fp8.begin(), c.c.q_fp8.end(), e4m3_from_float(1.0f));
  std::fill(c.c.head_weight.begin(), c.c.head_weight.end(), 1.0f);
  std::fill(c.c.k_scale.begin(), c.c.k_scale.end(), 1.0f);
  for (uint8_t& code : c.c.k_fp8) code = static_cast<uint8_t>(code & 0x3F);  // 0 <= value < 2
  std::vector<int32_t> starts, ends, best[2];
  int64_t first = 0;
  for (int r = 0; r < 2; ++r) {
    for (int64_t i = 0; i < topk; ++i) {
      const int64_t j = 64 + 7 * i + r;
      best[r].push_back(static_cast<int32_t>(j));
      std::fill_n(c.c.k_row(first + j), dim, e4m3_from_float(8.0f));
    }
    for (int64_t i = 1; i <= 3; ++i) {
      starts.push_back(static_cast<int32_t>(first));
      ends.push_back(static_cast<int32_t>(first + prefixes[r] + i));
    }
    first += prefixes[r] + 3;
  }
  c.k_start = i32(starts);
  c.k_end = i32(ends);
  std::vector<int32_t> expected;
  for (int t = 0; t < 6; ++t)
    expected.insert(expected.end(), best[t / 3].begin(), best[t / 3].end());
  EXPECT_EQ(c.select(GetParam().options()), expected);
  c.problem.logits_budget_bytes = 1;
  EXPECT_EQ(c.select(GetParam().options()), expected);
}

TEST_P(IndexSelectTest, RunDoesNotAllocate) {
  SelectCase c = paged_case(IndexTransform::kPaged);
  const IndexSelect plan = IndexSelect::plan(c.problem, GetParam().device(1), GetParam().options());
  HostBuffer buffer(plan.workspace_bytes());
  const IndexSelectTensors tensors = c.tensors();
  plan.run(tensors, buffer.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, buffer.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST_P(IndexSelectTest, LogitsWorkspaceStaysWithinItsBudget) {
  IndexSelectProblem problem{.layout = IndexLayout::kRagged,
                             .max_rows = 100000,
                             .max_width = 163840,
                             .num_heads = 64,
                             .topk = 2048,
                             .logits_budget_bytes = 1};
  const auto bytes = [&](int64_t budget) {
    problem.logits_budget_bytes = budget;
    return static_cast<int64_t>(
        IndexSelect::plan(problem, GetParam().device(1), GetParam().options()).workspace_bytes());
  };
  const int64_t one_row = bytes(1);
  EXPECT_LE(bytes(int64_t{10} << 20) - one_row, int64_t{10} << 20);
  EXPECT_LE(bytes(int64_t{512} << 20) - one_row, int64_t{512} << 20);
}

TEST(IndexSelect, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  const IndexSelectProblem good = paged_case(IndexTransform::kPaged).problem;
  const auto refuse_plan = [&](auto&& change) {
    IndexSelectProblem problem = good;
    change(problem);
    EXPECT_THROW(IndexSelect::plan(problem, cpu), Error);
  };
  refuse_plan([](IndexSelectProblem& p) { p.layout = static_cast<IndexLayout>(7); });
  refuse_plan([](IndexSelectProblem& p) { p.transform = static_cast<IndexTransform>(7); });
  refuse_plan([](IndexSelectProblem& p) { p.max_rows = -1; });
  refuse_plan([](IndexSelectProblem& p) { p.max_width = int64_t{1} << 31; });
  refuse_plan([](IndexSelectProblem& p) { p.num_heads = 0; });
  refuse_plan([](IndexSelectProblem& p) { p.head_dim = 0; });
  refuse_plan([](IndexSelectProblem& p) { p.topk = -1; });
  refuse_plan([](IndexSelectProblem& p) { p.page_size = 0; });
  refuse_plan([](IndexSelectProblem& p) { p.page_size = 257; });
  refuse_plan([](IndexSelectProblem& p) { p.logits_budget_bytes = 0; });

  const auto refuse_run = [&](SelectCase c, auto&& change) {
    const IndexSelect plan = IndexSelect::plan(c.problem, cpu);
    HostBuffer buffer(plan.workspace_bytes());
    IndexSelectTensors tensors = c.tensors();
    change(tensors);
    EXPECT_THROW(plan.run(tensors, buffer.workspace()), Error);
    EXPECT_EQ(c.indices.bytes(), std::vector<uint8_t>(c.indices.bytes().size(), 0x55));
  };
  const SelectCase paged = paged_case(IndexTransform::kPaged);
  refuse_run(paged, [](IndexSelectTensors& t) { t.q_fp8 = {}; });
  refuse_run(paged, [](IndexSelectTensors& t) { t.q_fp8.shape[2] = 31; });
  refuse_run(paged, [](IndexSelectTensors& t) { t.head_weight.shape[0] = 6; });
  refuse_run(paged, [](IndexSelectTensors& t) { t.index_pool.shape[1] = 8 * 36 - 1; });
  refuse_run(paged, [](IndexSelectTensors& t) { t.page_table = {}; });
  refuse_run(paged, [](IndexSelectTensors& t) { t.row_len.shape[0] = 6; });
  refuse_run(paged, [](IndexSelectTensors& t) { t.row_to_request.shape[0] = 6; });
  refuse_run(paged, [](IndexSelectTensors& t) { t.indices.shape[0] = 6; });
  refuse_run(paged, [](IndexSelectTensors& t) { t.indices.shape[1] = 15; });
  const SelectCase ragged = ragged_case(IndexTransform::kRagged);  // row_offset is missing
  refuse_run(ragged, [](IndexSelectTensors&) {});
  const SelectCase local = ragged_case(IndexTransform::kLocal);
  refuse_run(local, [](IndexSelectTensors& t) { t.k_scale.shape[0] = 299; });
  refuse_run(local, [](IndexSelectTensors& t) { t.k_end = {}; });
}

}  // namespace
}  // namespace fovea
