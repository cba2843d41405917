#include "src/serving/selection_map.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/support/memory.h"

namespace fovea {
namespace {

using internal::list_slots;
using internal::map_selection;
using internal::SelectionMap;
using test::Tensor;
using Values = std::vector<int32_t>;

constexpr int32_t kBig = std::numeric_limits<int32_t>::max();

class SelectionMapTest : public testing::Test {
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
    map_selection(map, Device::cpu(2));
    return indices.values<int32_t>();
  }
};

TEST_F(SelectionMapTest, IdentityRowsAreThePositionsInEachForm) {
  EXPECT_EQ(run(IndexTransform::kLocal, {3, 0, 4, 2}),
            (Values{0, 1, 2, -1, -1, -1, -1, -1, 0, 1, 2, 3, 0, 1, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(run(IndexTransform::kPaged, {3, -7, 4, 2}),
            (Values{8, 9, 10, -1, -1, -1, -1, -1, 12, 13, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(
      run(IndexTransform::kRagged, {1, 2, 2, 2}),
      (Values{0, -1, -1, -1, 0, 1, -1, -1, 100, 101, -1, -1, kBig, kBig, -1, -1, -1, -1, -1, -1}));
}

TEST_F(SelectionMapTest, SuppliedPositionsGoThroughThePageTable) {
  const Values positions = {0, 4, 9, 11, 1, 2, -1, 12, 0, 5, 8, 10, 0, 1, 2, 3};
  EXPECT_EQ(run(IndexTransform::kPaged, {12, 12, 12, 12}, &positions),
            (Values{8, 20, 29, 31, 9, 10, -1, -1, 12, -1, 36, 38, -1, -1, -1, -1, -1, -1, -1, -1}));
}

TEST_F(SelectionMapTest, PositionsOutsideTheRowAreMasked) {
  const Values positions = {5, kBig, std::numeric_limits<int32_t>::min(), 6};
  EXPECT_EQ(run(IndexTransform::kPaged, {6}, &positions, 1), (Values{21, -1, -1, -1}));
  EXPECT_EQ(run(IndexTransform::kLocal, {6}, &positions, 1), (Values{5, -1, -1, -1}));
}

TEST_F(SelectionMapTest, RowsThatFitAreRebuiltNotReused) {
  // The supplied row was made when the request had three tokens; it has four now.
  const Values positions = {0, 1, 2, -1};
  EXPECT_EQ(run(IndexTransform::kLocal, {4}, &positions, 1), (Values{0, 1, 2, 3}));
}

TEST(ListSlots, ListsEveryTokenOnceAndStopsAtTheArray) {
  const Tensor table = Tensor::i32({3, 2}, {5, 2, -1, 0, kBig, 0});
  const Tensor indptr = Tensor::i32({4}, {0, 4, 6, 7});
  Tensor slots(DType::kI32, {8});
  slots.fill_bytes(0xAB);
  list_slots({table, indptr, 3, slots}, Device::cpu(2));
  Values expected = {15, 16, 17, 6, -1, -1, -1};
  expected.push_back(slots.data<int32_t>()[7]);
  EXPECT_EQ(slots.values<int32_t>(), expected);
  const Tensor past = Tensor::i32({4}, {0, 4, 6, 1000000});
  const Tensor narrow_table = Tensor::i32({3, 400000}, Values(1200000, 1));
  list_slots({narrow_table, past, 3, slots}, Device::cpu(1));  // 8 entries, not a million
}

}  // namespace
}  // namespace fovea
