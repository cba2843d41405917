#include "fovea/topk_select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "fovea/error.h"
#include "fovea/stream.h"
#include "src/index/topk_select_sample.h"
#include "tests/index/topk_rows.h"
#include "tests/support/memory.h"
#include "tests/support/property.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The definition, written once more without any of the library's code: a stable sort by falling
// value with NaN last keeps lower positions first.
std::vector<int32_t> expected_row(const std::vector<float>& window, int64_t topk) {
  std::vector<int32_t> order(window.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = window[static_cast<size_t>(a)], y = window[static_cast<size_t>(b)];
    return x > y || (std::isnan(y) && !std::isnan(x));
  });
  order.resize(std::min(order.size(), static_cast<size_t>(topk)));
  std::sort(order.begin(), order.end());
  order.resize(static_cast<size_t>(topk), -1);
  return order;
}

std::vector<int32_t> row_of(const Tensor& indices, int64_t row, int64_t topk) {
  const int32_t* data = indices.data<int32_t>() + row * topk;
  return {data, data + topk};
}

class TopkSelectTest : public test::TargetTest {
 protected:
  void run(const TopkSelectProblem& problem, const TopkSelectTensors& tensors, int threads = 1) {
    const TopkSelect plan =
        TopkSelect::plan(problem, GetParam().device(threads), GetParam().options());
    HostBuffer buffer(plan.workspace_bytes());
    plan.run(tensors, buffer.workspace());
  }

  // One row, local positions.
  std::vector<int32_t> select(const std::vector<float>& row, int64_t topk) {
    const auto width = static_cast<int64_t>(row.size());
    Tensor indices(DType::kI32, {1, topk});
    indices.fill_bytes(0x55);
    run({1, width, topk}, {.logits = Tensor::f32({1, width}, row),
                           .row_len = Tensor::i32({1}, {static_cast<int32_t>(width)}),
                           .indices = indices});
    return indices.values<int32_t>();
  }

