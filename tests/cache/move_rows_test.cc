#include "fovea/move_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "fovea/error.h"
#include "tests/cache/row_codec_case.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::kFarPages;
using test::kFormats;
using test::Tensor;
using test::width_of;

constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
constexpr int32_t kHighest = std::numeric_limits<int32_t>::max();

Tensor i32(const std::vector<int32_t>& values) {
  return Tensor::i32({static_cast<int64_t>(values.size())}, values);
}

// A pool of random bytes: `pages` pages of what page_size tokens need and `surplus` bytes more.
struct Pool {
  RowFormat format;
  int64_t page_size, width, num_pages, page_stride;
  std::vector<uint8_t> bytes;

  Pool(RowFormat row_format, int64_t tokens_per_page, int64_t pages, int64_t surplus, uint64_t seed)
      : format(row_format),
        page_size(tokens_per_page),
        width(width_of(row_format)),
        num_pages(pages),
        page_stride(page_bytes(row_format, tokens_per_page, width) + surplus) {
    test::Rng rng(seed);
    bytes.resize(static_cast<size_t>(pages * page_stride));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng.next());
  }

  TensorView view() { return make_tensor(bytes.data(), DType::kU8, {num_pages, page_stride}); }
  MoveRowsProblem problem(int64_t rows) const { return {rows, format, page_size, width}; }
  int64_t capacity() const { return num_pages * page_size; }

  // Where the bytes of a token are, by docs/formats.md.
  std::vector<int64_t> places(int64_t slot) const {
    const int64_t page = slot / page_size * page_stride, j = slot % page_size;
    std::vector<int64_t> result;
    const auto run = [&](int64_t first, int64_t count) {
      for (int64_t i = 0; i < count; ++i) result.push_back(page + first + i);
    };
    if (format == RowFormat::kI132) {
      run(j * width, width);
      run(page_size * width + 4 * j, 4);
    } else if (format == RowFormat::kV4) {
      run(576 * j, 576);
      run(page_size * 576 + 8 * j, 8);
    } else {
      const int64_t record = page_bytes(format, 1, width);
      run(j * record, record);
    }
    return result;
  }

  // The pool after the moves: every source is read from the pool before them.
  std::vector<uint8_t> after(const std::vector<int32_t>& src,
                             const std::vector<int32_t>& dst) const {
    std::vector<uint8_t> result = bytes;
    for (size_t i = 0; i < src.size(); ++i) {
      if (src[i] < 0 || src[i] >= capacity() || dst[i] < 0 || dst[i] >= capacity()) continue;
      const std::vector<int64_t> from = places(src[i]), to = places(dst[i]);
      for (size_t k = 0; k < from.size(); ++k) {
        result[static_cast<size_t>(to[k])] = bytes[static_cast<size_t>(from[k])];
      }
    }
    return result;
  }
};

class MoveRowsTest : public test::TargetTest {
 protected:
  void run(const MoveRowsProblem& problem, const MoveRowsTensors& tensors, int threads = 1) {
    const MoveRows plan = MoveRows::plan(problem, GetParam().device(threads), GetParam().options());
    HostBuffer workspace(plan.workspace_bytes());
    plan.run(tensors, workspace.workspace());
  }

