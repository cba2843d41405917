#include "src/serving/selection_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "fovea/stream.h"
#include "src/serving/step_lengths.h"
#include "src/serving/step_rows.h"
#include "tests/support/devices.h"
#include "tests/support/memory.h"

namespace fovea {
namespace {

using internal::list_slots;
using internal::map_selection;
using internal::SelectionMap;
using test::Tensor;
using Values = std::vector<int32_t>;

constexpr int32_t kBig = std::numeric_limits<int32_t>::max();

class SelectionMapTest : public test::DeviceSuite {
 protected:
  // Two requests with pages of 4 tokens: [2 5 7] and [3 -1 9]; rows 0, 1 of request 0, row 2 of
  // request 1, row 3 of none.
  Values run(IndexTransform transform, const Values& row_len, const Values* positions = nullptr,
             int64_t rows = 5) {
    Tensor indices(DType::kI32, {rows, 4});
    indices.fill_bytes(0xAB);
    const auto live = static_cast<int64_t>(row_len.size());
    const Tensor len = Tensor::i32({live}, row_len);
    const Tensor table = Tensor::i32({2, 3}, {2, 5, 7, 3, -1, 9});
    const Tensor request = Tensor::i32({4}, {0, 0, 1, -1});
    const Tensor offset = Tensor::i32({4}, {0, 0, 100, kBig});
    Tensor given;
    SelectionMap map;
    map.transform = transform;
    map.page_size = 4;
    map.row_len = len;
    map.page_table = table;
    map.row_to_request = slice_rows(request.view(), 0, live);
    map.row_offset = slice_rows(offset.view(), 0, live);
    map.indices = indices;
    if (positions != nullptr) {
      given = Tensor::i32({live, 4}, *positions);
      map.positions = given;
    }
    map_selection(map, device_);
    synchronize(device_);
    return indices.values<int32_t>();
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, SelectionMapTest, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(SelectionMapTest, IdentityRowsAreThePositionsInEachForm) {
  EXPECT_EQ(run(IndexTransform::kLocal, {3, 0, 4, 2}),
            (Values{0, 1, 2, -1, -1, -1, -1, -1, 0, 1, 2, 3, 0, 1, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(run(IndexTransform::kPaged, {3, -7, 4, 2}),
            (Values{8, 9, 10, -1, -1, -1, -1, -1, 12, 13, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(
      run(IndexTransform::kRagged, {1, 2, 2, 2}),
      (Values{0, -1, -1, -1, 0, 1, -1, -1, 100, 101, -1, -1, kBig, kBig, -1, -1, -1, -1, -1, -1}));
}

TEST_P(SelectionMapTest, SuppliedPositionsGoThroughThePageTable) {
  const Values positions = {0, 4, 9, 11, 1, 2, -1, 12, 0, 5, 8, 10, 0, 1, 2, 3};
  EXPECT_EQ(run(IndexTransform::kPaged, {12, 12, 12, 12}, &positions),
            (Values{8, 20, 29, 31, 9, 10, -1, -1, 12, -1, 36, 38, -1, -1, -1, -1, -1, -1, -1, -1}));
}

TEST_P(SelectionMapTest, PositionsOutsideTheRowAreMasked) {
  const Values positions = {5, kBig, std::numeric_limits<int32_t>::min(), 6};
  EXPECT_EQ(run(IndexTransform::kPaged, {6}, &positions, 1), (Values{21, -1, -1, -1}));
  EXPECT_EQ(run(IndexTransform::kLocal, {6}, &positions, 1), (Values{5, -1, -1, -1}));
}

TEST_P(SelectionMapTest, RowsThatFitAreRebuiltNotReused) {
  // The supplied row was made when the request had three tokens; it has four now.
  const Values positions = {0, 1, 2, -1};
  EXPECT_EQ(run(IndexTransform::kLocal, {4}, &positions, 1), (Values{0, 1, 2, 3}));
}

// A selection may be mapped where it lies.
TEST_P(SelectionMapTest, InPlace) {
  Tensor indices = Tensor::i32({2, 4}, {5, 2, 11, -1, 0, 1, 2, 3});
  const Tensor len = Tensor::i32({1}, {12}), table = Tensor::i32({1, 3}, {2, 5, 7});
  const Tensor request = Tensor::i32({1}, {0});
  SelectionMap map;
  map.page_size = 4;
  map.positions = indices;
  map.row_len = len;
  map.page_table = table;
  map.row_to_request = request;
  map.indices = indices;
  map_selection(map, device_);
  synchronize(device_);
  EXPECT_EQ(indices.values<int32_t>(), (Values{21, 10, 31, -1, -1, -1, -1, -1}));
}

TEST_P(SelectionMapTest, ListsEveryTokenOnceAndStopsAtTheArray) {
  const Tensor table = Tensor::i32({3, 2}, {5, 2, -1, 0, kBig, 0});
  const Tensor indptr = Tensor::i32({4}, {0, 4, 6, 7});
  Tensor slots(DType::kI32, {8});
  slots.fill_bytes(0xAB);
  list_slots({table, indptr, 3, slots}, device_);
  synchronize(device_);
  Values expected = {15, 16, 17, 6, -1, -1, -1};
  expected.push_back(slots.data<int32_t>()[7]);
  EXPECT_EQ(slots.values<int32_t>(), expected);
  const Tensor past = Tensor::i32({4}, {0, 4, 6, 1000000});
  const Tensor wide_table = Tensor::i32({3, 400000}, Values(1200000, 1));
  list_slots({wide_table, past, 3, slots}, device_);  // 8 entries, not a million
  // A request without keys, and keys past the table.
  const Tensor gap = Tensor::i32({4}, {0, 2, 2, 8}), narrow = Tensor::i32({3, 1}, {1, 2, 3});
  list_slots({narrow, gap, 3, slots}, device_);
  synchronize(device_);
  EXPECT_EQ(slots.values<int32_t>(), (Values{3, 4, 9, 10, 11, -1, -1, -1}));
}

TEST_P(SelectionMapTest, RowsOfNoRequestLoseTheirSlots) {
  const int64_t rows = 300;
  Values request, slots, expected;
  for (int32_t row = 0; row < rows; ++row) {
    request.push_back(row % 3 == 2 ? -1 : row / 7);
    slots.push_back(row * 5 - 1);
    expected.push_back(row % 3 == 2 ? -1 : row * 5 - 1);
  }
  const Tensor given = Tensor::i32({rows}, slots), of = Tensor::i32({rows}, request);
  Tensor masked(DType::kI32, {rows - 10});
  internal::mask_slots(of, given, masked, device_);
  synchronize(device_);
  expected.resize(rows - 10);
  EXPECT_EQ(masked.values<int32_t>(), expected);
}

class StepRowsTest : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, StepRowsTest, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

// More than the parameters of a launch hold, and host memory that is gone when the kernel runs.
TEST_P(StepRowsTest, HostEntriesArrive) {
  Tensor put(DType::kI32, {2502}), picked(DType::kI32, {2501});
  put.fill_bytes(0xAB);
  const Values table = {7, -1, kBig};
  const Tensor from = Tensor::i32({3}, table);
  {
    Values values, indices;
    for (int32_t i = 0; i < 2501; ++i) {
      values.push_back(i * 3 - 5);
      indices.push_back(i % 3);
    }
    internal::put_entries(values, put, device_, {});
    internal::pick_entries(from, indices, picked, device_, {});
    std::fill(values.begin(), values.end(), 0);
  }
  internal::put_entries({}, put, device_, {});
  synchronize(device_);
  for (int32_t i = 0; i < 2501; ++i) {
    ASSERT_EQ(put.data<int32_t>()[i], i * 3 - 5);
    ASSERT_EQ(picked.data<int32_t>()[i], table[static_cast<size_t>(i % 3)]);
  }
  EXPECT_EQ(put.data<uint8_t>()[2501 * 4], 0xAB) << "behind the last entry";
}

TEST_P(StepRowsTest, OnlyRowsOfNoRequestAreCleared) {
  for (const int32_t live : {0, 3, 5}) {
    const Tensor q_indptr = Tensor::i32({3}, {0, 1, live});
    Tensor out(DType::kBf16, {5, 2, 128}), lse(DType::kF32, {5, 2});
    out.fill_bytes(0xFF);
    lse.fill_bytes(0xFF);
    internal::clear_padding({q_indptr, out, lse}, device_, {});
    synchronize(device_);
    for (int64_t i = 0; i < 5 * 2 * 128; ++i) {
      ASSERT_EQ(out.data<uint16_t>()[i], i < live * 2 * 128 ? 0xFFFF : 0) << live;
    }
    for (int64_t i = 0; i < 5 * 2; ++i) {
      EXPECT_EQ(lse.data<float>()[i] == -std::numeric_limits<float>::infinity(), i >= live * 2);
    }
  }
}

// What a profile of a GPU counts by.
TEST(StepLengths, AreThoseOfTheHostOrBounds) {
  DsaConfig config;
  config.topk = 4;
  config.table_width = 100;
  config.rows_per_request = 3;
  const Tensor two = Tensor::i32({2}, {0, 0});
  const Values seq_len = {9, 3}, ext_len = {2, 1};
  ForwardBatch batch;
  batch.mode = ForwardMode::kExtend;
  batch.seq_len = two;
  internal::StepShape shape{.num_requests = 2, .num_rows = 3, .padded_rows = 5};
  internal::StepLengths lengths(2, 6);
  const auto expect = [&](const Values& kv_len, const Values& row_len, const Values& selected) {
    lengths.fill(config, batch, shape, 0);
    const auto entries = [](const TensorView& view, size_t count) {
      const auto* const data = static_cast<const int32_t*>(view.data);
      return Values(data, data + count);
    };
    EXPECT_EQ(entries(lengths.fields().kv_len, 2), kv_len);
    EXPECT_EQ(entries(lengths.fields().row_len, row_len.size()), row_len);
    EXPECT_EQ(entries(lengths.fields().topk_length, selected.size()), selected);
    EXPECT_EQ(lengths.fields().row_len.shape[0], shape.num_rows);
  };
  expect({100, 100}, {99, 100, 100}, {4, 4, 4});
  batch.host_seq_len = seq_len;
  batch.host_ext_len = ext_len;
  expect({9, 3}, {8, 9, 3}, {4, 4, 3});
  batch.mode = ForwardMode::kTargetVerify;
  batch.host_ext_len = {};
  shape.num_rows = shape.padded_rows = 6;
  expect({12, 6}, {10, 11, 12, 4, 5, 6}, {4, 4, 4, 4, 4, 4});
  batch.mode = ForwardMode::kDraftExtend;  // without host lengths: at most three rows each
  batch.host_seq_len = {};
  shape.num_rows = 4;
  expect({100, 100}, {98, 99, 100, 100}, {4, 4, 4, 4});
}

}  // namespace
}  // namespace fovea