  // Every hostile row of this length against the definition.
  void check_hostile_rows(int64_t length, int64_t topk) {
    uint64_t seed = 1;
    for (const test::HostileRow& kind : test::hostile_rows()) {
      const std::vector<float> row = test::make_row(kind, length, ++seed);
      EXPECT_EQ(select(row, topk), expected_row(row, topk))
          << kind.name << ", length " << length << ", topk " << topk << ", seed " << seed;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, TopkSelectTest,
                         testing::ValuesIn(test::targets_of("topk_select")), test::target_name);

class FullTopkSelectTest : public TopkSelectTest {};
INSTANTIATE_TEST_SUITE_P(Targets, FullTopkSelectTest,
                         testing::ValuesIn(test::targets_of("topk_select")), test::target_name);

TEST_P(TopkSelectTest, KnownFault1TiesAtTheBoundaryGoToTheSmallestPositions) {
  std::vector<float> row(8320, 0.0f);
  for (size_t i = 0; i < 100; ++i) row[i * 83] = 1.0f + static_cast<float>(i);
  std::vector<int32_t> expected;
  int zeros = 0;
  for (int32_t p = 0; p < 8320; ++p) {
    const bool winner = p % 83 == 0 && p / 83 < 100;
    if (winner || zeros++ < 1948) expected.push_back(p);
  }
  ASSERT_EQ(expected.size(), 2048u);
  EXPECT_EQ(select(row, 2048), expected);

  std::vector<int32_t> first(2048);
  std::iota(first.begin(), first.end(), 0);
  EXPECT_EQ(select(std::vector<float>(8320, 7.0f), 2048), first);
  for (size_t i = 0; i < row.size(); ++i) row[i] = i % 3 == 0 ? -0.0f : 0.0f;
  EXPECT_EQ(select(row, 2048), first);

  std::vector<int32_t> infinite;
  for (size_t i = 0; i < row.size(); ++i) {
    row[i] = i % 3 == 1 && infinite.size() < 2500 ? kInf : static_cast<float>(i);
    if (row[i] == kInf) infinite.push_back(static_cast<int32_t>(i));
  }
  ASSERT_EQ(infinite.size(), 2500u);
  infinite.resize(2048);
  EXPECT_EQ(select(row, 2048), infinite);
}

TEST_P(TopkSelectTest, KnownFault1RowsOfDifferentLengthInOneCall) {
  test::Rng rng(3);
  std::vector<int32_t> lengths{2047, 2048, 2049};
  while (lengths.size() < 64) lengths.push_back(static_cast<int32_t>(rng.integer(-2, 2600)));
  const std::vector<float> logits = rng.normals(64 * 2600);
  for (const int threads : {1, 2, 3}) {
    Tensor indices(DType::kI32, {64, 2048});
    run({64, 2600, 2048},
        {.logits = Tensor::f32({64, 2600}, logits),
         .row_len = Tensor::i32({64}, lengths),
         .indices = indices},
        threads);
    for (int64_t t = 0; t < 64; ++t) {
      const auto begin = logits.begin() + t * 2600;
      const std::vector<float> row(begin, begin + std::max(0, lengths[static_cast<size_t>(t)]));
      EXPECT_EQ(row_of(indices, t, 2048), expected_row(row, 2048)) << "row " << t;
    }
  }
}

TEST_P(TopkSelectTest, KnownFault2NothingOutsideTheWindowIsSelected) {
  for (const int64_t topk : {8, 2048}) {
    for (const int64_t len : {0, 1, 3, 5, 7, 8, 9, 63, 65}) {
      for (const float outside : {1e30f, kNan, kInf}) {
        for (const int64_t start : {0, 1, 6}) {
          std::vector<float> row(static_cast<size_t>(start + len + 16), outside);
          std::fill_n(row.begin() + start, len, -3.5f);
          const auto width = static_cast<int64_t>(row.size());
          Tensor indices(DType::kI32, {1, topk});
          run({1, width, topk}, {.logits = Tensor::f32({1, width}, row),
                                 .row_len = Tensor::i32({1}, {static_cast<int32_t>(len)}),
                                 .row_start = Tensor::i32({1}, {static_cast<int32_t>(start)}),
                                 .indices = indices});
          const std::vector<float> window(static_cast<size_t>(len), -3.5f);
          EXPECT_EQ(indices.values<int32_t>(), expected_row(window, topk))
              << "topk " << topk << ", len " << len << ", start " << start;
        }
      }
    }
  }
}

TEST_P(TopkSelectTest, KnownFault2NanIsSelectedLast) {
  test::Rng rng(4);
  std::vector<float> row = rng.normals(4096);
  for (size_t i = 0; i < 10; ++i) row[i * 400] = i % 2 == 0 ? kNan : -kNan;
  const std::vector<int32_t> selected = select(row, 2048);
  EXPECT_EQ(selected, expected_row(row, 2048));
  for (const int32_t p : selected) EXPECT_FALSE(std::isnan(row[static_cast<size_t>(p)]));
  // Too few numbers: every number, -infinity included, then the first NaNs.
  EXPECT_EQ(select({kNan, -kInf, -kNan, 3.0f, kNan, -kInf}, 4), (std::vector<int32_t>{0, 1, 3, 5}));
}

TEST_P(TopkSelectTest, HostileRows) {
  for (const int64_t length : {1, 2, 17, 64, 100, 333, 1500}) {
    for (const int64_t topk : {1, 16, 99}) check_hostile_rows(length, topk);
  }
  check_hostile_rows(9000, 100);
  check_hostile_rows(50001, 700);  // several blocks of a GPU
}

TEST_P(FullTopkSelectTest, HostileRowsOfModelLengths) {
  for (const int64_t length : {2049, 8191, 8192, 8193, 16383, 16384, 16385, 65536, 131072}) {
    for (const int64_t topk : {512, 2048}) check_hostile_rows(length, topk);
  }
  check_hostile_rows(65536, 1);
  check_hostile_rows(65536, 65535);
  check_hostile_rows(65536, 40000);
}

TEST_P(FullTopkSelectTest, RowsOfUpToMillionsOfColumns) {
  for (const test::HostileRow& kind : test::hostile_rows()) {
    if (kind.name != "normal" && kind.name != "relu" && kind.name != "any_bits") continue;
    for (const int64_t length : {300'001, 700'001, 2'500'001}) {
      const std::vector<float> row = test::make_row(kind, length, 21);
      EXPECT_EQ(select(row, 2048), expected_row(row, 2048)) << kind.name << ", length " << length;
    }
  }
}

TEST_P(FullTopkSelectTest, RowsOfDifferentKindInAWideMatrix) {
  // A row of every kind, each with its own start and length; nothing around the windows is a
  // number.
  const std::vector<test::HostileRow> kinds = test::hostile_rows();
  const auto rows = static_cast<int64_t>(kinds.size());
  const int64_t width = 300'001, topk = 512;
  test::Rng rng(23);
  std::vector<float> logits(static_cast<size_t>(rows * width), kNan);
  std::vector<int32_t> lengths, starts;
  std::vector<std::vector<int32_t>> expected;
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t start = rng.integer(0, 5'000);
    const int64_t len = t % 5 == 4 ? rng.integer(0, 6'000) : rng.integer(30'000, 290'000);
    const std::vector<float> row = test::make_row(kinds[static_cast<size_t>(t)], len, 29);
    std::copy(row.begin(), row.end(), logits.begin() + t * width + start);
    starts.push_back(static_cast<int32_t>(start));
    lengths.push_back(static_cast<int32_t>(len));
    expected.push_back(expected_row(row, topk));
  }
  Tensor indices(DType::kI32, {rows + 1, topk});
  run({rows + 1, width, topk}, {.logits = Tensor::f32({rows, width}, logits),
                                .row_len = Tensor::i32({rows}, lengths),
                                .row_start = Tensor::i32({rows}, starts),
                                .indices = indices});
  for (int64_t t = 0; t < rows; ++t) {
    EXPECT_EQ(row_of(indices, t, topk), expected[static_cast<size_t>(t)])
        << kinds[static_cast<size_t>(t)].name;
  }
  EXPECT_EQ(row_of(indices, rows, topk), std::vector<int32_t>(topk, -1));
}

TEST_P(FullTopkSelectTest, ManyRowsOfDifferentKind) {
  // Fewer rows than a GPU has multiprocessors, and more; nothing around the windows is a number.
  const std::vector<test::HostileRow> kinds = test::hostile_rows();
  const auto num_kinds = static_cast<int64_t>(kinds.size());
  const int64_t topk = 701;
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{100, 40'003}, {300, 20'011}}) {
    std::vector<std::vector<float>> values;
    std::vector<std::vector<int32_t>> expected;
    for (int64_t kind = 0; kind < num_kinds; ++kind) {
      values.push_back(test::make_row(kinds[static_cast<size_t>(kind)], width - 5 - kind, 31));
      expected.push_back(expected_row(values.back(), topk));
    }
    std::vector<float> logits(static_cast<size_t>(rows * width), kNan);
    std::vector<int32_t> lengths, starts;
    for (int64_t t = 0; t < rows; ++t) {
      const std::vector<float>& row = values[static_cast<size_t>(t % num_kinds)];
      starts.push_back(static_cast<int32_t>(t % 5));
      lengths.push_back(static_cast<int32_t>(row.size()));
      std::copy(row.begin(), row.end(), logits.begin() + t * width + starts.back());
    }
    Tensor indices(DType::kI32, {rows, topk});
    run({rows, width, topk}, {.logits = Tensor::f32({rows, width}, logits),
                              .row_len = Tensor::i32({rows}, lengths),
                              .row_start = Tensor::i32({rows}, starts),
                              .indices = indices});
    for (int64_t t = 0; t < rows; ++t) {
      EXPECT_EQ(row_of(indices, t, topk), expected[static_cast<size_t>(t % num_kinds)])
          << kinds[static_cast<size_t>(t % num_kinds)].name << ", row " << t << " of " << rows;
    }
  }
}

TEST_P(FullTopkSelectTest, PlateausAtTheBoundaryOfLongRows) {
  // Above the plateau stand fewer, exactly and more than topk - 1 entries; the plateau is zeros of
  // both signs, NaN or the lowest numbers.
  const int64_t length = 50'000, topk = 1000;
  test::Rng rng(17);
  for (const float level : {0.0f, kNan, -kInf, -3e38f, 5.0f}) {
    for (const int64_t above : {0, 1, 500, 999, 1000, 1001}) {
      std::vector<float> row(static_cast<size_t>(length), level);
      for (int64_t i = 1; i < length; i += 2) row[static_cast<size_t>(i)] = -level;
      if (!std::isnan(level) && level != 0.0f) std::fill(row.begin(), row.end(), level);
      for (int64_t i = 0; i < above; ++i) {
        row[static_cast<size_t>((i * 7919 + 13) % length)] = rng.uniform(6.0f, 7.0f);
      }
      EXPECT_EQ(select(row, topk), expected_row(row, topk)) << level << ", " << above << " above";
    }
  }
}

TEST_P(FullTopkSelectTest, AMisleadingSampleCostsNoEntry) {
  // The largest entries stand exactly where the sample looks, so that its threshold is too high.
  for (const int64_t length : {16384, 65536}) {
    const internal::TopkSample sample(length, 2048);
    ASSERT_GT(sample.size, 0);
    test::Rng rng(11);
    std::vector<float> row = rng.normals(length);
    internal::TopkSample::Places places(sample);
    for (int64_t i = 0; i < sample.size; ++i) row[static_cast<size_t>(places.next())] += 100.0f;
    EXPECT_EQ(select(row, 2048), expected_row(row, 2048));
    for (float& value : row) value = -value;  // and too low
    EXPECT_EQ(select(row, 2048), expected_row(row, 2048));
  }
}

#if defined(__SSE2__)
TEST_P(TopkSelectTest, SubnormalNumbersAreOrderedEvenWhereTheThreadTakesThemForZero) {
  if (GetParam().implementation == "ref") GTEST_SKIP() << "the reference compares floats";
  for (const test::HostileRow& kind : test::hostile_rows()) {
    const std::vector<float> row = test::make_row(kind, 6000, 12);
    const std::vector<int32_t> expected = expected_row(row, 700);
    const unsigned mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode | 0x8040u);  // flush to zero, denormals are zero
    const std::vector<int32_t> selected = select(row, 700);
    __builtin_ia32_ldmxcsr(mode);
    EXPECT_EQ(selected, expected) << kind.name;
  }
  // A sample of positive numbers alone among negative ones, all subnormal.
  const internal::TopkSample sample(20000, 2000);
  std::vector<float> row(20000);
  test::Rng rng(13);
  for (float& value : row) value = -1e-40f * rng.uniform(0.1f, 1.0f);
  internal::TopkSample::Places places(sample);
  for (int64_t i = 0; i < sample.size; ++i) row[static_cast<size_t>(places.next())] *= -1.0f;
  const std::vector<int32_t> expected = expected_row(row, 2000);
  const unsigned mode = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(mode | 0x8040u);
  const std::vector<int32_t> selected = select(row, 2000);
  __builtin_ia32_ldmxcsr(mode);
  EXPECT_EQ(selected, expected);
}
#endif

