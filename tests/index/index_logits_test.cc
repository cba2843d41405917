#include "fovea/index_logits.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "fovea/error.h"
#include "tests/index/index_logits_case.h"
#include "tests/support/compare.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::LogitsCase;
using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kUntouched = -12345.0f;

Tensor filled(int64_t rows, int64_t width) {
  return Tensor::f32({rows, width},
                     std::vector<float>(static_cast<size_t>(rows * width), kUntouched));
}
Tensor i32(const std::vector<int32_t>& values) {
  return Tensor::i32({static_cast<int64_t>(values.size())}, values);
}
std::vector<int32_t> constant(int64_t count, int64_t value) {
  return std::vector<int32_t>(static_cast<size_t>(count), static_cast<int32_t>(value));
}

class IndexLogitsTest : public test::TargetTest {
 protected:
  void run(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors, int threads = 1) {
    const IndexLogits plan =
        IndexLogits::plan(problem, GetParam().device(threads), GetParam().options());
    HostBuffer buffer(plan.workspace_bytes());
    plan.run(tensors, buffer.workspace());
  }

  // Row t scores keys [starts[t], ends[t]) of the case.
  Tensor ragged(const LogitsCase& c, const std::vector<int32_t>& starts,
                const std::vector<int32_t>& ends, int64_t width, int threads = 1) {
    Tensor logits = filled(c.rows, width);
    run({IndexLayout::kRagged, c.rows, c.heads, c.dim}, c.ragged(i32(starts), i32(ends), logits),
        threads);
    return logits;
  }

  // Every row belongs to request 0, whose keys are `pool`.
  Tensor paged(const LogitsCase& c, const LogitsCase::Pool& pool, const std::vector<int32_t>& lens,
               int64_t width, int threads = 1) {
    Tensor logits = filled(c.rows, width);
    IndexLogitsTensors tensors;
    tensors.q_fp8 = c.q();
    tensors.head_weight = c.weight();
    tensors.index_pool = pool.pool;
    const Tensor table = Tensor::i32({1, static_cast<int64_t>(pool.pages.size())}, pool.pages);
    const Tensor row_to_request = i32(constant(c.rows, 0));
    const Tensor row_len = i32(lens);
    tensors.page_table = table;
    tensors.row_to_request = row_to_request;
    tensors.row_len = row_len;
    tensors.logits = logits;
    run({IndexLayout::kPaged, c.rows, c.heads, c.dim, pool.page_size}, tensors, threads);
    return logits;
  }

  static double bound_of(const LogitsCase::Expected& expected) {
    return GetParam().implementation == "cuda_sm90" ? expected.e4m3_bound : expected.bound;
  }