  void expect_moves(Pool pool, const std::vector<int32_t>& src, const std::vector<int32_t>& dst,
                    int threads = 1) {
    const std::vector<uint8_t> expected = pool.after(src, dst);
    run(pool.problem(static_cast<int64_t>(src.size())), {pool.view(), i32(src), i32(dst)}, threads);
    ASSERT_TRUE(pool.bytes == expected)
        << to_string(pool.format) << " page " << pool.page_size << " threads " << threads;
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MoveRowsTest, testing::ValuesIn(test::targets_of("move_rows")),
                         test::target_name);

TEST_P(MoveRowsTest, ChainsSwapsAndCyclesReadEverySourceFirst) {
  const std::vector<std::pair<std::vector<int32_t>, std::vector<int32_t>>> moves = {
      {{1, 2, 3, 4, 5}, {0, 1, 2, 3, 4}},  // down
      {{0, 1, 2, 3, 4}, {1, 2, 3, 4, 5}},  // up
      {{4, 2, 0, 3, 1}, {5, 3, 1, 4, 2}},  // the same in another order
      {{0, 5}, {5, 0}},                    // swap over a page boundary
      {{0, 1, 2, 3, 4, 5}, {3, 4, 5, 0, 1, 2}},
      {{7, 3, 5}, {3, 5, 7}},     // cycle
      {{2, 2, 2}, {0, 1, 3}},     // one source
      {{6, 6}, {6, 0}},           // a source that stays
      {{8, 11, 14}, {8, 9, 10}},  // accepted nodes 0, 3 and 6 of a draft tree close ranks
      {{10, 9, 8, 11}, {9, 10, 11, 8}}};
  for (const RowFormat format : kFormats) {
    for (const int64_t page_size : {1, 2, 3, 64}) {
      for (const auto& [src, dst] : moves) {
        expect_moves(Pool(format, page_size, 16 / page_size + 1, 5, 1), src, dst);
      }
    }
  }
}

TEST_P(MoveRowsTest, RandomMovesFollowTheDefinitionForAnyThreadCount) {
  test::Rng rng(2);
  for (const RowFormat format : kFormats) {
    for (const int64_t page_size : {1, 7, 64, 256}) {
      const Pool pool(format, page_size, 700 / page_size + 1, page_size % 5, 3);
      const int64_t capacity = pool.capacity();
      // Destinations without repeats: a random order of all slots, cut off. Sources as they come.
      std::vector<int32_t> dst(static_cast<size_t>(capacity));
      for (size_t i = 0; i < dst.size(); ++i) dst[i] = static_cast<int32_t>(i);
      for (size_t i = dst.size() - 1; i > 0; --i) {
        std::swap(dst[i], dst[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(i)))]);
      }
      dst.resize(500);
      std::vector<int32_t> src;
      for (size_t i = 0; i < dst.size(); ++i) {
        src.push_back(static_cast<int32_t>(rng.integer(-20, capacity + 20)));
        if (rng.integer(0, 9) == 0) dst[i] = i % 2 == 0 ? -1 : static_cast<int32_t>(capacity);
      }
      for (const int threads : {1, 2, 3}) expect_moves(pool, src, dst, threads);
    }
  }
}

TEST_P(MoveRowsTest, PairsWithASlotOutsideThePoolMoveNothing) {
  for (const RowFormat format : kFormats) {
    Pool pool(format, 3, 2, 4, 4);
    const std::vector<uint8_t> before = pool.bytes;
    run(pool.problem(8), {pool.view(), i32({-1, 0, 6, 1, kLowest, 2, kHighest, 3}),
                          i32({0, -1, 1, 6, 2, kLowest, 3, kHighest})});
    EXPECT_TRUE(pool.bytes == before);
    // An outside pair does not hinder its neighbours.
    expect_moves(pool, {0, -1, 4}, {5, 2, 9});
  }
}

TEST_P(MoveRowsTest, RowsOfABf16PoolKeepWhatLiesBetweenThem) {
  Tensor memory(DType::kBf16, {6 * 22 + 1});
  for (size_t i = 0; i < memory.bytes().size() / 2; ++i) {
    memory.data<bf16_t>()[i].bits = static_cast<uint16_t>(i);
  }
  std::vector<bf16_t> expected = memory.values<bf16_t>();
  TensorView pool = make_tensor(memory.data<bf16_t>() + 1, DType::kBf16, {6, 19});
  pool.stride[0] = 22;
  run({3, RowFormat::kBf16, 0, 19}, {pool, i32({5, 0, 6}), i32({0, 5, 2})});
  for (size_t d = 0; d < 19; ++d) std::swap(expected[1 + d], expected[1 + 5 * 22 + d]);
  EXPECT_EQ(std::memcmp(memory.bytes().data(), expected.data(), memory.bytes().size()), 0);
}