// Rows of few distinct values, so that boundaries fall into plateaus; any start, length and topk.
void check_random_problem(const TopkSelectProblem& limits, const test::Target& target) {
  const auto topk = *rc::gen::inRange<int64_t>(0, limits.topk + 1);
  const auto width = *rc::gen::inRange<int64_t>(0, limits.max_width + 1);
  const auto rows = *rc::gen::inRange<int64_t>(0, 4);
  const auto distinct = *rc::gen::inRange<uint64_t>(1, 40);
  test::Rng rng(*rc::gen::arbitrary<uint64_t>());
  std::vector<float> logits(static_cast<size_t>(rows * width));
  for (float& value : logits) {
    const auto code = static_cast<uint32_t>(rng.next() % distinct) * 0x0A3D70A4u;
    value = std::bit_cast<float>(code);  // infinities and NaN among them
  }
  std::vector<int32_t> lengths, starts;
  for (int64_t t = 0; t < rows; ++t) {
    lengths.push_back(static_cast<int32_t>(rng.integer(-3, width + 3)));
    starts.push_back(static_cast<int32_t>(rng.integer(-3, width + 3)));
  }
  Tensor indices(DType::kI32, {rows, topk});
  const TopkSelect plan =
      TopkSelect::plan({rows, width, topk}, test::device_of(target.options(), 1), target.options());
  HostBuffer buffer(plan.workspace_bytes());
  plan.run({.logits = Tensor::f32({rows, width}, logits),
            .row_len = Tensor::i32({rows}, lengths),
            .row_start = Tensor::i32({rows}, starts),
            .indices = indices},
           buffer.workspace());
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t start = std::clamp<int64_t>(starts[static_cast<size_t>(t)], 0, width);
    const int64_t len = std::clamp<int64_t>(lengths[static_cast<size_t>(t)], 0, width - start);
    const auto begin = logits.begin() + t * width + start;
    RC_ASSERT(row_of(indices, t, topk) ==
              expected_row(std::vector<float>(begin, begin + len), topk));
  }
}