  // Compares row t with the formula over keys [start, end).
  void expect_row(const LogitsCase& c, const Tensor& logits, int64_t width, int64_t t,
                  int64_t start, int64_t end) {
    for (int64_t j = start; j < end; ++j) {
      const LogitsCase::Expected expected = c.expect(t, j);
      const double actual = logits.data<float>()[t * width + j - start];
      ASSERT_LE(std::fabs(actual - expected.logit), bound_of(expected))
          << "row " << t << " key " << j << ": " << actual << ", expected " << expected.logit;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, IndexLogitsTest,
                         testing::ValuesIn(test::targets_of("index_logits")), test::target_name);

TEST_P(IndexLogitsTest, SumsWeightedPositiveDotProducts) {
  LogitsCase c(1, 1, 2, 2, 3);
  const auto code = [](float value) { return e4m3_from_float(value); };
  c.q_fp8 = {code(1), code(2), code(-3), code(0.5f)};
  c.head_weight = {2.0f, -1.0f};
  c.k_fp8 = {code(1), code(1), code(-2), code(4), code(-1), code(-448)};
  c.k_scale = {1.0f, 0.5f, 3.0f};
  // Dots: key 0: 3, -2.5; key 1: 6, 8; key 2: -897, -221.
  const Tensor logits = ragged(c, {0}, {3}, 3);
  EXPECT_EQ(logits.values<float>(), std::vector<float>({6.0f, 2.0f, 0.0f}));
}

TEST_P(IndexLogitsTest, AgreesWithTheFormulaForAnyHeadCountAndWidth) {
  const std::vector<std::pair<int64_t, int64_t>> shapes = {
      {1, 128},   {8, 128}, {16, 128}, {20, 128}, {32, 128}, {40, 128}, {64, 128}, {96, 128},
      {128, 128}, {3, 1},   {5, 7},    {4, 32},   {6, 64},   {2, 100},  {3, 516}};
  for (const auto& [heads, dim] : shapes) {
    if (GetParam().implementation == "cuda_sm90" && (heads > 64 || dim > 128)) {
      EXPECT_THROW(IndexLogits::plan({IndexLayout::kRagged, 2, heads, dim}, GetParam().device(),
                                     GetParam().options()),
                   Error);
      continue;
    }
    const LogitsCase c(static_cast<uint64_t>(heads * 1000 + dim), 2, heads, dim, 53);
    const Tensor logits = ragged(c, {0, 3}, {53, 52}, 53, 2);
    expect_row(c, logits, 53, 0, 0, 53);
    expect_row(c, logits, 53, 1, 3, 52);
    std::vector<double> actual, expected;
    for (int64_t j = 0; j < 53; ++j) {
      actual.push_back(logits.data<float>()[j]);
      expected.push_back(c.expect(0, j).logit);
    }
    EXPECT_TRUE(test::ExpectClose(actual, expected, {.absolute = 1e30, .cosine = 5e-6}))
        << heads << " x " << dim;
  }
}

TEST_P(IndexLogitsTest, HasTheSameBitsRaggedPagedAloneInABatchAndForAnyThreadCount) {
  const int64_t kKeys = 700;
  const LogitsCase c(2, 4, 9, 128, kKeys);
  const Tensor whole = ragged(c, constant(4, 0), constant(4, kKeys), kKeys);
  for (const int threads : {2, 3}) {
    EXPECT_EQ(ragged(c, constant(4, 0), constant(4, kKeys), kKeys, threads).bytes(), whole.bytes());
  }
  for (const int64_t page_size : {1, 2, 61, 64, 256}) {
    const LogitsCase::Pool pool = c.paged(page_size, 0, kKeys, 0xFF);
    for (const int threads : {1, 2, 3}) {
      EXPECT_EQ(paged(c, pool, constant(4, kKeys), kKeys, threads).bytes(), whole.bytes())
          << "page_size " << page_size << ", threads " << threads;
    }
  }
  // One row, other key alignments: columns shift, bits stay.
  const float* reference = whole.data<float>();
  for (const int64_t start : {1, 5, 23, 24, 47, 311, 699}) {
    LogitsCase one = c;
    one.rows = 1;
    one.q_fp8.assign(c.q_fp8.begin() + 3 * 9 * 128, c.q_fp8.begin() + 4 * 9 * 128);
    one.head_weight.assign(c.head_weight.begin() + 3 * 9, c.head_weight.begin() + 4 * 9);
    const Tensor row = ragged(one, {static_cast<int32_t>(start)}, {kKeys}, kKeys - start);
    EXPECT_EQ(std::memcmp(row.data<float>(), reference + 3 * kKeys + start,
                          static_cast<size_t>(kKeys - start) * 4),
              0)
        << start;
  }
}

TEST_P(IndexLogitsTest, HasTheSameBitsOnAvx2AndAvx512) {
  if (GetParam().implementation != "cpu" || GetParam().isa != CpuIsa::kAvx3) {
    GTEST_SKIP() << "compares the two fp32 kernels with FMA, from the wider one";
  }
  for (const int64_t heads : {1, 5, 64}) {
    const LogitsCase c(16, 3, heads, 128, 300);
    const Tensor wide = ragged(c, constant(3, 0), constant(3, 300), 300);
    limit_cpu_isa(CpuIsa::kAvx2);
    EXPECT_EQ(ragged(c, constant(3, 0), constant(3, 300), 300).bytes(), wide.bytes()) << heads;
    limit_cpu_isa(GetParam().isa);
  }
}

TEST_P(IndexLogitsTest, ANanReachesItsKeyOrItsRowOnly) {
  LogitsCase c(3, 6, 12, 128, 60);
  c.k_row(7)[100] = 0x7F;
  c.k_row(59)[0] = 0xFF;
  c.k_scale[33] = std::nanf("");
  c.q_row(1, 11)[127] = 0x7F;
  c.q_row(2, 0)[3] = 0xFF;
  c.head_weight[static_cast<size_t>(4 * 12 + 5)] = std::nanf("");
  std::fill(c.q_row(5, 4), c.q_row(5, 4) + 128, uint8_t{0x7F});
  const Tensor logits = ragged(c, constant(6, 0), constant(6, 60), 60);
  for (int64_t t = 0; t < 6; ++t) {
    for (int64_t j = 0; j < 60; ++j) {
      const bool nan = j == 7 || j == 59 || j == 33 || t == 1 || t == 2 || t == 4 || t == 5;
      const float value = logits.data<float>()[t * 60 + j];
      ASSERT_EQ(std::isnan(value), nan) << "row " << t << " key " << j;
      if (!nan) {
        ASSERT_LE(std::fabs(value - c.expect(t, j).logit), bound_of(c.expect(t, j)));
      }
    }
  }
}

TEST_P(IndexLogitsTest, KeysOnPagesOutsideThePoolAreMinusInfinity) {
  LogitsCase c(4, 3, 4, 128, 40);
  c.q_row(2, 1)[0] = 0x7F;  // a NaN row: its masked keys are masked all the same
  for (const int64_t page_size : {1, 8}) {
    const LogitsCase::Pool good = c.paged(page_size, 0, 40, 0xFF);
    LogitsCase::Pool pool = c.paged(page_size, 0, 40, 0xFF);
    const auto num_pages = static_cast<int32_t>(pool.pages.size());
    pool.pages[0] = -1;
    pool.pages[2] = num_pages;
    pool.pages[3] = std::numeric_limits<int32_t>::max();
    pool.pages[4] = std::numeric_limits<int32_t>::min();
    // Rows reach past the table: 40 held positions, 47 asked for.
    const Tensor expected = paged(c, good, constant(3, 40), 47);
    const Tensor logits = paged(c, pool, constant(3, 47), 47, 2);
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t p = 0; p < 47; ++p) {
        const int64_t column = p / page_size;
        const float value = logits.data<float>()[t * 47 + p];
        if (p >= 40 || column == 0 || (column >= 2 && column <= 4)) {
          ASSERT_EQ(value, -kInf) << "row " << t << " position " << p;
        } else {
          const float same = expected.data<float>()[t * 47 + p];
          ASSERT_EQ(std::memcmp(&value, &same, 4), 0) << "row " << t << " position " << p;
        }
      }
    }
  }
}