TEST_P(MoveRowsTest, ReadsAndWritesOnlyThePool) {
  for (const RowFormat format : kFormats) {
    Pool pool(format, 2, 3, 0, 5);
    const std::vector<uint8_t> expected = pool.after({5, 0}, {0, 5});
    test::GuardedMemory memory(pool.bytes.size()), src(8), dst(8);
    std::memcpy(memory.data(), pool.bytes.data(), pool.bytes.size());
    const int32_t first[] = {5, 0}, last[] = {0, 5};
    std::memcpy(src.data(), first, 8);
    std::memcpy(dst.data(), last, 8);
    const MoveRowsProblem problem = pool.problem(2);
    const MoveRows plan = MoveRows::plan(problem, GetParam().device(1), GetParam().options());
    EXPECT_EQ(plan.workspace_bytes() % 64, 0u);
    test::GuardedMemory scratch(plan.workspace_bytes());
    plan.run({make_tensor(memory.data(), DType::kU8, {3, pool.page_stride}),
              make_tensor(static_cast<const void*>(src.data()), DType::kI32, {2}),
              make_tensor(static_cast<const void*>(dst.data()), DType::kI32, {2})},
             {scratch.data(), plan.workspace_bytes()});
    EXPECT_EQ(std::memcmp(memory.data(), expected.data(), expected.size()), 0);
  }
}

// Offsets beyond 2^31 and 2^32 bytes, as source and as destination; where 32-bit arithmetic would
// land nothing changes.
TEST_P(MoveRowsTest, KnownFault6PoolsBeyond32Bits) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  for (const auto& [format, page] : kFarPages) {
    const int64_t page_size = 64;
    const Pool near(format, page_size, 1, 0, 6);
    const int64_t bytes = near.page_stride, num_pages = page + 2;
    test::SparseMapping mapping(static_cast<size_t>(num_pages * bytes));
    auto* const memory = static_cast<uint8_t*>(mapping.data());
    std::memcpy(memory + page * bytes, near.bytes.data(), near.bytes.size());
    const auto first = static_cast<int32_t>(page * page_size);
    // Inside the far page, to the page after it, and to the start of the pool.
    const std::vector<int32_t> src = {first + 63, first, first + 17, first + 5};
    const std::vector<int32_t> dst = {first, first + 63, first + 64 + 2, 3};
    run({4, format, page_size, near.width},
        {make_tensor(memory, DType::kU8, {num_pages, bytes}), i32(src), i32(dst)});
    const std::vector<uint8_t> expected = near.after({63, 0}, {0, 63});
    EXPECT_EQ(std::memcmp(memory + page * bytes, expected.data(), expected.size()), 0)
        << to_string(format) << " page " << page;
    const std::vector<int64_t> to_next = near.places(2), to_start = near.places(3);
    const std::vector<int64_t> of_17 = near.places(17), of_5 = near.places(5);
    for (size_t k = 0; k < of_17.size(); ++k) {
      ASSERT_EQ(memory[(page + 1) * bytes + to_next[k]], near.bytes[static_cast<size_t>(of_17[k])]);
      ASSERT_EQ(memory[to_start[k]], near.bytes[static_cast<size_t>(of_5[k])]);
    }
    for (const int bits : {31, 32}) {
      const int64_t wrapped = (page * bytes) & ((int64_t{1} << bits) - 1);
      if (wrapped == page * bytes || wrapped < bytes) continue;  // page 0 was written
      EXPECT_EQ(std::count(memory + wrapped, memory + wrapped + bytes, 0), bytes);
    }
  }
}