TEST_P(TopkSelectTest, RandomProblemsEqualTheDefinition) {
  EXPECT_TRUE(test::holds("equals the definition", [] {
    check_random_problem({0, 300, 40}, GetParam());
  }));
}

TEST_P(FullTopkSelectTest, RandomProblemsEqualTheDefinition) {
  EXPECT_TRUE(test::holds("equals the definition", [] {
    check_random_problem({0, 40000, 3000}, GetParam());
  }));
}

TEST_P(TopkSelectTest, PagedGivesSlotsAndHoles) {
  // P = 4; request 0 owns pages 2, 5, 7, request 1 pages 3, -1 and no third column that is valid.
  const Tensor table = Tensor::i32({2, 3}, {2, 5, 7, 3, -1, 1 << 30});
  const std::vector<float> logits{1, 9, 2, 8, 3, 7, 4, 6, 5, 0,   // request 0
                                  1, 1, 1, 1, 1, 1, 1, 1, 1, 1,   // request 1
                                  1, 1, 1, 1, 1, 1, 1, 1, 1, 1,   // no request
                                  0, 0, 0, 0, 0, 0, 0, 0, 0, 1,   // request 0, short
                                  1, 1, 1, 1, 1, 1, 1, 1, 1, 1,   // request 2 of 2
                                  9, 9, 9, 0, 0, 0, 0, 9, 9, 9};  // request 1
  Tensor indices(DType::kI32, {7, 6});
  indices.fill_bytes(0x55);
  run({7, 10, 6, IndexTransform::kPaged, 4},
      {.logits = Tensor::f32({6, 10}, logits),
       .row_len = Tensor::i32({6}, {10, 5, 10, 3, 10, 10}),
       .page_table = table,
       .row_to_request = Tensor::i32({7}, {0, 1, -1, 0, 2, 1, -1}),
       .indices = indices});
  const std::vector<int32_t> expected{9,  11, 21, 22, 23, 28,   // positions 1 3 5 6 7 8
                                      12, 13, 14, 15, -1, -1,   // position 4 is on page -1
                                      -1, -1, -1, -1, -1, -1,   //
                                      8,  9,  10, -1, -1, -1,   //
                                      -1, -1, -1, -1, -1, -1,   //
                                      12, 13, 14, -1, -1, -1,   // 7 on page -1, 8 and 9 past int32
                                      -1, -1, -1, -1, -1, -1};  // padding
  EXPECT_EQ(indices.values<int32_t>(), expected);
}