TEST_P(IndexLogitsTest, RowsWithoutKeysTouchNoMemory) {
  test::GuardedMemory nothing(0);  // one read or write kills the process
  IndexLogitsTensors tensors;
  tensors.q_fp8 = make_tensor(nothing.data(), DType::kU8, {4, 64, 128});
  tensors.head_weight = make_tensor(nothing.data(), DType::kF32, {4, 64});
  tensors.logits = make_tensor(nothing.data(), DType::kF32, {4, 1000});
  tensors.k_fp8 = make_tensor(nothing.data(), DType::kU8, {1000, 128});
  tensors.k_scale = make_tensor(nothing.data(), DType::kF32, {1000});
  const Tensor starts = i32({10, 500, 2000, 7}), ends = i32({10, 499, 3000, -8});
  tensors.k_start = starts;
  tensors.k_end = ends;
  run({IndexLayout::kRagged, 4, 64, 128}, tensors, 2);
  tensors.index_pool = make_tensor(nothing.data(), DType::kU8, {100, 64 * 132});
  tensors.page_table = make_tensor(nothing.data(), DType::kI32, {2, 50});
  const Tensor lens = i32({0, -4, std::numeric_limits<int32_t>::min(), 900});
  const Tensor requests = i32({0, 1, 1, -1});  // the last row has keys but no request
  tensors.row_len = lens;
  tensors.row_to_request = requests;
  run({IndexLayout::kPaged, 4, 64, 128, 64}, tensors, 2);
  const Tensor beyond = i32({2, 2, 2, std::numeric_limits<int32_t>::max()});
  const Tensor some = i32({5, 6, 7, 8});
  tensors.row_to_request = beyond;
  tensors.row_len = some;
  run({IndexLayout::kPaged, 4, 64, 128, 64}, tensors, 2);
}

TEST_P(IndexLogitsTest, DegenerateLengthsLeaveRealRowsAlone) {
  // 6 query tokens over 1 key beside a row of 500: lengths -4..1.
  const LogitsCase c(5, 7, 8, 128, 500);
  const LogitsCase::Pool pool = c.paged(64, 0, 500, 0xFF);
  const Tensor logits = paged(c, pool, {-4, -3, -2, -1, 0, 1, 500}, 500, 2);
  for (int64_t t = 0; t < 5; ++t) EXPECT_EQ(logits.data<float>()[t * 500], kUntouched);
  expect_row(c, logits, 500, 5, 0, 1);
  expect_row(c, logits, 500, 6, 0, 500);
  const LogitsCase none(5, 0, 8, 128, 10);
  ragged(none, {}, {}, 10, 2);
}

TEST_P(IndexLogitsTest, TheUnwrittenTailOfTheLastPageChangesNothing) {
  const LogitsCase c(6, 2, 4, 128, 65);
  for (const int32_t length : {1, 13, 63, 64, 65}) {
    const LogitsCase::Pool zeros = c.paged(64, 0, length, 0x00);
    const LogitsCase::Pool nans = c.paged(64, 0, length, 0xFF);
    EXPECT_EQ(paged(c, nans, {length, length}, 65).bytes(),
              paged(c, zeros, {length, length}, 65).bytes());
  }
}

TEST_P(IndexLogitsTest, CutsWindowsToTheKeysAndRowsToTheWidth) {
  const LogitsCase c(7, 4, 3, 128, 30);
  const Tensor all = ragged(c, constant(4, 0), constant(4, 30), 30);
  const Tensor cut = ragged(c, {-5, 20, 4, std::numeric_limits<int32_t>::min()},
                            {7, 1000, 30, std::numeric_limits<int32_t>::max()}, 12, 2);
  const int64_t start[4] = {0, 20, 4, 0};
  const int64_t count[4] = {7, 10, 12, 12};
  for (int64_t t = 0; t < 4; ++t) {
    EXPECT_EQ(std::memcmp(cut.data<float>() + t * 12, all.data<float>() + t * 30 + start[t],
                          static_cast<size_t>(count[t]) * 4),
              0)
        << t;
  }
  const LogitsCase::Pool pool = c.paged(8, 0, 30, 0xFF);
  const Tensor narrow = paged(c, pool, {30, 12, 13, 11}, 12, 2);
  for (int64_t t = 0; t < 4; ++t) {
    EXPECT_EQ(std::memcmp(narrow.data<float>() + t * 12, all.data<float>() + t * 30, 11 * 4), 0);
  }
}