TEST_P(MoveRowsTest, RunDoesNotAllocateAndTakesNoRows) {
  Pool pool(RowFormat::kV32, 64, 4, 0, 7);
  std::vector<int32_t> src, dst;
  for (int32_t i = 0; i < 200; ++i) {
    src.push_back(i + 7);
    dst.push_back(i);
  }
  const Tensor src_slots = i32(src), dst_slots = i32(dst), none(DType::kI32, {0});
  for (const int threads : {1, 2, 3}) {
    const MoveRows plan =
        MoveRows::plan(pool.problem(200), GetParam().device(threads), GetParam().options());
    EXPECT_EQ(plan.workspace_bytes(), (200u * 656 + 63) / 64 * 64);
    HostBuffer workspace(plan.workspace_bytes());
    const MoveRowsTensors tensors{pool.view(), src_slots, dst_slots};
    const MoveRowsTensors empty{pool.view(), none, none};
    for (int warm_up = 0; warm_up < 20; ++warm_up) plan.run(tensors, workspace.workspace());
    const test::AllocationCounter allocations;
    plan.run(tensors, workspace.workspace());
    EXPECT_EQ(allocations.count(), 0) << threads << " threads";
    const std::vector<uint8_t> before = pool.bytes;
    plan.run(empty, workspace.workspace());
    EXPECT_TRUE(pool.bytes == before);
  }
  EXPECT_EQ(MoveRows::plan(pool.problem(0), Device::cpu(1)).workspace_bytes(), 0u);
}

TEST(MoveRows, PlansRefuseWhatTheirTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const MoveRowsProblem& wrong :
       {MoveRowsProblem{-1, RowFormat::kV32, 64, 576}, MoveRowsProblem{1, RowFormat::kV32, 0, 576},
        MoveRowsProblem{1, RowFormat::kV32, 257, 576}, MoveRowsProblem{1, RowFormat::kV32, 64, 512},
        MoveRowsProblem{1, RowFormat::kF576, 64, 575}, MoveRowsProblem{1, RowFormat::kI132, 64, 0},
        MoveRowsProblem{1, RowFormat::kBf16, -1, 576},
        MoveRowsProblem{kHuge, RowFormat::kV32, 64, 576},
        MoveRowsProblem{kHuge / 656, RowFormat::kV32, 64, 576}}) {
    EXPECT_THROW(MoveRows::plan(wrong, cpu), Error);
  }
}

TEST(MoveRows, RunRefusesTensorsThatDoNotMatchThePlanBeforeItWrites) {
  Tensor pool(DType::kU8, {3, 2 * 656});
  pool.fill_bytes(0x11);
  pool.data<uint8_t>()[0] = 0x22;  // a move that took place would show
  const Tensor src = i32({0, 1}), dst = i32({2, 3}), three = i32({0, 1, 2});
  const MoveRows plan = MoveRows::plan({2, RowFormat::kV32, 2, 576}, Device::cpu(1));
  HostBuffer buffer(plan.workspace_bytes());
  const auto expect_refused = [&](const MoveRowsTensors& tensors) {
    EXPECT_THROW(plan.run(tensors, buffer.workspace()), Error);
  };
  expect_refused({pool, three, three});  // planned for 2 rows
  expect_refused({pool, src, i32({0})});
  expect_refused({pool, src, three});
  expect_refused({pool, Tensor(DType::kI64, {2}), dst});
  expect_refused({pool, src, Tensor(DType::kI64, {2})});
  expect_refused({pool, src, Tensor(DType::kI32, {2, 1})});
  expect_refused({pool, src, {}});
  expect_refused({{}, src, dst});
  expect_refused({Tensor(DType::kU8, {3, 2 * 656 - 1}), src, dst});
  expect_refused({Tensor(DType::kBf16, {6, 576}), src, dst});  // v32 is packed
  TensorView overlapping = pool.view();
  overlapping.stride[0] = 656;
  expect_refused({overlapping, src, dst});
  EXPECT_THROW(plan.run({pool, src, dst}, {}), Error);  // no workspace
  EXPECT_EQ(std::count(pool.bytes().begin(), pool.bytes().end(), 0x22), 1);
  EXPECT_NO_THROW(plan.run({pool, src, dst}, buffer.workspace()));
  EXPECT_EQ(std::count(pool.bytes().begin(), pool.bytes().end(), 0x22), 2);
}

}  // namespace
}  // namespace fovea
