#include "fovea/request_table.h"

#include <gtest/gtest.h>

#include <vector>

#include "fovea/error.h"

namespace fovea {
namespace {

std::vector<int32_t> row_of(const RequestTable& table, int32_t row) {
  const ConstTensorView view = table.view();
  const auto* slots = static_cast<const int32_t*>(view.data) + row * view.stride[0];
  return {slots, slots + table.width()};
}

template <class Call>
ErrorCode error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;  // nothing was thrown
}

TEST(RequestTable, StartsWithZerosAndHandsOutEveryRowButTheFirst) {
  RequestTable table(4, 5);
  EXPECT_EQ(table.num_free(), 3);
  EXPECT_EQ(table.view().dtype, DType::kI32);
  EXPECT_EQ(table.view().shape[0], 4);
  EXPECT_EQ(table.view().shape[1], 5);
  std::vector<bool> seen(4);
  for (int i = 0; i < 3; ++i) {
    const int32_t row = table.acquire();
    ASSERT_TRUE(row >= 1 && row < 4);
    EXPECT_FALSE(seen[static_cast<size_t>(row)]);
    seen[static_cast<size_t>(row)] = true;
    EXPECT_EQ(row_of(table, row), std::vector<int32_t>(5, 0));
  }
  EXPECT_EQ(error_of([&] { table.acquire(); }), ErrorCode::kOutOfMemory);
  EXPECT_EQ(table.num_free(), 0);
}

TEST(RequestTable, WritesTheSlotsOfThePagesOnAnyRange) {
  const std::vector<int32_t> pages = {2, 5, 7};
  // Request A of the worked examples: page size 4, pages 2, 5, 7, ten positions.
  const std::vector<int32_t> whole = {8, 9, 10, 11, 20, 21, 22, 23, 28, 29, 0, 0};
  for (int64_t begin = 0; begin <= 10; ++begin) {
    for (int64_t end = begin; end <= 10; ++end) {
      RequestTable table(2, 12);
      const int32_t row = table.acquire();
      table.write(row, pages, 4, begin, end);
      std::vector<int32_t> expected(12, 0);
      for (int64_t p = begin; p < end; ++p) {
        expected[static_cast<size_t>(p)] = whole[static_cast<size_t>(p)];
      }
      EXPECT_EQ(row_of(table, row), expected) << begin << ".." << end;
      EXPECT_EQ(row_of(table, 0), std::vector<int32_t>(12, 0));
    }
  }
}

TEST(RequestTable, PageSizeOneAndPagesThatAreNotLookedAt) {
  RequestTable table(2, 6);
  const int32_t row = table.acquire();
  table.write(row, std::vector<int32_t>{-1, -1, 9, 3}, 1, 2, 4);
  EXPECT_EQ(row_of(table, row), (std::vector<int32_t>{0, 0, 9, 3, 0, 0}));
}

TEST(RequestTable, AReleasedRowIsZeroAgain) {
  RequestTable table(3, 4);
  const int32_t row = table.acquire();
  const int32_t other = table.acquire();
  table.write(row, std::vector<int32_t>{1, 2}, 2, 0, 4);
  table.write(other, std::vector<int32_t>{3, 4}, 2, 0, 4);
  table.release(row);
  EXPECT_EQ(row_of(table, row), std::vector<int32_t>(4, 0));
  EXPECT_EQ(row_of(table, other), (std::vector<int32_t>{6, 7, 8, 9}));
  EXPECT_EQ(table.acquire(), row);
  EXPECT_EQ(row_of(table, row), std::vector<int32_t>(4, 0));
}

TEST(RequestTable, RefusesWrongCallsAndChangesNothing) {
  constexpr auto kInvalid = ErrorCode::kInvalidArgument;
  EXPECT_EQ(error_of([] { RequestTable(0, 4); }), kInvalid);
  EXPECT_EQ(error_of([] { RequestTable(4, 0); }), kInvalid);
  EXPECT_EQ(error_of([] { RequestTable(int64_t{1} << 30, int64_t{1} << 31); }), kInvalid);
  EXPECT_EQ(error_of([] { RequestTable((int64_t{1} << 31) - 1, (int64_t{1} << 31) - 1); }),
            ErrorCode::kOutOfMemory);
  RequestTable table(4, 8);
  const int32_t row = table.acquire();
  const std::vector<int32_t> pages = {1, 2};
  EXPECT_EQ(error_of([&] { table.write(row + 1, pages, 4, 0, 8); }), kInvalid);
  EXPECT_EQ(error_of([&] { table.write(0, pages, 4, 0, 8); }), kInvalid);
  EXPECT_EQ(error_of([&] { table.write(-1, pages, 4, 0, 8); }), kInvalid);
  EXPECT_EQ(error_of([&] { table.write(row, pages, 4, 0, 9); }), kInvalid);  // past the width
  EXPECT_EQ(error_of([&] { table.write(row, pages, 3, 0, 7); }), kInvalid);  // pages too few
  EXPECT_EQ(error_of([&] { table.write(row, pages, 4, 5, 4); }), kInvalid);
  EXPECT_EQ(error_of([&] { table.write(row, pages, 4, -1, 4); }), kInvalid);
  EXPECT_EQ(error_of([&] { table.write(row, pages, 0, 0, 4); }), kInvalid);
  EXPECT_EQ(error_of([&] { table.write(row, pages, 257, 0, 4); }), kInvalid);
  EXPECT_EQ(error_of([&] { table.write(row, std::vector<int32_t>{1, -1}, 4, 0, 8); }), kInvalid);
  EXPECT_EQ(error_of([&] {
              table.write(row, std::vector<int32_t>{1, 1 << 29}, 4, 0, 8);
            }),
            kInvalid);
  EXPECT_EQ(row_of(table, row), std::vector<int32_t>(8, 0));
  EXPECT_EQ(error_of([&] { table.release(0); }), kInvalid);
  EXPECT_EQ(error_of([&] { table.release(4); }), kInvalid);
  table.release(row);
  EXPECT_EQ(error_of([&] { table.release(row); }), kInvalid);
  EXPECT_EQ(table.num_free(), 3);
}

}  // namespace
}  // namespace fovea