TEST_P(IndexLogitsTest, RowsOfSeveralRequestsEachSeeTheirOwnKeys) {
  // Requests in any row order, one table wider than its rows, requests sharing a page.
  const LogitsCase c(8, 7, 8, 128, 96);
  const LogitsCase::Pool pool = c.paged(16, 0, 96, 0xFF);  // pages 5, 4, 3, 2, 1, 0
  std::vector<int32_t> memory(3 * 9, 77);
  const std::vector<std::vector<int32_t>> tables = {{5, 4, 3}, {2, 1}, {5, 1, 0}};
  for (size_t r = 0; r < 3; ++r) std::copy(tables[r].begin(), tables[r].end(), &memory[r * 9]);
  const std::vector<int32_t> requests = {0, 2, 2, 1, -1, 0, 3}, lens = {48, 33, 48, 20, 9, 1, 9};
  IndexLogitsTensors tensors;
  tensors.q_fp8 = c.q();
  tensors.head_weight = c.weight();
  tensors.index_pool = pool.pool;
  tensors.page_table = test::strided(memory.data(), DType::kI32, {3, 4}, {9, 1});
  const Tensor row_to_request = i32(requests), row_len = i32(lens);
  tensors.row_to_request = row_to_request;
  tensors.row_len = row_len;
  const Tensor schedule = Tensor::i32({5, 2}, constant(10, 0x7FFFFFFF));
  Tensor first;
  for (const int threads : {1, 2, 3}) {
    Tensor logits = filled(7, 48);
    tensors.logits = logits;
    tensors.schedule = threads == 2 ? ConstTensorView(schedule) : ConstTensorView();
    run({IndexLayout::kPaged, 7, 8, 128, 16}, tensors, threads);
    if (threads == 1) first = logits;
    EXPECT_EQ(logits.bytes(), first.bytes());
  }
  // Position of each table entry in the case's own order: page p holds keys 16 (5 - p) and on.
  for (size_t t = 0; t < 7; ++t) {
    if (requests[t] < 0 || requests[t] > 2) continue;
    for (int32_t p = 0; p < lens[t]; ++p) {
      const int64_t page = tables[static_cast<size_t>(requests[t])][static_cast<size_t>(p / 16)];
      const auto expected = c.expect(static_cast<int64_t>(t), 16 * (5 - page) + p % 16);
      ASSERT_LE(std::fabs(first.data<float>()[t * 48 + static_cast<size_t>(p)] - expected.logit),
                bound_of(expected));
    }
  }
}

TEST_P(IndexLogitsTest, LaterChunksSeeThePrefix) {
  // Two requests, prefixes 300 and 500, 64 new tokens each; the chunk alone and all at once.
  const LogitsCase c(9, 128, 4, 64, 928);
  std::vector<int32_t> starts, ends;
  for (int32_t t = 0; t < 128; ++t) {
    starts.push_back(t < 64 ? 0 : 364);
    ends.push_back(t < 64 ? 300 + t + 1 : 364 + 500 + t - 64 + 1);
  }
  const Tensor whole = ragged(c, starts, ends, 564);
  Tensor chunked = filled(128, 564);
  const Tensor k_start = i32(starts), k_end = i32(ends);
  for (int64_t begin = 0; begin < 128; begin += 50) {
    const int64_t end = std::min<int64_t>(begin + 50, 128);
    IndexLogitsTensors tensors =
        c.ragged(slice_rows(k_start.view(), begin, end), slice_rows(k_end.view(), begin, end),
                 slice_rows(chunked.view(), begin, end));
    tensors.q_fp8 = slice_rows(tensors.q_fp8, begin, end);
    tensors.head_weight = slice_rows(tensors.head_weight, begin, end);
    run({IndexLayout::kRagged, 50, 4, 64}, tensors, 2);
  }
  EXPECT_EQ(chunked.bytes(), whole.bytes());
  for (const int64_t t : {0, 63, 64, 127}) {
    expect_row(c, whole, 564, t, starts[static_cast<size_t>(t)], ends[static_cast<size_t>(t)]);
  }
}

TEST_P(IndexLogitsTest, WindowsThatOverlapInAChainAreScoredWhole) {
  // Together the rows span more keys than the logits are wide.
  const LogitsCase c(17, 9, 3, 128, 5600);
  std::vector<int32_t> starts, ends;
  for (int32_t t = 0; t < 9; ++t) {
    starts.push_back(600 * t);
    ends.push_back(t == 4 ? 600 * t : 600 * t + 700);  // row 4 is empty and breaks the chain
  }
  const Tensor logits = ragged(c, starts, ends, 700, 2);
  for (int64_t t = 0; t < 9; ++t) {
    if (t == 4) continue;
    expect_row(c, logits, 700, t, 600 * t, std::min<int64_t>(600 * t + 700, 5600));
  }
}

TEST_P(IndexLogitsTest, LongRowsOnTinyPagesHaveTheSameBits) {
  const LogitsCase c(18, 2, 3, 128, 9000);
  const Tensor whole = ragged(c, constant(2, 0), constant(2, 9000), 9000, 2);
  expect_row(c, whole, 9000, 1, 0, 9000);
  for (const int64_t page_size : {1, 3}) {
    const LogitsCase::Pool pool = c.paged(page_size, 0, 9000, 0xFF);
    EXPECT_EQ(paged(c, pool, constant(2, 9000), 9000, 2).bytes(), whole.bytes()) << page_size;
  }
}