TEST_P(TopkSelectTest, PagedHolesStayInTheirPlace) {
  // Positions 0 and 1 are on page -1, 2 and 3 on page 1, 4 and 5 past the table.
  Tensor indices(DType::kI32, {1, 7});
  run({1, 6, 7, IndexTransform::kPaged, 2},
      {.logits = Tensor::f32({1, 6}, std::vector<float>(6, 0.0f)),
       .row_len = Tensor::i32({1}, {6}),
       .page_table = Tensor::i32({1, 2}, {-1, 1}),
       .row_to_request = Tensor::i32({1}, {0}),
       .indices = indices});
  EXPECT_EQ(indices.values<int32_t>(), (std::vector<int32_t>{-1, -1, 2, 3, -1, -1, -1}));
}

TEST_P(TopkSelectTest, TokenTableGivesItsEntries) {
  const Tensor table = Tensor::i32({2, 4}, {100, 101, -7, 103, 200, 201, 202, 203});
  const Tensor logits = Tensor::f32({3, 5}, {0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 9, 9, 9, 9, 9});
  const Tensor row_len = Tensor::i32({3}, {5, 5, 5});
  Tensor indices(DType::kI32, {3, 3});
  // Row t uses table row t; row 2 has none.
  run({3, 5, 3, IndexTransform::kPaged},
      {.logits = logits, .row_len = row_len, .token_table = table, .indices = indices});
  EXPECT_EQ(indices.values<int32_t>(),
            (std::vector<int32_t>{-1, 103, -1, 200, 201, 202, -1, -1, -1}));
  run({3, 5, 3, IndexTransform::kPaged}, {.logits = logits,
                                          .row_len = row_len,
                                          .token_table = table,
                                          .row_to_request = Tensor::i32({3}, {1, 5, 0}),
                                          .indices = indices});
  EXPECT_EQ(indices.values<int32_t>(),
            (std::vector<int32_t>{202, 203, -1, -1, -1, -1, 100, 101, -1}));
}

TEST_P(TopkSelectTest, RaggedAddsTheOffsetAndKeepsHoles) {
  Tensor indices(DType::kI32, {4, 3});
  run({4, 4, 3, IndexTransform::kRagged},
      {.logits = Tensor::f32({3, 4}, {0, 1, 2, 3, 4, 3, 2, 1, 1, 1, 1, 1}),
       .row_len = Tensor::i32({3}, {4, 2, 4}),
       .row_offset = Tensor::i32({3}, {1000, -1, 0x7FFFFFFE}),
       .indices = indices});
  EXPECT_EQ(
      indices.values<int32_t>(),
      (std::vector<int32_t>{1001, 1002, 1003, -1, 0, -1, 0x7FFFFFFE, 0x7FFFFFFF, -1, -1, -1, -1}));
}

TEST_P(TopkSelectTest, TransformsEqualTheMappedLocalSelection) {
  test::Rng rng(5);
  const int64_t rows = 5, width = 700, topk = 64, page = 61;
  const Tensor logits = Tensor::f32({rows, width}, rng.normals(rows * width));
  const Tensor row_len = Tensor::i32({rows}, {700, 65, 64, 3, 699});
  std::vector<int32_t> pages, offsets, requests{2, 0, 1, 2, 0};
  for (int i = 0; i < 3 * 12; ++i) pages.push_back(static_cast<int32_t>(rng.integer(-1, 500)));
  for (int i = 0; i < 5; ++i) offsets.push_back(static_cast<int32_t>(rng.integer(0, 100000)));
  Tensor local(DType::kI32, {rows, topk}), paged(DType::kI32, {rows, topk}),
      ragged(DType::kI32, {rows, topk});
  run({rows, width, topk}, {.logits = logits, .row_len = row_len, .indices = local});
  run({rows, width, topk, IndexTransform::kPaged, page},
      {.logits = logits,
       .row_len = row_len,
       .page_table = Tensor::i32({3, 12}, pages),
       .row_to_request = Tensor::i32({rows}, requests),
       .indices = paged});
  run({rows, width, topk, IndexTransform::kRagged}, {.logits = logits,
                                                     .row_len = row_len,
                                                     .row_offset = Tensor::i32({rows}, offsets),
                                                     .indices = ragged});
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < topk; ++i) {
      const int32_t pos = local.data<int32_t>()[t * topk + i];
      const int32_t entry =
          pos < 0 ? -1
                  : pages[static_cast<size_t>(requests[static_cast<size_t>(t)] * 12 + pos / page)];
      EXPECT_EQ(paged.data<int32_t>()[t * topk + i],
                entry < 0 ? -1 : static_cast<int32_t>(entry * page + pos % page));
      EXPECT_EQ(ragged.data<int32_t>()[t * topk + i],
                pos < 0 ? -1 : pos + offsets[static_cast<size_t>(t)]);
    }
  }
}

