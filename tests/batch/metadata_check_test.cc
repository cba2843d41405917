#include "fovea/metadata_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "fovea/error.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;
using Values = std::vector<int32_t>;

constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
// Stands wherever nothing may look: it is outside every range.
constexpr int32_t kGarbage = kMin + 12345;
constexpr ForwardMode kModes[] = {ForwardMode::kExtend,      ForwardMode::kDecode,
                                  ForwardMode::kIdle,        ForwardMode::kTargetVerify,
                                  ForwardMode::kDraftExtend, ForwardMode::kDraftExtendV2,
                                  ForwardMode::kMixed};

bool reads_ext_len(ForwardMode mode) {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed ||
         mode == ForwardMode::kDraftExtend;
}
bool is_decode(ForwardMode mode) {
  return mode == ForwardMode::kDecode || mode == ForwardMode::kIdle;
}

// The contents of a batch, to be damaged by the tests.
struct Batch {
  MetadataCheckProblem problem;
  Values seq_len, pool_row, ext_len, table, out_cache_loc, topk_indices;
  int32_t delta = 0;

  // A faultless batch: pages of four slots in any order, garbage in every unused place.
  Batch(ForwardMode mode, const Values& lengths, int64_t page_size = 4, int64_t padded_rows = 3) {
    const auto requests = static_cast<int64_t>(lengths.size());
    problem.mode = mode;
    problem.max_requests = requests;
    problem.table_width = 24;
    problem.rows_per_request = 3;
    problem.page_size = page_size;
    problem.topk = 6;
    problem.capacity = 64 * page_size;
    int64_t rows = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const bool is_verify = mode == ForwardMode::kTargetVerify;
      seq_len.push_back(is_verify ? lengths[i] - 3 : lengths[i]);
      if (reads_ext_len(mode)) ext_len.push_back(static_cast<int32_t>(i % 4));
      pool_row.push_back(static_cast<int32_t>(2 * requests - 1 - 2 * static_cast<int64_t>(i)));
      rows += rows_of(i);
    }
    problem.max_rows = rows + padded_rows;
    fill_table(lengths);
    fill_rows(lengths);
  }

  int64_t rows_of(size_t request) const {
    if (reads_ext_len(problem.mode)) return ext_len[request];
    return is_decode(problem.mode) ? 1 : 3;
  }

  int32_t& slot(int64_t request, int64_t position) {
    const int64_t row = pool_row[static_cast<size_t>(request)];
    return table[static_cast<size_t>(row * problem.table_width + position)];
  }
  int32_t& index(int64_t row, int64_t column) {
    return topk_indices[static_cast<size_t>(row * problem.topk + column)];
  }

  void fill_table(const Values& lengths) {
    const auto requests = static_cast<int64_t>(lengths.size());
    table.assign(static_cast<size_t>(2 * requests * problem.table_width), kGarbage);
    for (int64_t r = 0; r < requests; ++r) {
      for (int64_t p = 0; p < lengths[static_cast<size_t>(r)]; ++p) {
        const int64_t page = 63 - (7 * r + p / problem.page_size) % 60;
        slot(r, p) = static_cast<int32_t>(page * problem.page_size + p % problem.page_size);
      }
    }
  }

  void fill_rows(const Values& lengths) {
    out_cache_loc.assign(static_cast<size_t>(problem.max_rows), -1);
    topk_indices.assign(static_cast<size_t>(problem.max_rows * problem.topk), kGarbage);
    int64_t row = 0;
    for (size_t r = 0; r < lengths.size(); ++r) {
      for (int64_t i = 0; i < rows_of(r); ++i, ++row) {
        out_cache_loc[static_cast<size_t>(row)] = static_cast<int32_t>(row);
        const int64_t keys = std::min(lengths[r] - rows_of(r) + 1 + i, problem.topk);
        for (int64_t c = 0; c < keys; ++c) index(row, c) = static_cast<int32_t>(c) - 1;
      }
    }
  }

  // Padded requests behind the others, of a batch without padded rows: pool row 0, one slot.
  void pad(int64_t requests, int32_t seq_len_of_each, int32_t slot_of_each = 0) {
    const bool is_verify = problem.mode == ForwardMode::kTargetVerify;
    const int64_t len = seq_len_of_each + (is_verify ? problem.rows_per_request : 0);
    if (table.empty()) table.assign(static_cast<size_t>(problem.table_width), kGarbage);
    std::fill_n(table.begin(), len, slot_of_each);
    for (int64_t i = 0; i < requests; ++i, ++problem.max_requests) {
      seq_len.push_back(seq_len_of_each);
      pool_row.push_back(0);
      if (reads_ext_len(problem.mode)) ext_len.push_back(i % 2 == 0 ? 1 : 0);
      const int64_t rows = rows_of(seq_len.size() - 1);
      for (int64_t row = 0; row < rows; ++row, ++problem.max_rows) {
        out_cache_loc.push_back(row % 2 == 0 ? slot_of_each : -1);
        const int64_t keys = std::clamp<int64_t>(len - rows + 1 + row, 0, problem.topk);
        topk_indices.insert(topk_indices.end(), static_cast<size_t>(problem.topk), kGarbage);
        std::fill_n(topk_indices.end() - problem.topk, keys, slot_of_each);
      }
    }
  }

  MetadataReport check(const Options& options, int threads = 1) const {
    const auto requests = static_cast<int64_t>(seq_len.size());
    const auto width = problem.table_width;
    const Tensor seq = Tensor::i32({requests}, seq_len), rows = Tensor::i32({requests}, pool_row),
                 ext = Tensor::i32({static_cast<int64_t>(ext_len.size())}, ext_len),
                 to_token = Tensor::i32({static_cast<int64_t>(table.size()) / width, width}, table),
                 store = Tensor::i32({static_cast<int64_t>(out_cache_loc.size())}, out_cache_loc),
                 indices = Tensor::i32(
                     {static_cast<int64_t>(topk_indices.size()) / problem.topk, problem.topk},
                     topk_indices);
    Tensor word(DType::kI32, {8});
    word.fill_bytes(0xAB);
    MetadataCheckTensors tensors;
    tensors.seq_len = seq;
    tensors.pool_row = rows;
    tensors.req_to_token = to_token;
    if (reads_ext_len(problem.mode)) tensors.ext_len = ext;
    tensors.out_cache_loc = store;
    tensors.topk_indices = indices;
    tensors.kv_len_delta = delta;
    tensors.error_word = word;
    test::run(MetadataCheck::plan(problem, test::device_of(options, threads), options), tensors);
    MetadataReport report;
    std::copy_n(word.data<uint8_t>(), sizeof(report), reinterpret_cast<uint8_t*>(&report));
    return report;
  }
};