TEST_P(IndexLogitsTest, PagesOfAnySizeWithGapsHaveTheBitsOfTheRaggedLayout) {
  const int64_t kRows = 8, kKeys = 1300;
  const LogitsCase c(19, kRows, 9, 128, kKeys);
  const Tensor whole = ragged(c, constant(kRows, 0), constant(kRows, kKeys), kKeys, 2);
  // Two rows each of four requests; lengths at and beside the ends of units, tiles and pages.
  const std::vector<int32_t> requests = {0, 0, 1, 1, 2, 2, 3, 3};
  const std::vector<int32_t> lens = {1300, 1279, 17, 161, 64, 1, 15, 640};
  const std::vector<int32_t> no_page = {-1, std::numeric_limits<int32_t>::max(),
                                        std::numeric_limits<int32_t>::min()};
  const Tensor row_to_request = i32(requests), row_len = i32(lens);
  for (const int64_t page_size : {1, 16, 32, 48, 64, 128, 256}) {
    const LogitsCase::Pool pool = c.paged(page_size, 0, kKeys, 0xFF);
    // The table ends a column before the keys do, and lacks every fifth page before.
    const auto columns = static_cast<int64_t>(pool.pages.size());
    const auto is_held = [&](int64_t request, int64_t column) {
      return column + 1 < columns && (3 * column + request) % 5 != 0;
    };
    std::vector<int32_t> table;
    for (int64_t i = 0; i < 4 * columns; ++i) {
      const bool held = is_held(i / columns, i % columns);
      table.push_back(held ? pool.pages[static_cast<size_t>(i % columns)]
                           : no_page[static_cast<size_t>(i % 3)]);
    }
    IndexLogitsTensors tensors;
    tensors.q_fp8 = c.q();
    tensors.head_weight = c.weight();
    tensors.index_pool = pool.pool;
    tensors.page_table = test::strided(table.data(), DType::kI32, {4, columns - 1}, {columns, 1});
    tensors.row_to_request = row_to_request;
    tensors.row_len = row_len;
    for (const int threads : {1, 3}) {
      Tensor logits = filled(kRows, kKeys);
      tensors.logits = logits;
      run({IndexLayout::kPaged, kRows, 9, 128, page_size}, tensors, threads);
      for (int64_t i = 0; i < kRows * kKeys; ++i) {
        const auto t = static_cast<size_t>(i / kKeys);
        const int64_t p = i % kKeys;
        float expected = kUntouched;
        if (p < lens[t]) {
          expected = is_held(requests[t], p / page_size) ? whole.data<float>()[i] : -kInf;
        }
        ASSERT_EQ(std::memcmp(&logits.data<float>()[i], &expected, 4), 0)
            << "page_size " << page_size << ", row " << t << ", position " << p << ": "
            << logits.data<float>()[i] << ", expected " << expected;
      }
    }
  }
}

TEST_P(IndexLogitsTest, HonoursStridesAndReadsNothingOutside) {
  for (const int64_t dim : {128, 12, 7}) {
    const int64_t heads = 5, keys = 29;
    const LogitsCase c(10, 2, heads, dim, keys);
    const Tensor expected = ragged(c, {0, 2}, {29, 28}, keys);
    // Each input's last element ends at an unreadable page; rows are spread out and misaligned.
    test::GuardedMemory q(static_cast<size_t>((2 * heads - 1) * (dim + 9) + dim));
    test::GuardedMemory k(static_cast<size_t>((keys - 1) * (dim + 5) + dim));
    test::GuardedMemory scale(static_cast<size_t>(keys * 4)), out((keys + 40 + keys) * 4);
    test::GuardedMemory weight(static_cast<size_t>((heads + 3 + heads) * 4));
    for (int64_t row = 0; row < 2 * heads; ++row) {
      std::memcpy(static_cast<uint8_t*>(q.data()) + row * (dim + 9),
                  &c.q_fp8[static_cast<size_t>(row * dim)], static_cast<size_t>(dim));
    }
    for (int64_t j = 0; j < keys; ++j) {
      std::memcpy(static_cast<uint8_t*>(k.data()) + j * (dim + 5),
                  &c.k_fp8[static_cast<size_t>(j * dim)], static_cast<size_t>(dim));
    }
    std::memcpy(scale.data(), c.k_scale.data(), static_cast<size_t>(keys * 4));
    for (int64_t t = 0; t < 2; ++t) {
      std::memcpy(static_cast<float*>(weight.data()) + t * (heads + 3),
                  &c.head_weight[static_cast<size_t>(t * heads)], static_cast<size_t>(heads * 4));
    }
    IndexLogitsTensors tensors;
    tensors.q_fp8 =
        test::strided(q.data(), DType::kU8, {2, heads, dim}, {heads * (dim + 9), dim + 9, 1});
    tensors.head_weight = test::strided(weight.data(), DType::kF32, {2, heads}, {heads + 3, 1});
    tensors.k_fp8 = test::strided(k.data(), DType::kU8, {keys, dim}, {dim + 5, 1});
    tensors.k_scale = make_tensor(scale.data(), DType::kF32, {keys});
    const Tensor starts = i32({0, 2}), ends = i32({29, 28});
    tensors.k_start = starts;
    tensors.k_end = ends;
    tensors.logits = test::strided(out.data(), DType::kF32, {2, keys}, {keys + 40, 1});
    run({IndexLayout::kRagged, 2, heads, dim}, tensors, 2);
    const auto* logits = static_cast<const float*>(out.data());
    EXPECT_EQ(std::memcmp(logits, expected.data<float>(), 29 * 4), 0) << dim;
    EXPECT_EQ(std::memcmp(logits + keys + 40, expected.data<float>() + keys, 26 * 4), 0) << dim;
  }
}

