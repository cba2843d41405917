// The kernels of index_logits for compute capability 9.0, run by the model of a GPU, against the
// formula. The model adds up in fp32, so the bound is that of fp32.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/gpu_model/gpu_model.h"
#include "tests/gpu_model/index_logits_model.h"
#include "tests/index/index_logits_case.h"
#include "tests/support/memory.h"

namespace fovea {
namespace {

using test::LogitsCase;
using test::Tensor;

constexpr float kUntouched = -12345.0f;

Tensor i32(const std::vector<int32_t>& values) {
  return Tensor::i32({static_cast<int64_t>(values.size())}, values);
}

class IndexLogitsSm90Model : public testing::Test {
 protected:
  // Few blocks: their shares begin and end inside runs, and reach over several groups.
  void SetUp() override { test::gpu::settings().num_sms = 1; }
  void TearDown() override { test::gpu::settings() = {}; }

  struct Row {
    int64_t begin, end;  // keys of the case
    int64_t request = 0;
  };

  static Tensor untouched(int64_t rows, int64_t width) {
    return Tensor::f32({rows, width},
                       std::vector<float>(static_cast<size_t>(rows * width), kUntouched));
  }

  static Tensor ragged(const LogitsCase& c, const std::vector<Row>& rows, int64_t width) {
    std::vector<int32_t> starts, ends;
    for (const Row& row : rows) {
      starts.push_back(static_cast<int32_t>(row.begin));
      ends.push_back(static_cast<int32_t>(row.end));
    }
    const Tensor k_start = i32(starts), k_end = i32(ends);
    Tensor logits = untouched(c.rows, width);
    test::gpu::run_index_logits_sm90({IndexLayout::kRagged, c.rows, c.heads, c.dim},
                                     c.ragged(k_start, k_end, logits));
    return logits;
  }

  // `requests` see the same pages; page_pad bytes lie between pages.
  static Tensor paged(const LogitsCase& c, const std::vector<Row>& rows, int64_t width,
                      int64_t page_size, int64_t requests, int64_t page_pad = 0,
                      const std::vector<int64_t>& lost_columns = {}) {
    const LogitsCase::Pool pool = c.paged(page_size, 0, c.keys, 0xFF);
    const int64_t page_bytes = page_size * (c.dim + 4), pages = pool.pool.view().shape[0];
    Tensor padded(DType::kU8, {pages, page_bytes + page_pad});
    padded.fill_bytes(0xFF);
    for (int64_t page = 0; page < pages; ++page) {
      std::memcpy(padded.data<uint8_t>() + page * (page_bytes + page_pad),
                  pool.pool.data<uint8_t>() + page * page_bytes, static_cast<size_t>(page_bytes));
    }
    std::vector<int32_t> table, lens, row_requests;
    for (int64_t i = 0; i < requests; ++i)
      table.insert(table.end(), pool.pages.begin(), pool.pages.end());
    for (const int64_t lost : lost_columns) {
      for (int64_t i = 0; i < requests; ++i)
        table[static_cast<size_t>(i * pages + lost)] = lost % 2 == 0 ? -1 : 1 << 30;
    }
    for (const Row& row : rows) {
      lens.push_back(static_cast<int32_t>(row.end));
      row_requests.push_back(static_cast<int32_t>(row.request));
    }
    IndexLogitsTensors tensors;
    tensors.q_fp8 = c.q();
    tensors.head_weight = c.weight();
    tensors.index_pool = padded;
    const Tensor page_table = Tensor::i32({requests, pages}, table);
    tensors.page_table = page_table;
    const Tensor row_len = i32(lens), row_to_request = i32(row_requests);
    tensors.row_len = row_len;
    tensors.row_to_request = row_to_request;
    Tensor logits = untouched(c.rows, width);
    tensors.logits = logits;
    test::gpu::run_index_logits_sm90({IndexLayout::kPaged, c.rows, c.heads, c.dim, page_size},
                                     tensors);
    return logits;
  }