TEST_P(TopkSelectTest, KnownFault14StridedViewsEqualPackedCopies) {
  test::Rng rng(6);
  const int64_t rows = 3, width = 500, topk = 40;
  Tensor wide(DType::kF32, {rows, 777}), table(DType::kI32, {2, 50}), out(DType::kI32, {rows, 61});
  wide.fill_bytes(0xFF);
  table.fill_bytes(0x7F);
  out.fill_bytes(0x55);
  const std::vector<float> values = rng.normals(rows * width);
  std::vector<int32_t> pages;
  pages.reserve(2 * 32);
  for (int i = 0; i < 2 * 32; ++i) pages.push_back(static_cast<int32_t>(rng.integer(0, 900)));
  for (int64_t t = 0; t < rows; ++t)
    std::copy_n(values.begin() + t * width, width, wide.data<float>() + t * 777 + 3);
  for (int64_t r = 0; r < 2; ++r)
    std::copy_n(pages.begin() + r * 32, 32, table.data<int32_t>() + r * 50 + 1);
  const auto columns = [](const Tensor& tensor, int64_t first, int64_t count) {
    ConstTensorView view = tensor;
    view.data = static_cast<const char*>(view.data) + 4 * first;
    view.shape[1] = count;
    return view;
  };
  TensorView out_view = out;
  out_view.data = static_cast<char*>(out_view.data) + 4;
  out_view.shape[1] = topk;
  const TopkSelectProblem problem{rows, width, topk, IndexTransform::kPaged, 16};
  const Tensor row_len = Tensor::i32({rows}, {500, 499, 41});
  const Tensor requests = Tensor::i32({rows}, {0, 1, 0});
  run(problem, {.logits = columns(wide, 3, width),
                .row_len = row_len,
                .page_table = columns(table, 1, 32),
                .row_to_request = requests,
                .indices = out_view});
  const Tensor packed_logits = Tensor::f32({rows, width}, values);
  const Tensor packed_table = Tensor::i32({2, 32}, pages);
  Tensor packed(DType::kI32, {rows, topk});
  run(problem, {.logits = packed_logits,
                .row_len = row_len,
                .page_table = packed_table,
                .row_to_request = requests,
                .indices = packed});
  for (int64_t t = 0; t < rows; ++t) {
    EXPECT_EQ(std::vector<int32_t>(out.data<int32_t>() + t * 61 + 1,
                                   out.data<int32_t>() + t * 61 + 1 + topk),
              row_of(packed, t, topk));
    EXPECT_EQ(out.data<int32_t>()[t * 61], 0x55555555);  // beside the view: untouched
    EXPECT_EQ(out.data<int32_t>()[t * 61 + 1 + topk], 0x55555555);
  }
}

TEST_P(TopkSelectTest, ReadsAndWritesNothingOutsideTheTensors) {
  test::Rng rng(7);
  for (const int64_t width : {41, 64, 1003, 3000}) {
    const int64_t topk = 37;
    test::GuardedMemory logits(static_cast<size_t>(4 * width));
    test::GuardedMemory indices(static_cast<size_t>(4 * topk));
    const std::vector<float> row = rng.normals(width);
    std::copy(row.begin(), row.end(), static_cast<float*>(logits.data()));
    const TopkSelect plan =
        TopkSelect::plan({1, width, topk}, GetParam().device(1), GetParam().options());
    test::GuardedMemory scratch((plan.workspace_bytes() + 63) / 64 * 64);
    const Tensor row_len = Tensor::i32({1}, {static_cast<int32_t>(width)});
    plan.run(
        {.logits = make_tensor(static_cast<const void*>(logits.data()), DType::kF32, {1, width}),
         .row_len = row_len,
         .indices = make_tensor(indices.data(), DType::kI32, {1, topk})},
        {scratch.data(), plan.workspace_bytes()});
    const auto* out = static_cast<const int32_t*>(indices.data());
    EXPECT_EQ(std::vector<int32_t>(out, out + topk), expected_row(row, topk));
  }
}

TEST_P(TopkSelectTest, RowsWithoutSelectionDoNotReadTheirLogits) {
  // The logits' memory is unreadable; lengths 0, -5 and K need none of it.
  test::GuardedMemory guard(4096);
  const void* unreadable = static_cast<const char*>(guard.data()) + 4096;
  Tensor indices(DType::kI32, {3, 5});
  const Tensor row_len = Tensor::i32({3}, {0, -5, 5});
  run({3, 300, 5}, {.logits = make_tensor(unreadable, DType::kF32, {3, 300}),
                    .row_len = row_len,
                    .indices = indices});
  EXPECT_EQ(indices.values<int32_t>(),
            (std::vector<int32_t>{-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 3, 4}));
}