TEST_P(IndexLogitsTest, ReachesPoolsAndLogitsBeyondTwoToThe32Bytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  const LogitsCase c(11, 1, 2, 128, 200);
  const Tensor expected = ragged(c, {0}, {200}, 200);
  const LogitsCase::Pool near = c.paged(64, 0, 200, 0);
  constexpr int64_t kPageBytes = 8448;
  const std::vector<int32_t> far_pages = {508401, 254200, 508400, 254201};
  test::SparseMapping pool(508402 * kPageBytes);
  for (size_t i = 0; i < 4; ++i) {
    std::memcpy(static_cast<uint8_t*>(pool.data()) + far_pages[i] * kPageBytes,
                near.pool.data<uint8_t>() + near.pages[i] * kPageBytes, kPageBytes);
  }
  // The score matrix is 262144 wide: row 8192 starts at element 2^31.
  test::SparseMapping scores(size_t{8193} * 262144 * 4);
  constexpr int64_t kRows = 8193;
  IndexLogitsTensors tensors;
  tensors.q_fp8 =
      test::strided(const_cast<uint8_t*>(c.q_fp8.data()), DType::kU8, {kRows, 2, 128}, {0, 128, 1});
  tensors.head_weight =
      test::strided(const_cast<float*>(c.head_weight.data()), DType::kF32, {kRows, 2}, {0, 1});
  tensors.index_pool = make_tensor(pool.data(), DType::kU8, {508402, kPageBytes});
  const Tensor table = Tensor::i32({1, 4}, far_pages);
  tensors.page_table = table;
  const Tensor row_to_request = i32(constant(kRows, 0));
  std::vector<int32_t> lens = constant(kRows, 0);
  lens.back() = 200;
  const Tensor row_len = i32(lens);
  tensors.row_to_request = row_to_request;
  tensors.row_len = row_len;
  tensors.logits = make_tensor(scores.data(), DType::kF32, {kRows, 262144});
  run({IndexLayout::kPaged, kRows, 2, 128, 64}, tensors);
  const float* row = static_cast<const float*>(scores.data()) + int64_t{8192} * 262144;
  EXPECT_EQ(std::memcmp(row, expected.data<float>(), 200 * 4), 0);
  EXPECT_EQ(static_cast<const float*>(scores.data())[0], 0.0f);

  // Ragged keys past byte 2^32: key 2^25 + 3 and on.
  constexpr int64_t kFirst = (int64_t{1} << 25) + 3;
  test::SparseMapping keys((kFirst + 200) * 128), scales((kFirst + 200) * 4);
  std::memcpy(static_cast<uint8_t*>(keys.data()) + kFirst * 128, c.k_fp8.data(), 200 * 128);
  std::memcpy(static_cast<float*>(scales.data()) + kFirst, c.k_scale.data(), 200 * 4);
  Tensor logits = filled(1, 200);
  const Tensor start = i32({static_cast<int32_t>(kFirst)});
  const Tensor end = i32({static_cast<int32_t>(kFirst + 200)});
  tensors = c.ragged(start, end, logits);
  tensors.k_fp8 = make_tensor(keys.data(), DType::kU8, {kFirst + 200, 128});
  tensors.k_scale = make_tensor(scales.data(), DType::kF32, {kFirst + 200});
  run({IndexLayout::kRagged, 1, 2, 128}, tensors);
  EXPECT_EQ(logits.bytes(), expected.bytes());
}

TEST_P(IndexLogitsTest, ExtremeCodesWeightsAndScales) {
  LogitsCase c(12, 1, 64, 128, 11);
  std::fill(c.q_fp8.begin(), c.q_fp8.end(), uint8_t{0x7E});
  std::fill(c.k_row(0), c.k_row(0) + 128, uint8_t{0x7E});  // 448: the largest dot
  std::fill(c.k_row(1), c.k_row(1) + 128, uint8_t{0xFE});  // -448: relu gives 0
  std::fill(c.k_row(2), c.k_row(2) + 128, uint8_t{0x01});  // 2^-9: the smallest subnormal
  std::fill(c.k_row(3), c.k_row(3) + 128, uint8_t{0x80});  // -0
  std::fill(c.k_row(4), c.k_row(4) + 128, uint8_t{0x07});  // the largest subnormal
  for (size_t h = 0; h < 64; ++h) c.head_weight[h] = h % 2 == 0 ? 3e4f : -1e-4f;
  for (const int64_t j : {7, 8}) std::fill(c.k_row(j), c.k_row(j) + 128, uint8_t{0x38});   // 1
  for (const int64_t j : {9, 10}) std::fill(c.k_row(j), c.k_row(j) + 128, uint8_t{0xB8});  // -1
  c.k_scale = {1e-20f, 1.0f, 0x1p-100f, 0x1p100f, 0x1p20f, 0.0f, -1.0f, kInf, 1e38f, kInf, 1e38f};
  const Tensor logits = ragged(c, {0}, {11}, 11);
  const float* row = logits.data<float>();
  for (const int64_t j : {0, 1, 2, 3, 4, 5, 6}) {
    EXPECT_LE(std::fabs(row[j] - c.expect(0, j).logit), bound_of(c.expect(0, j))) << j;
  }
  // The dots of keys 9 and 10 are negative.
  for (int64_t j = 7; j < 11; ++j) {
    const double expected = c.expect(0, j).logit;  // beyond the range of fp32, or not a number
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(row[j]) : row[j] == static_cast<float>(expected))
        << j << ": " << row[j] << ", expected " << expected;
  }
}