MetadataReport report_of(MetadataFault fault, int32_t request, int32_t position, int32_t value,
                         int32_t limit, int32_t count = 1) {
  return {fault, request, position, value, limit, count, {}};
}

void expect_equal(const MetadataReport& actual, const MetadataReport& expected) {
  EXPECT_EQ(actual.fault, expected.fault) << to_string(actual);
  EXPECT_EQ(actual.request, expected.request);
  EXPECT_EQ(actual.position, expected.position);
  EXPECT_EQ(actual.value, expected.value);
  EXPECT_EQ(actual.limit, expected.limit);
  EXPECT_EQ(actual.count, expected.count);
  EXPECT_EQ(actual.unused[0], 0);
  EXPECT_EQ(actual.unused[1], 0);
}

class MetadataCheckTest : public test::TargetTest {
 protected:
  void expect_report(const Batch& batch, const MetadataReport& expected) {
    for (const int threads : {1, 2, 3}) {
      expect_equal(batch.check(GetParam().options(), threads), expected);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MetadataCheckTest,
                         testing::ValuesIn(test::targets_of("metadata_check")), test::target_name);

const Values kLengths = {10, 4, 24, 3, 17, 9, 8, 5};

TEST_P(MetadataCheckTest, FaultlessBatchesReportNothing) {
  for (const ForwardMode mode : kModes) {
    for (const int64_t page_size : {1, 3, 4, 16, 256}) {
      SCOPED_TRACE(std::string(to_string(mode)) + ", P = " + std::to_string(page_size));
      expect_report(Batch(mode, kLengths, page_size), {});
    }
    expect_report(Batch(mode, {}), {});
  }
}

// One way to damage a batch, and what is then reported. No damage changes the report of a smaller
// fault, and each is on a request of its own.
struct Damage {
  std::function<void(Batch&)> apply;
  MetadataReport expected;
};

std::vector<Damage> damages_of_extend() {
  using enum MetadataFault;
  return {
      {[](Batch& b) { b.seq_len[0] = -5; }, report_of(kNegativeLength, 0, 0, -5, 0)},
      {[](Batch& b) { b.seq_len[1] = 0; }, report_of(kRowsOverLength, 1, 0, 1, 0)},
      {[](Batch& b) { b.seq_len[2] = 25; }, report_of(kLengthOverWidth, 2, 0, 25, 24)},
      {[](Batch& b) { b.ext_len[3] = -7; }, report_of(kNegativeRows, 3, 0, -7, 0)},
      {[](Batch& b) { b.problem.max_rows = 11; }, report_of(kRowCount, 7, 0, 12, 11)},
      {[](Batch& b) { b.pool_row[4] = 16; }, report_of(kPoolRow, 4, 0, 16, 16)},
      {[](Batch& b) { b.slot(5, 8) = 256; }, report_of(kSlotRange, 5, 8, 256, 256)},
      {[](Batch& b) { std::swap(b.slot(6, 1), b.slot(6, 2)); },
       report_of(kSlotLayout, 6, 1, 86, 85, 2)},
      {[](Batch& b) { b.out_cache_loc[12] = -2; }, report_of(kStoreSlot, 12, 0, -2, 256)},
      {[](Batch& b) { b.index(11, 4) = 256; }, report_of(kIndexRange, 11, 4, 256, 256)},
  };
}

TEST_P(MetadataCheckTest, EveryFaultAloneAndEveryCombinationReportsTheSmallest) {
  const std::vector<Damage> damages = damages_of_extend();
  const Batch whole(ForwardMode::kExtend, kLengths);
  for (unsigned subset = 1; subset < 1u << damages.size(); ++subset) {
    Batch batch = whole;
    const MetadataReport* smallest = nullptr;
    for (size_t i = 0; i < damages.size(); ++i) {
      if ((subset >> i & 1) == 0) continue;
      damages[i].apply(batch);
      if (smallest == nullptr) smallest = &damages[i].expected;
    }
    SCOPED_TRACE("damages " + std::to_string(subset));
    expect_equal(batch.check(GetParam().options(), 2), *smallest);
    if (testing::Test::HasFailure()) return;
  }
}

TEST_P(MetadataCheckTest, FaultsOfOneKindAreCountedAndTheFirstIsShown) {
  Batch batch(ForwardMode::kDecode, Values(40, 20));
  for (const int r : {38, 9, 21}) {
    batch.slot(r, 19) = -1;
    batch.slot(r, 3) = 300;
  }
  expect_report(batch, report_of(MetadataFault::kSlotRange, 9, 3, 300, 256, 6));
  batch.pool_row[39] = -1;
  batch.pool_row[5] = kMin;
  expect_report(batch, report_of(MetadataFault::kPoolRow, 5, 0, kMin, 80, 2));
}

TEST_P(MetadataCheckTest, LengthsAreCheckedInEveryMode) {
  using enum MetadataFault;
  for (const ForwardMode mode : kModes) {
    SCOPED_TRACE(to_string(mode));
    const bool is_verify = mode == ForwardMode::kTargetVerify;
    Batch batch(mode, kLengths);
    batch.seq_len[3] = kMin;
    expect_report(batch, report_of(kNegativeLength, 3, 0, kMin, 0));
    batch = Batch(mode, kLengths);
    batch.seq_len[3] = kMax;
    expect_report(batch, report_of(kLengthOverWidth, 3, 0, kMax, 24));
    batch = Batch(mode, kLengths);
    batch.seq_len[3] = is_verify ? 22 : 25;
    expect_report(batch, report_of(kLengthOverWidth, 3, 0, 25, 24));
    if (is_verify) continue;  // its rows come on top of any length
    batch = Batch(mode, kLengths);
    batch.seq_len[3] = 0;
    expect_report(batch,
                  report_of(kRowsOverLength, 3, 0, static_cast<int32_t>(batch.rows_of(3)), 0));
  }
}

TEST_P(MetadataCheckTest, ACommittedLengthBelowZeroIsAFaultThoughTheRowsOutweighIt) {
  Batch batch(ForwardMode::kTargetVerify, kLengths);
  batch.seq_len[3] = -1;
  expect_report(batch, report_of(MetadataFault::kNegativeLength, 3, 0, -1, 0));
}

TEST_P(MetadataCheckTest, LengthsAndDeltasDoNotOverflow) {
  using enum MetadataFault;
  Batch batch(ForwardMode::kDecode, kLengths);
  batch.seq_len.assign(8, kMax);
  batch.delta = kMax;
  expect_report(batch, report_of(kLengthOverWidth, 0, 0, kMax, 24, 8));
  batch.seq_len.assign(8, kMin);
  batch.delta = -kMax;
  expect_report(batch, report_of(kNegativeLength, 0, 0, kMin, 0, 8));
  batch.seq_len = kLengths;
  for (int32_t& len : batch.seq_len) len -= 100;
  batch.delta = 100;
  expect_report(batch, {});
  batch.delta = 97;
  expect_report(batch, report_of(kRowsOverLength, 3, 0, 1, 0));
}

TEST_P(MetadataCheckTest, HugeRowCountsDoNotOverflow) {
  using enum MetadataFault;
  Batch batch(ForwardMode::kDraftExtend, kLengths);
  batch.ext_len.assign(8, kMax);
  expect_report(batch, report_of(kRowsOverLength, 0, 0, kMax, 10, 8));
  batch.seq_len.assign(8, kMax);
  expect_report(batch, report_of(kLengthOverWidth, 0, 0, kMax, 24, 8));
}

TEST_P(MetadataCheckTest, RowsBeyondTheSmallestArrayAreAFault) {
  using enum MetadataFault;
  Batch batch(ForwardMode::kExtend, kLengths);
  batch.out_cache_loc.resize(12);
  expect_report(batch, {});
  batch.out_cache_loc.resize(9);
  expect_report(batch, report_of(kRowCount, 7, 0, 12, 9));
  batch = Batch(ForwardMode::kExtend, kLengths);
  batch.topk_indices.resize(3 * 6);
  // Rows of the requests end at 0, 1, 3, 6, 6, 7, 9, 12; a request without rows loses none.
  expect_report(batch, report_of(kRowCount, 3, 0, 6, 3, 4));
}

TEST_P(MetadataCheckTest, PoolRowsOfRequestsWithoutKeysAreNotUsed) {
  Batch batch(ForwardMode::kExtend, {0, 8});
  batch.pool_row[0] = 99;
  expect_report(batch, {});
}

TEST_P(MetadataCheckTest, SlotsOfAPageStandInOrderFromItsStart) {
  using enum MetadataFault;
  Batch batch(ForwardMode::kDecode, {10, 10});
  const int32_t first = batch.slot(1, 8);
  batch.slot(1, 8) = first + 1;  // of two used slots: 8 and 9
  expect_report(batch, report_of(kSlotLayout, 1, 8, first + 1, first, 1));
  batch.slot(1, 9) = first + 2;
  expect_report(batch, report_of(kSlotLayout, 1, 8, first + 1, first, 2));
  batch.slot(1, 8) = -1;  // its page is masked; what follows cannot be judged
  expect_report(batch, report_of(kSlotRange, 1, 8, -1, 256, 1));
}

TEST_P(MetadataCheckTest, SinglePagesHaveNoLayout) {
  Batch batch(ForwardMode::kDecode, {20, 20}, 1);
  for (int64_t p = 0; p < 20; ++p) batch.slot(0, p) = static_cast<int32_t>((p * 37) % 64);
  expect_report(batch, {});
}

TEST_P(MetadataCheckTest, PaddedRequestsRepeatOneSlotOfTheDummyPage) {
  for (const ForwardMode mode : kModes) {
    for (const int64_t page_size : {1, 3, 4, 16, 256}) {
      for (const int32_t seq_len : {1, 3, 20}) {
        for (const int64_t slot : {int64_t{0}, page_size - 1}) {
          SCOPED_TRACE(std::string(to_string(mode)) + ", P = " + std::to_string(page_size) +
                       ", seq_len = " + std::to_string(seq_len));
          Batch batch(mode, {10, 4}, page_size, 0);
          batch.pad(3, seq_len, static_cast<int32_t>(slot));
          expect_report(batch, {});
        }
      }
    }
  }
}

TEST_P(MetadataCheckTest, SlotsOfPaddedRequestsRepeatInTheDummyPageOnly) {
  using enum MetadataFault;
  Batch whole(ForwardMode::kDecode, {10, 4}, 4, 0);
  whole.pad(2, 7);
  expect_report(whole, {});
  Batch batch = whole;
  batch.slot(2, 5) = 4;  // the first slot behind the dummy page
  expect_report(batch, report_of(kSlotLayout, 2, 5, 4, 1, 2));
  batch.slot(2, 5) = 3;
  expect_report(batch, {});
  batch.slot(2, 5) = -1;
  expect_report(batch, report_of(kSlotRange, 2, 5, -1, 256, 2));
  batch.slot(2, 5) = 256;
  expect_report(batch, report_of(kSlotRange, 2, 5, 256, 256, 2));
  // A run that starts in another page has to go on there.
  batch = whole;
  batch.slot(2, 0) = 8;
  expect_report(batch, report_of(kSlotLayout, 2, 1, 0, 9, 6));
  for (int32_t p = 0; p < 4; ++p) batch.slot(2, p) = 8 + p;
  expect_report(batch, {});
  // A small pool has a part of the dummy page.
  whole.problem.capacity = 3;
  whole.pool_row[0] = whole.pool_row[1] = 0;
  whole.seq_len[0] = whole.seq_len[1] = 7;
  whole.slot(0, 6) = 3;
  expect_report(whole, report_of(kSlotRange, 0, 6, 3, 3, 4));
}

TEST_P(MetadataCheckTest, LiveRequestsKeepTheLayoutOfTheDummyPage) {
  using enum MetadataFault;
  Batch batch(ForwardMode::kDecode, {10, 4}, 4, 0);
  for (const int64_t p : {4, 5, 6, 7}) batch.slot(0, p) = 0;  // positions without a page
  expect_report(batch, report_of(kSlotLayout, 0, 5, 0, 1, 3));
  for (int32_t p = 4; p < 8; ++p) batch.slot(0, p) = p - 4;
  expect_report(batch, {});
}

TEST_P(MetadataCheckTest, PaddedRequestsOfOneTokenMayHaveMoreRows) {
  using enum MetadataFault;
  Batch batch(ForwardMode::kDraftExtendV2, {10, 4}, 4, 0);
  batch.pad(3, 1);
  expect_report(batch, {});
  batch.seq_len[3] = 2;  // neither padding nor enough
  expect_report(batch, report_of(kRowsOverLength, 3, 0, 3, 2));
  batch.seq_len[3] = 0;
  expect_report(batch, report_of(kRowsOverLength, 3, 0, 3, 0));
  batch.seq_len[3] = 1;
  batch.seq_len[1] = 1;  // a live request
  expect_report(batch, report_of(kRowsOverLength, 1, 0, 3, 1));
  batch.pool_row[1] = -1;
  expect_report(batch, report_of(kRowsOverLength, 1, 0, 3, 1));
}

TEST_P(MetadataCheckTest, GivenRowsOfPaddedRequestsAreNotOverTheirLength) {
  using enum MetadataFault;
  for (const ForwardMode mode :
       {ForwardMode::kExtend, ForwardMode::kMixed, ForwardMode::kDraftExtend}) {
    Batch batch(mode, {10, 4}, 4, 0);
    batch.pad(3, 1);
    expect_report(batch, {});
    batch.problem.max_rows += 1;
    batch.ext_len[4] = 2;
    batch.out_cache_loc.push_back(-1);
    batch.topk_indices.insert(batch.topk_indices.end(), 6, 0);
    expect_report(batch, report_of(kRowsOverLength, 4, 0, 2, 1));
  }
}

TEST_P(MetadataCheckTest, TheLastSlotOfTheCapacityIsLegal) {
  using enum MetadataFault;
  Batch batch(ForwardMode::kDecode, {4});
  for (int64_t p = 0; p < 4; ++p) batch.slot(0, p) = static_cast<int32_t>(252 + p);
  batch.out_cache_loc = {255, -1, 0, -1};
  batch.index(0, 0) = 255;
  expect_report(batch, {});
  batch.problem.capacity = 255;
  expect_report(batch, report_of(kSlotRange, 0, 3, 255, 255));
  batch.seq_len[0] = 3;
  expect_report(batch, report_of(kStoreSlot, 0, 0, 255, 255));
  batch.out_cache_loc[0] = 254;
  expect_report(batch, report_of(kIndexRange, 0, 0, 255, 255));
}

TEST_P(MetadataCheckTest, ExtremeSlotsAndIndicesAreOutside) {
  using enum MetadataFault;
  for (const int32_t value : {kMin, kMin + 1, -2, 256, kMax - 1, kMax}) {
    Batch batch(ForwardMode::kTargetVerify, kLengths);
    batch.slot(7, 4) = value;
    expect_report(batch, report_of(kSlotRange, 7, 4, value, 256));
    batch = Batch(ForwardMode::kTargetVerify, kLengths);
    batch.out_cache_loc.back() = value;  // padded rows store, too
    expect_report(batch, report_of(kStoreSlot, 26, 0, value, 256));
    batch = Batch(ForwardMode::kTargetVerify, kLengths);
    batch.index(9, 0) = value;  // row 0 of request 3, which sees one key
    expect_report(batch, report_of(kIndexRange, 9, 0, value, 256));
    batch = Batch(ForwardMode::kTargetVerify, kLengths);
    batch.index(9, 1) = value;
    expect_report(batch, {});
  }
}

TEST_P(MetadataCheckTest, LargestCapacityIsNoLimit) {
  Batch batch(ForwardMode::kDecode, {4});
  batch.problem.capacity = kMax;
  for (int64_t p = 0; p < 4; ++p) batch.slot(0, p) = static_cast<int32_t>(kMax - 7 + p);
  batch.out_cache_loc[0] = kMax - 1;
  batch.index(0, 0) = kMax - 1;
  expect_report(batch, {});
  batch.index(0, 1) = kMax;
  expect_report(batch, report_of(MetadataFault::kIndexRange, 0, 1, kMax, kMax));
}

TEST_P(MetadataCheckTest, OptionalArraysMayBeAbsent) {
  const Values seq_len = {3}, pool_row = {0};
  const Tensor seq = Tensor::i32({1}, seq_len), row = Tensor::i32({1}, pool_row),
               table = Tensor::i32({1, 4}, {0, 1, 9, kGarbage});
  Tensor word(DType::kI32, {8});
  MetadataCheckTensors tensors;
  tensors.seq_len = seq;
  tensors.pool_row = row;
  tensors.req_to_token = table;
  tensors.error_word = word;
  MetadataCheckProblem problem;
  problem.max_requests = problem.max_rows = 1;
  problem.table_width = problem.page_size = 4;
  problem.capacity = 9;
  const auto plan = MetadataCheck::plan(problem, GetParam().device(2), GetParam().options());
  test::run(plan, tensors);
  EXPECT_EQ(word.values<int32_t>(), (Values{7, 0, 2, 9, 9, 1, 0, 0}));
}

TEST_P(MetadataCheckTest, ContentsOfAnyKindGiveTheReportOfTheReference) {
  test::Rng rng(37);
  const int32_t hostile[] = {kMin, -1, 0, 1, 3, 24, 25, 255, 256, kMax};
  const auto damage = [&](Values& values, double share) {
    for (int32_t& value : values) {
      if (rng.uniform() < share) value = hostile[rng.integer(0, 9)];
    }
  };
  std::vector<int> seen(11, 0);
  for (int repeat = 0; repeat < 300; ++repeat) {
    Values lengths(static_cast<size_t>(rng.integer(0, 40)));
    for (int32_t& len : lengths) len = static_cast<int32_t>(rng.integer(3, 24));
    Batch batch(kModes[repeat % 7], lengths, rng.integer(0, 1) == 0 ? 4 : 3, 0);
    batch.pad(rng.integer(0, 8), static_cast<int32_t>(rng.integer(1, 20)));
    Values* const arrays[] = {&batch.seq_len, &batch.pool_row,      &batch.ext_len,
                              &batch.table,   &batch.out_cache_loc, &batch.topk_indices};
    damage(*arrays[rng.integer(0, 5)], 0.1);
    if (repeat % 3 == 0) damage(*arrays[rng.integer(0, 5)], 0.02);
    if (is_decode(batch.problem.mode)) batch.delta = static_cast<int32_t>(rng.integer(-1, 1));
    const MetadataReport expected = batch.check({"ref"});
    ++seen[static_cast<size_t>(expected.fault)];
    expect_report(batch, expected);
  }
  EXPECT_GE(std::count_if(seen.begin(), seen.end(), [](int count) { return count > 0; }), 9)
      << "the batches reach most kinds of faults";
}

TEST_P(MetadataCheckTest, RunAllocatesNothing) {
  const Values lengths(64, 20);
  Batch batch(ForwardMode::kDecode, lengths);
  const Tensor seq = Tensor::i32({64}, batch.seq_len), row = Tensor::i32({64}, batch.pool_row),
               table = Tensor::i32({128, 24}, batch.table),
               store = Tensor::i32({67}, batch.out_cache_loc);
  Tensor word(DType::kI32, {8});
  MetadataCheckTensors tensors;
  tensors.seq_len = seq;
  tensors.pool_row = row;
  tensors.req_to_token = table;
  tensors.out_cache_loc = store;
  tensors.error_word = word;
  const auto plan = MetadataCheck::plan(batch.problem, GetParam().device(1), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST_P(MetadataCheckTest, RefusesWhatTheHostCanSee) {
  const auto text = [&](auto change_problem, auto change_tensors) -> std::string {
    Batch batch(ForwardMode::kDecode, {8, 8});
    const Tensor seq(DType::kI32, {2}), row(DType::kI32, {2}), table(DType::kI32, {4, 24}),
        store(DType::kI32, {5}), indices(DType::kI32, {5, 6});
    Tensor word(DType::kI32, {8});
    word.fill_bytes(0xAB);
    MetadataCheckTensors tensors;
    tensors.seq_len = seq;
    tensors.pool_row = row;
    tensors.req_to_token = table;
    tensors.out_cache_loc = store;
    tensors.topk_indices = indices;
    tensors.error_word = word;
    change_problem(batch.problem);
    change_tensors(tensors);
    try {
      test::run(MetadataCheck::plan(batch.problem, GetParam().device(1), GetParam().options()),
                tensors);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(word.values<uint8_t>(), std::vector<uint8_t>(32, 0xAB)) << "written before";
      return error.what();
    }
    return "accepted";
  };
  const auto no_change = [](auto&) {};
  const auto expect_problem = [&](auto change, const std::string& fragment) {
    EXPECT_NE(text(change, no_change).find(fragment), std::string::npos) << text(change, no_change);
  };
  const auto expect_tensors = [&](auto change, const std::string& fragment) {
    EXPECT_NE(text(no_change, change).find(fragment), std::string::npos) << text(no_change, change);
  };
  EXPECT_EQ(text(no_change, no_change), "accepted");
  using Problem = MetadataCheckProblem;
  using Tensors = MetadataCheckTensors;
  const Tensor three(DType::kI32, {3}), one_row(DType::kI32, {1, 6});
  expect_problem([](Problem& p) { p.mode = static_cast<ForwardMode>(9); }, "mode = 9");
  expect_problem([](Problem& p) { p.page_size = 257; }, "page_size = 257");
  expect_problem([](Problem& p) { p.table_width = 0; }, "table_width = 0");
  expect_problem([](Problem& p) { p.capacity = int64_t{1} << 31; }, "capacity = 2147483648");
  expect_problem([](Problem& p) { p.max_requests = 1; }, "seq_len.shape[0] = 2");
  expect_problem([](Problem& p) { p.max_rows = 1; }, "rows (requests * rows per request) = 2");
  expect_problem([](Problem& p) { p.topk = 0; }, "plan has topk = 0");
  expect_problem([](Problem& p) { p.topk = 5; }, "topk_indices = i32 [5, 6]");
  expect_problem([](Problem& p) { p.mode = ForwardMode::kMixed; }, "ext_len is missing");
  expect_tensors([&](Tensors& t) { t.ext_len = three; }, "ext_len is given, but mode decode");
  expect_tensors([&](Tensors& t) { t.seq_len = {}; }, "seq_len is missing");
  expect_tensors([&](Tensors& t) { t.pool_row = three; }, "pool_row = i32 [3]");
  expect_tensors([&](Tensors& t) { t.error_word = {}; }, "error_word is missing");
  expect_tensors([&](Tensors& t) { t.topk_indices = one_row; }, "expected at least 2 rows");
  expect_tensors([&](Tensors& t) { t.out_cache_loc.shape[0] = 1; }, "expected at least 2 rows");
  EXPECT_NE(text(
                [](Problem& p) {
                  p.mode = ForwardMode::kDraftExtendV2;
                  p.rows_per_request = 1;
                },
                [](Tensors& t) { t.kv_len_delta = 1; })
                .find("kv_len_delta = 1 in mode draft_extend_v2"),
            std::string::npos);
}

TEST(MetadataReportTest, SaysWhatIsWrong) {
  using enum MetadataFault;
  EXPECT_EQ(to_string(MetadataReport{}), "");
  EXPECT_EQ(to_string(report_of(kSlotRange, 3, 130, 9000, 8192, 2)),
            "request 3, position 130: slot 9000 is outside the capacity of 8192 (2 such slots)");
  EXPECT_EQ(to_string(report_of(kNegativeLength, 1, 0, -4, 0)),
            "request 1: length -4 is negative (1 such length)");
  EXPECT_EQ(to_string(report_of(kRowsOverLength, 1, 0, 5, 3)),
            "request 1: 5 rows are more than its length of 3 (1 such request)");
  EXPECT_EQ(to_string(report_of(kLengthOverWidth, 1, 0, 500, 300, 9)),
            "request 1: length 500 is over the table width of 300 (9 such lengths)");
  EXPECT_EQ(to_string(report_of(kNegativeRows, 1, 0, -1, 0)),
            "request 1: ext_len -1 is negative (1 such request)");
  EXPECT_EQ(to_string(report_of(kRowCount, 1, 0, 40, 32)),
            "request 1: 40 rows up to its end are more than the 32 of the arrays (1 such request)");
  EXPECT_EQ(to_string(report_of(kPoolRow, 1, 0, -1, 64, 2)),
            "request 1: pool row -1 is outside the 64 rows of req_to_token (2 such rows)");
  EXPECT_EQ(to_string(report_of(kSlotLayout, 1, 5, 40, 37)),
            "request 1, position 5: slot 40 is not slot 37, its place in the page of its first "
            "slot (1 such slot)");
  EXPECT_EQ(to_string(report_of(kStoreSlot, 7, 0, -2, 64)),
            "row 7: slot -2 of out_cache_loc is outside the capacity of 64 (1 such slot)");
  EXPECT_EQ(to_string(report_of(kIndexRange, 7, 3, 99, 64, 5)),
            "row 7, column 3: index 99 is outside the capacity of 64 (5 such indices)");
  EXPECT_EQ(to_string(report_of(static_cast<MetadataFault>(77), 0, 0, 0, 0)), "unknown fault 77");
}

TEST(MetadataReportTest, FaultsHaveNames) {
  EXPECT_EQ(to_string(MetadataFault::kNone), "none");
  EXPECT_EQ(to_string(MetadataFault::kNegativeLength), "negative_length");
  EXPECT_EQ(to_string(MetadataFault::kIndexRange), "index_range");
  EXPECT_EQ(to_string(static_cast<MetadataFault>(11)), "");
}

}  // namespace
}  // namespace fovea