TEST_P(TopkSelectTest, EmptyProblemsSucceed) {
  Tensor none(DType::kI32, {0, 4}), no_columns(DType::kI32, {2, 0});
  run({0, 0, 4}, {.logits = Tensor(DType::kF32, {0, 0}),
                  .row_len = Tensor(DType::kI32, {0}),
                  .indices = none});
  run({2, 8, 0}, {.logits = Tensor(DType::kF32, {2, 8}),
                  .row_len = Tensor::i32({2}, {8, 3}),
                  .indices = no_columns});
  Tensor padding(DType::kI32, {2, 4});
  run({2, 0, 4, IndexTransform::kPaged, 64}, {.logits = Tensor(DType::kF32, {0, 0}),
                                              .row_len = Tensor(DType::kI32, {0}),
                                              .page_table = Tensor(DType::kI32, {0, 0}),
                                              .row_to_request = Tensor(DType::kI32, {0}),
                                              .indices = padding});
  EXPECT_EQ(padding.values<int32_t>(), std::vector<int32_t>(8, -1));
}

TEST_P(TopkSelectTest, ARowDependsOnItselfAloneAndOnNoThreadCount) {
  test::Rng rng(8);
  const std::vector<test::HostileRow> kinds = test::hostile_rows();
  const auto rows = static_cast<int64_t>(kinds.size());
  const int64_t width = 2500, topk = 200;
  std::vector<float> logits;
  for (const test::HostileRow& kind : kinds) {
    const std::vector<float> row = test::make_row(kind, width, 9);
    logits.insert(logits.end(), row.begin(), row.end());
  }
  const std::vector<int32_t> lengths(kinds.size(), static_cast<int32_t>(width));
  for (const int threads : {1, 2, 3}) {
    Tensor indices(DType::kI32, {rows, topk});
    run({rows, width, topk},
        {.logits = Tensor::f32({rows, width}, logits),
         .row_len = Tensor::i32({rows}, lengths),
         .indices = indices},
        threads);
    for (int64_t t = 0; t < rows; ++t) {
      const auto begin = logits.begin() + t * width;
      EXPECT_EQ(row_of(indices, t, topk), select({begin, begin + width}, topk));
    }
  }
}