// A selection takes the first of equals, and keys that no head wants are many in trained models.
TEST_P(IndexLogitsTest, KeysOfNegativeDotsAreExactlyZero) {
  for (const int64_t heads : {64, 40, 1}) {
    LogitsCase c(23, 3, heads, 128, 200);
    for (uint8_t& code : c.q_fp8) code &= 0x7F;
    for (int64_t j = 0; j < 200; ++j) {  // both signs, negative, positive
      for (int64_t i = 0; i < 128; ++i) {
        uint8_t& code = c.k_row(j)[i];
        if (j % 3 != 0) code = static_cast<uint8_t>(j % 3 == 1 ? code | 0x80 : code & 0x7F);
      }
    }
    const Tensor logits = ragged(c, constant(3, 0), constant(3, 200), 200);
    const bool is_e4m3 = GetParam().implementation == "cuda_sm90";
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t j = 0; j < 200; ++j) {
        const double logit = logits.data<float>()[t * 200 + j];
        const LogitsCase::Expected expected = c.expect(t, j);
        if (j % 3 == 1) {
          EXPECT_EQ(logit, 0) << heads << " heads, row " << t << ", key " << j;
        }
        const double bound = j % 3 == 2 && is_e4m3 ? expected.one_sign_bound : bound_of(expected);
        EXPECT_LE(std::fabs(logit - expected.logit), bound)
            << heads << " heads, row " << t << ", key " << j;
      }
    }
  }
}

TEST_P(IndexLogitsTest, PowersOfTwoInTheWeightsChangeExponentsOnly) {
  LogitsCase c(22, 3, 64, 128, 150);
  const std::vector<int32_t> starts = constant(3, 0), ends = constant(3, 150);
  const std::vector<float> logits = ragged(c, starts, ends, 150).values<float>();
  const std::vector<float> weights = c.head_weight;
  for (const int power : {-60, -1, 60}) {
    for (size_t i = 0; i < weights.size(); ++i) c.head_weight[i] = std::ldexp(weights[i], power);
    std::vector<float> expected = logits;
    for (float& logit : expected) logit = std::ldexp(logit, power);
    EXPECT_EQ(ragged(c, starts, ends, 150).values<float>(), expected) << power;
  }
}

TEST_P(IndexLogitsTest, StaysInsideItsWorkspaceWhateverTheInstructionSetOfThePlan) {
  for (const int64_t heads : {1, 20, 64}) {
    const LogitsCase c(15, 9, heads, 100, 130);
    Tensor logits = filled(9, 130);
    const Tensor start = i32(constant(9, 0)), end = i32(constant(9, 130));
    if (GetParam().implementation == "cpu") limit_cpu_isa(CpuIsa::kBaseline);
    const IndexLogits plan = IndexLogits::plan({IndexLayout::kRagged, 9, heads, 100},
                                               GetParam().device(2), GetParam().options());
    limit_cpu_isa(GetParam().isa);
    test::GuardedMemory memory(plan.workspace_bytes());  // a multiple of 64, so aligned to it
    plan.run(c.ragged(start, end, logits), {memory.data(), plan.workspace_bytes()});
    expect_row(c, logits, 130, 8, 0, 130);
  }
}

TEST_P(IndexLogitsTest, DoesNotAllocateInRun) {
  const LogitsCase c(13, 20, 8, 128, 300);
  Tensor logits = filled(20, 300);
  const Tensor start = i32(constant(20, 0)), end = i32(constant(20, 300));
  const IndexLogitsTensors tensors = c.ragged(start, end, logits);
  for (const int threads : {1, 2, 3}) {
    const IndexLogits plan = IndexLogits::plan({IndexLayout::kRagged, 20, 8, 128},
                                               GetParam().device(threads), GetParam().options());
    HostBuffer buffer(plan.workspace_bytes());
    plan.run(tensors, buffer.workspace());
    const test::AllocationCounter counter;
    plan.run(tensors, buffer.workspace());
    EXPECT_EQ(counter.count(), 0);
  }
}