  // Every row has its keys' logits, and nothing else.
  static void expect_formula(const LogitsCase& c, const Tensor& logits,
                             const std::vector<Row>& rows, int64_t width) {
    for (size_t t = 0; t < rows.size(); ++t) {
      for (int64_t column = 0; column < width; ++column) {
        const float actual = logits.data<float>()[static_cast<int64_t>(t) * width + column];
        const int64_t j = rows[t].begin + column;
        if (j >= rows[t].end) {
          ASSERT_EQ(actual, kUntouched) << "row " << t << " column " << column;
          continue;
        }
        const LogitsCase::Expected expected = c.expect(static_cast<int64_t>(t), j);
        ASSERT_LE(std::fabs(actual - expected.logit), expected.bound)
            << "row " << t << " key " << j << ": " << actual << ", expected " << expected.logit;
      }
    }
  }
};

// Ten rows: two groups; causal ones, empty ones, windows that do not meet, ends beside tiles.
TEST_F(IndexLogitsSm90Model, RaggedRowsFollowTheFormula) {
  const std::vector<Row> rows = {{3, 131}, {3, 132},   {5, 5}, {3, 133},  {140, 204},
                                 {0, 0},   {150, 215}, {7, 8}, {60, 190}, {61, 192}};
  for (const int64_t heads : {64, 41}) {
    const LogitsCase c(static_cast<uint64_t>(heads), 10, heads, 128, 220);
    expect_formula(c, ragged(c, rows, 135), rows, 135);
  }
}

// Pages and numbers of rows a request that take every kernel; requests of unequal rows.
TEST_F(IndexLogitsSm90Model, PagedRowsFollowTheFormula) {
  struct Shape {
    int64_t page_size, requests, page_pad;
    std::vector<Row> rows;
  };
  const std::vector<Shape> shapes = {
      {64, 3, 0, {{0, 130, 2}, {0, 0, 1}, {0, 65, 0}}},
      {16, 3, 16, {{0, 130, 0}, {0, 131, 0}, {0, 7, 1}, {0, 9, 2}, {0, 64, 2}}},
      {32, 2, 0, {{0, 128, 0}, {0, 129, 0}, {0, 130, 0}, {0, 70, 1}, {0, 71, 1}, {0, 72, 1}}},
      {128, 1, 0, {{0, 140}, {0, 1}, {0, 141}, {0, -3}, {0, 127}, {0, 150}}},
      {128, 1, 32, {{0, 140}, {0, 150}, {0, 129}}},
      {256, 2, 0, {{0, 150, 1}, {0, 149, 1}, {0, 1, 0}}},
      {61, 2, 0, {{0, 130, 1}, {0, 62, 0}}},
      {16, 2, 3, {{0, 70, 1}, {0, 80, 0}}}};
  uint64_t seed = 0;
  for (const Shape& shape : shapes) {
    const LogitsCase c(++seed, static_cast<int64_t>(shape.rows.size()), 64, 128, 150);
    expect_formula(c, paged(c, shape.rows, 150, shape.page_size, shape.requests, shape.page_pad),
                   shape.rows, 150);
  }
}

TEST_F(IndexLogitsSm90Model, NoLayoutNoOrderOfThreadsAndNoMateChangesABit) {
  const LogitsCase c(70, 8, 64, 128, 200);
  const std::vector<Row> rows(8, {0, 200});
  const Tensor whole = ragged(c, rows, 200);
  for (const unsigned seed : {2U, 3U}) {
    test::gpu::settings().seed = seed;
    test::gpu::settings().num_sms = static_cast<int>(seed);
    EXPECT_EQ(ragged(c, rows, 200).bytes(), whole.bytes());
  }
  for (const int64_t each : {1, 2, 4, 8}) {
    std::vector<Row> of_requests = rows;
    for (size_t t = 0; t < 8; ++t) of_requests[t].request = static_cast<int64_t>(t) / each;
    EXPECT_EQ(paged(c, of_requests, 200, 64, 8 / each).bytes(), whole.bytes()) << each;
  }
  EXPECT_EQ(paged(c, rows, 200, 7, 1).bytes(), whole.bytes());
}

TEST_F(IndexLogitsSm90Model, PowersOfTwoInTheWeightsChangeExponentsOnly) {
  LogitsCase c(75, 3, 64, 128, 130);
  const std::vector<Row> rows(3, {0, 130});
  const std::vector<float> logits = ragged(c, rows, 130).values<float>();
  const std::vector<float> weights = c.head_weight;
  for (const int power : {-60, -1, 60}) {
    for (size_t i = 0; i < weights.size(); ++i) c.head_weight[i] = std::ldexp(weights[i], power);
    std::vector<float> expected = logits;
    for (float& logit : expected) logit = std::ldexp(logit, power);
    EXPECT_EQ(ragged(c, rows, 130).values<float>(), expected) << power;
  }
}

TEST_F(IndexLogitsSm90Model, KeysOfLostPagesAreMinusInfinity) {
  const LogitsCase c(71, 4, 64, 128, 160);
  for (const int64_t page_size : {16, 5}) {
    std::vector<Row> rows(4, {0, 160});
    for (size_t t = 0; t < 4; ++t) rows[t].request = static_cast<int64_t>(t) / 2;
    const Tensor whole = paged(c, rows, 190, page_size, 2);
    for (Row& row : rows) row.end = 190;  // past the table
    const std::vector<int64_t> lost = {0, 3, 4};
    const Tensor logits = paged(c, rows, 190, page_size, 2, 0, lost);
    for (int64_t i = 0; i < 4 * 190; ++i) {
      const int64_t position = i % 190;
      const bool is_lost = position >= 160 ||
                           std::find(lost.begin(), lost.end(), position / page_size) != lost.end();
      const float expected =
          is_lost ? -std::numeric_limits<float>::infinity() : whole.data<float>()[i];
      ASSERT_EQ(logits.data<float>()[i], expected) << "page_size " << page_size << " entry " << i;
    }
  }
}

// A share of more tiles than a warp has lanes for their pages.
TEST_F(IndexLogitsSm90Model, LongSharesFindTheirPages) {
  constexpr int64_t kKeys = 4500;
  const LogitsCase c(74, 2, 64, 128, kKeys);
  const std::vector<Row> rows(2, {0, kKeys});
  const std::vector<int64_t> lost = {1, 33, 34, 69};
  const Tensor logits = paged(c, rows, kKeys, 64, 1, 0, lost);
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t j = t; j < kKeys; j += 31) {
      const float actual = logits.data<float>()[t * kKeys + j];
      if (std::find(lost.begin(), lost.end(), j / 64) != lost.end()) {
        ASSERT_EQ(actual, -std::numeric_limits<float>::infinity()) << t << " " << j;
      } else {
        const LogitsCase::Expected expected = c.expect(t, j);
        ASSERT_LE(std::fabs(actual - expected.logit), expected.bound) << t << " " << j;
      }
    }
  }
}