TEST_P(TopkSelectTest, AGraphSelectsFromWhatTheTensorsHoldWhenItIsLaunched) {
  // Captured on the plan's first run, with rows that need no selection.
  const int64_t width = 9000, topk = 64;
  const Device device = GetParam().device(1);
  const TopkSelect plan = TopkSelect::plan({2, width, topk}, device, GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  Tensor logits(DType::kF32, {2, width}), row_len(DType::kI32, {2}),
      indices(DType::kI32, {2, topk});
  const OwnedStream stream(device);
  const Graph graph = Graph::capture(device, stream, [&](Stream captured) {
    plan.run({.logits = logits, .row_len = row_len, .indices = indices}, workspace.workspace(),
             captured);
  });
  test::Rng rng(19);
  for (const int32_t len : {9000, 5, 8999, 70}) {
    const std::vector<float> values = rng.normals(2 * width);
    std::copy(values.begin(), values.end(), logits.data<float>());
    row_len.data<int32_t>()[0] = len;
    row_len.data<int32_t>()[1] = 9000 - len;
    indices.fill_bytes(0x55);
    graph.launch(stream);
    stream.synchronize();
    for (int64_t t = 0; t < 2; ++t) {
      const auto begin = values.begin() + t * width;
      EXPECT_EQ(row_of(indices, t, topk),
                expected_row({begin, begin + row_len.data<int32_t>()[t]}, topk));
    }
  }
}

TEST_P(TopkSelectTest, RunDoesNotAllocate) {
  test::Rng rng(10);
  const Tensor logits = Tensor::f32({4, 5000}, rng.normals(4 * 5000));
  const Tensor row_len = Tensor::i32({4}, {5000, 4999, 3, 5000});
  const Tensor page_table(DType::kI32, {2, 80}), per_row = Tensor::i32({4}, {0, 1, 0, -1});
  Tensor indices(DType::kI32, {4, 300});
  const TopkSelectTensors tensors{.logits = logits,
                                  .row_len = row_len,
                                  .page_table = page_table,
                                  .row_to_request = per_row,
                                  .row_offset = per_row,
                                  .indices = indices};
  for (const IndexTransform transform :
       {IndexTransform::kLocal, IndexTransform::kPaged, IndexTransform::kRagged}) {
    const TopkSelect plan =
        TopkSelect::plan({4, 5000, 300, transform, 64}, GetParam().device(1), GetParam().options());
    HostBuffer buffer(plan.workspace_bytes());
    plan.run(tensors, buffer.workspace());
    const test::AllocationCounter counter;
    plan.run(tensors, buffer.workspace());
    EXPECT_EQ(counter.count(), 0);
  }
}

TEST_P(TopkSelectTest, KnownFault6RowsBeyondFourGigabytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  // A score matrix 262144 wide: row 8192 starts at byte 2^33.
  const int64_t width = 262144, row = 8192, topk = 3;
  test::SparseMapping mapping(static_cast<size_t>((row + 1) * width * 4));
  float* last = static_cast<float*>(mapping.data()) + row * width;
  last[5] = last[262143] = 4.0f;
  last[100000] = 3.0f;
  std::vector<int32_t> lengths(static_cast<size_t>(row), 0);
  lengths.push_back(static_cast<int32_t>(width));
  Tensor indices(DType::kI32, {row + 1, topk});
  const Tensor row_len = Tensor::i32({row + 1}, lengths);
  run({row + 1, width, topk}, {.logits = make_tensor(static_cast<const void*>(mapping.data()),
                                                     DType::kF32, {row + 1, width}),
                               .row_len = row_len,
                               .indices = indices});
  EXPECT_EQ(row_of(indices, row, topk), (std::vector<int32_t>{5, 100000, 262143}));
  EXPECT_EQ(row_of(indices, row - 1, topk), (std::vector<int32_t>{-1, -1, -1}));
}

TEST(TopkSelect, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  EXPECT_THROW(TopkSelect::plan({-1, 1, 1}, cpu), Error);
  EXPECT_THROW(TopkSelect::plan({1, int64_t{1} << 31, 1}, cpu), Error);
  EXPECT_THROW(TopkSelect::plan({1, 1, -1}, cpu), Error);
  EXPECT_THROW(TopkSelect::plan({1, 1, 1, IndexTransform::kPaged, -1}, cpu), Error);
  EXPECT_THROW(TopkSelect::plan({1, 1, 1, static_cast<IndexTransform>(9)}, cpu), Error);

  const Tensor logits(DType::kF32, {2, 8}), row_len(DType::kI32, {2}), table(DType::kI32, {3, 4}),
      wide_logits(DType::kF32, {2, 9}), short_len(DType::kI32, {1}), requests(DType::kI32, {2});
  Tensor indices(DType::kI32, {2, 4}), narrow(DType::kI32, {2, 3}), one_row(DType::kI32, {1, 4}),
      long_indices(DType::kI64, {2, 4});
  indices.fill_bytes(0x55);
  const TopkSelect local = TopkSelect::plan({2, 8, 4}, cpu);
  HostBuffer buffer(local.workspace_bytes());
  const auto refused = [&](const TopkSelect& plan, const TopkSelectTensors& tensors) {
    EXPECT_THROW(plan.run(tensors, buffer.workspace()), Error);
    EXPECT_EQ(indices.bytes(), std::vector<uint8_t>(32, 0x55));
  };
  refused(local, {.logits = wide_logits, .row_len = row_len, .indices = indices});
  refused(local, {.logits = logits, .row_len = short_len, .indices = indices});
  refused(local, {.logits = logits, .row_len = row_len, .indices = narrow});
  refused(local, {.logits = logits, .row_len = row_len, .indices = one_row});
  refused(local, {.logits = logits, .row_len = row_len, .indices = long_indices});
  refused(local, {.logits = row_len, .row_len = row_len, .indices = indices});
  refused(local, {.row_len = row_len, .indices = indices});

  const TopkSelect ragged = TopkSelect::plan({2, 8, 4, IndexTransform::kRagged}, cpu);
  refused(ragged, {.logits = logits, .row_len = row_len, .indices = indices});
  refused(ragged,
          {.logits = logits, .row_len = row_len, .row_offset = short_len, .indices = indices});

  const TopkSelect paged = TopkSelect::plan({2, 8, 4, IndexTransform::kPaged, 4}, cpu);
  const TopkSelect no_page = TopkSelect::plan({2, 8, 4, IndexTransform::kPaged}, cpu);
  refused(paged, {.logits = logits, .row_len = row_len, .indices = indices});
  refused(paged, {.logits = logits, .row_len = row_len, .page_table = table, .indices = indices});
  refused(paged, {.logits = logits,
                  .row_len = row_len,
                  .page_table = table,
                  .token_table = table,
                  .row_to_request = requests,
                  .indices = indices});
  refused(paged, {.logits = logits,
                  .row_len = row_len,
                  .token_table = table,
                  .row_to_request = requests,
                  .indices = indices});
  refused(no_page, {.logits = logits,
                    .row_len = row_len,
                    .page_table = table,
                    .row_to_request = requests,
                    .indices = indices});
  // Three table rows for two index rows.
  refused(no_page,
          {.logits = logits, .row_len = row_len, .token_table = table, .indices = indices});
}

}  // namespace
}  // namespace fovea