class IndexLogitsFullTest : public IndexLogitsTest {
 protected:
  // First, last and 62 seeded keys of row t, against the formula.
  void expect_sampled(const LogitsCase& c, const Tensor& logits, int64_t width, int64_t t,
                      int64_t start, int64_t end) {
    test::Rng rng(static_cast<uint64_t>(t + 99));
    std::vector<double> actual, expected;
    for (int i = 0; i < 64; ++i) {
      const int64_t j = i == 0 ? start : i == 1 ? end - 1 : rng.integer(start, end - 1);
      const LogitsCase::Expected value = c.expect(t, j);
      actual.push_back(logits.data<float>()[t * width + j - start]);
      expected.push_back(value.logit);
      ASSERT_LE(std::fabs(actual.back() - value.logit), bound_of(value))
          << "row " << t << " key " << j;
    }
    EXPECT_TRUE(test::ExpectClose(actual, expected, {.absolute = 1e30, .cosine = 5e-6}));
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, IndexLogitsFullTest,
                         testing::ValuesIn(test::targets_of("index_logits")), test::target_name);

TEST_P(IndexLogitsFullTest, OneRowOf64KKeys) {
  const LogitsCase c(20, 1, 64, 128, 65536);
  const Tensor whole = ragged(c, {0}, {65536}, 65536, 2);
  expect_sampled(c, whole, 65536, 0, 0, 65536);
  if (GetParam().implementation == "ref") return;  // one thread, and minutes
  const LogitsCase::Pool pool = c.paged(64, 0, 65536, 0xFF);
  EXPECT_EQ(paged(c, pool, {65536}, 65536, 3).bytes(), whole.bytes());
  EXPECT_EQ(paged(c, pool, {65536}, 65536, 1).bytes(), whole.bytes());
}

TEST_P(IndexLogitsFullTest, CausalRowsOfTwoRequests) {
  const LogitsCase c(21, 250, 64, 128, 5000);
  std::vector<int32_t> starts, ends;
  for (int32_t t = 0; t < 250; ++t) {
    starts.push_back(t < 130 ? 0 : 3000);
    ends.push_back(t < 130 ? 3000 - 130 + t + 1 : 5000 - 250 + t + 1);
  }
  const Tensor logits = ragged(c, starts, ends, 3000, 1);
  for (const int64_t t : {0, 1, 77, 129, 130, 131, 200, 249}) {
    expect_sampled(c, logits, 3000, t, starts[static_cast<size_t>(t)],
                   ends[static_cast<size_t>(t)]);
  }
  if (GetParam().implementation == "ref") return;
  for (const int threads : {2, 3}) {
    EXPECT_EQ(ragged(c, starts, ends, 3000, threads).bytes(), logits.bytes());
  }
}

TEST(IndexLogits, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  EXPECT_THROW(IndexLogits::plan({IndexLayout::kPaged, 1, 64, 128, 0}, cpu), Error);
  EXPECT_THROW(IndexLogits::plan({IndexLayout::kPaged, 1, 64, 128, 257}, cpu), Error);
  EXPECT_THROW(IndexLogits::plan({IndexLayout::kRagged, 1, 0, 128}, cpu), Error);
  EXPECT_THROW(IndexLogits::plan({IndexLayout::kRagged, 1, 64, 0}, cpu), Error);
  EXPECT_THROW(IndexLogits::plan({IndexLayout::kRagged, -1, 64, 128}, cpu), Error);
  EXPECT_THROW(IndexLogits::plan({static_cast<IndexLayout>(7), 1, 64, 128}, cpu), Error);
  const LogitsCase c(14, 2, 4, 128, 10);
  Tensor logits = filled(2, 10);
  const Tensor start = i32({0, 0}), end = i32({10, 10});
  const IndexLogitsTensors good = c.ragged(start, end, logits);
  const IndexLogits plan = IndexLogits::plan({IndexLayout::kRagged, 2, 4, 128}, cpu);
  HostBuffer buffer(plan.workspace_bytes());
  EXPECT_NO_THROW(plan.run(good, buffer.workspace()));
  const auto refused = [&](auto change) {
    IndexLogitsTensors tensors = good;
    change(tensors);
    const std::vector<uint8_t> before = logits.bytes();
    EXPECT_THROW(plan.run(tensors, buffer.workspace()), Error);
    EXPECT_EQ(before, logits.bytes());
  };
  refused([](IndexLogitsTensors& t) { t.k_end = {}; });
  refused([](IndexLogitsTensors& t) { t.k_start.stride[0] = 2; });
  refused([](IndexLogitsTensors& t) { t.k_fp8.dtype = DType::kBf16; });
  refused([](IndexLogitsTensors& t) { t.k_scale.shape[0] = 9; });
  refused([](IndexLogitsTensors& t) { t.head_weight.shape[1] = 3; });
  refused([](IndexLogitsTensors& t) { t.logits.shape[0] = 1; });
  refused([](IndexLogitsTensors& t) { t.q_fp8.shape[2] = 64; });
  const IndexLogits one_row = IndexLogits::plan({IndexLayout::kRagged, 1, 4, 128}, cpu);
  EXPECT_THROW(one_row.run(good, buffer.workspace()), Error);
  const IndexLogits paged = IndexLogits::plan({IndexLayout::kPaged, 2, 4, 128, 64}, cpu);
  HostBuffer paged_buffer(paged.workspace_bytes());
  EXPECT_THROW(paged.run(good, paged_buffer.workspace()), Error);  // no pool
}

}  // namespace
}  // namespace fovea