TEST_F(IndexLogitsSm90Model, NarrowKeysAndAnyAddressesFollowTheFormula) {
  const std::vector<Row> rows = {{1, 80}, {0, 81}};
  for (const int64_t dim : {1, 37, 100}) {
    const LogitsCase c(static_cast<uint64_t>(dim), 2, 5, dim, 81);
    expect_formula(c, ragged(c, rows, 81), rows, 81);
  }
}

TEST_F(IndexLogitsSm90Model, ANanReachesItsKeyOrItsRowOnly) {
  LogitsCase c(72, 4, 64, 128, 70);
  c.k_row(7)[100] = 0x7F;
  c.k_scale[66] = std::nanf("");
  c.q_row(1, 60)[127] = 0xFF;
  c.head_weight[static_cast<size_t>(2 * 64 + 5)] = std::nanf("");
  const Tensor logits = ragged(c, std::vector<Row>(4, {0, 70}), 70);
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t j = 0; j < 70; ++j) {
      const bool expected = j == 7 || j == 66 || t == 1 || t == 2;
      ASSERT_EQ(std::isnan(logits.data<float>()[t * 70 + j]), expected) << t << " " << j;
    }
  }
}

TEST_F(IndexLogitsSm90Model, RowsWithoutKeysTouchNoMemory) {
  const LogitsCase c(73, 3, 64, 128, 70);
  IndexLogitsTensors tensors = c.ragged({}, {}, {});
  const Tensor start = i32({70, 5, -3}), end = i32({80, 5, -2});
  test::GuardedMemory nothing(0);
  tensors.q_fp8.data = tensors.head_weight.data = tensors.k_fp8.data = tensors.k_scale.data =
      nothing.data();
  tensors.k_start = start;
  tensors.k_end = end;
  tensors.logits = make_tensor(nothing.data(), DType::kF32, {3, 70});
  test::gpu::run_index_logits_sm90({IndexLayout::kRagged, 3, 64, 128}, tensors);
}

}  // namespace
}  // namespace fovea
