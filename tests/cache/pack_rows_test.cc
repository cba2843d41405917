#include "fovea/row_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "tests/cache/row_codec_case.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::expect_far_slots_work;
using test::expected_tile;
using test::hostile_rows;
using test::kFarPages;
using test::kFormats;
using test::kModes;
using test::nearest_e4m3;
using test::pack;
using test::read_float;
using test::Tensor;
using test::unpack;
using test::width_of;

class PackRowsTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, PackRowsTest, testing::ValuesIn(test::targets_of("pack_rows")),
                         test::target_name);

TEST_P(PackRowsTest, V32BytesFollowTheDefinition) {
  const int64_t num_rows = 40;
  const std::vector<bf16_t> rows = hostile_rows(RowFormat::kV32, num_rows, 576);
  const Tensor src = Tensor::bf16({num_rows, 576}, rows);
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < 40; ++i) slot_values.push_back(39 - i);
  const Tensor slots = Tensor::i32({num_rows}, slot_values);
  for (const ScaleMode mode : kModes) {
    Tensor pool(DType::kU8, {8, 5 * 656});
    pack({num_rows, RowFormat::kV32, 5, 576, mode}, {src, slots, pool}, GetParam().options());
    for (int64_t i = 0; i < num_rows; ++i) {
      const uint8_t* record = pool.data<uint8_t>() + slot_values[static_cast<size_t>(i)] * 656;
      const bf16_t* x = rows.data() + i * 576;
      for (int64_t g = 0; g < 4; ++g) {
        const auto tile = expected_tile(x + 128 * g, 128, RowFormat::kV32, mode);
        ASSERT_EQ(read_float(record + 512 + 4 * g), tile.scale) << "row " << i << " tile " << g;
        ASSERT_EQ(std::vector<uint8_t>(record + 128 * g, record + 128 * (g + 1)), tile.codes)
            << "row " << i << " tile " << g;
      }
      ASSERT_EQ(std::memcmp(record + 528, x + 512, 128), 0);
    }
  }
}

TEST_P(PackRowsTest, V4KeepsDataFirstAndScalesLastInEveryPage) {
  const int64_t num_rows = 40;
  const std::vector<bf16_t> rows = hostile_rows(RowFormat::kV4, num_rows, 512);
  const Tensor src = Tensor::bf16({num_rows, 512}, rows);
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < 40; ++i) slot_values.push_back(39 - i);
  const Tensor slots = Tensor::i32({num_rows}, slot_values);
  for (const int64_t page_size : {1, 5, 40}) {
    for (const ScaleMode mode : kModes) {  // changes nothing
      Tensor pool(DType::kU8, {num_rows / page_size, page_size * 584});
      pool.fill_bytes(0xEE);
      pack({num_rows, RowFormat::kV4, page_size, 512, mode}, {src, slots, pool},
           GetParam().options());
      for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t slot = slot_values[static_cast<size_t>(i)];
        const uint8_t* page = pool.data<uint8_t>() + slot / page_size * page_size * 584;
        const uint8_t* data = page + slot % page_size * 576;
        const uint8_t* scales = page + page_size * 576 + slot % page_size * 8;
        const bf16_t* x = rows.data() + i * 512;
        for (int64_t g = 0; g < 7; ++g) {
          const auto tile = expected_tile(x + 64 * g, 64, RowFormat::kV4, ScaleMode::kPow2);
          ASSERT_EQ(std::ldexp(1.0f, scales[g] - 127), tile.scale) << "row " << i << " tile " << g;
          ASSERT_EQ(std::vector<uint8_t>(data + 64 * g, data + 64 * (g + 1)), tile.codes)
              << "row " << i << " tile " << g;
        }
        ASSERT_EQ(scales[7], 0);
        ASSERT_EQ(std::memcmp(data + 448, x + 448, 128), 0);
      }
    }
  }
  // A zero tile has the smallest scale, 2^-13.
  Tensor pool(DType::kU8, {1, 584});
  pack({1, RowFormat::kV4, 1, 512}, {Tensor(DType::kBf16, {1, 512}), Tensor::i32({1}, {0}), pool},
       GetParam().options());
  EXPECT_EQ(int{pool.bytes()[576]}, 114);
}

TEST_P(PackRowsTest, I132KeepsCodesFirstAndScalesLastInEveryPage) {
  const int64_t num_rows = 60;
  for (const int64_t width : {128, 64, 36}) {
    const std::vector<bf16_t> rows = hostile_rows(RowFormat::kI132, num_rows, width);
    const Tensor src = Tensor::bf16({num_rows, width}, rows);
    std::vector<int32_t> slot_values;
    for (int32_t i = 0; i < num_rows; ++i) slot_values.push_back((i * 7) % 60);
    const Tensor slots = Tensor::i32({num_rows}, slot_values);
    for (const int64_t page_size : {1, 3, 64}) {
      for (const ScaleMode mode : kModes) {
        const int64_t pages = (num_rows + page_size - 1) / page_size;
        const int64_t bytes = page_size * (width + 4);
        Tensor pool(DType::kU8, {pages, bytes});
        pack({num_rows, RowFormat::kI132, page_size, width, mode}, {src, slots, pool},
             GetParam().options());
        for (int64_t i = 0; i < num_rows; ++i) {
          const int64_t slot = slot_values[static_cast<size_t>(i)];
          const uint8_t* page = pool.data<uint8_t>() + slot / page_size * bytes;
          const int64_t j = slot % page_size;
          const auto tile = expected_tile(rows.data() + i * width, width, RowFormat::kI132, mode);
          ASSERT_EQ(read_float(page + page_size * width + 4 * j), tile.scale) << "row " << i;
          ASSERT_EQ(std::vector<uint8_t>(page + j * width, page + (j + 1) * width), tile.codes)
              << "row " << i;
        }
      }
    }
  }
}

// Every bf16 pattern, at scales that have an exact reciprocal, that have none, and whose quotients
// overflow or are subnormal.
TEST_P(PackRowsTest, F576BytesFollowTheDefinition) {
  const int64_t num_rows = 114;  // 65536 / 576, rounded up
  std::vector<bf16_t> rows(static_cast<size_t>(num_rows * 576));
  for (size_t i = 0; i < rows.size(); ++i) rows[i].bits = static_cast<uint16_t>(i * 5);
  const Tensor src = Tensor::bf16({num_rows, 576}, rows);
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < 114; ++i) slot_values.push_back(113 - i);
  const Tensor slots = Tensor::i32({num_rows}, slot_values);
  for (const float k_scale : {1.0f, 0.5f, 2.0f, 0.0371f, 0x1p-126f, 0x1p-149f, 0x1p127f,
                              std::numeric_limits<float>::max()}) {
    Tensor pool(DType::kU8, {38, 3 * 576});
    pack({num_rows, RowFormat::kF576, 3, 576, ScaleMode::kFp32, k_scale}, {src, slots, pool},
         GetParam().options());
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t at = (113 - i / 576) * 576 + i % 576;
      const float x = bf16_to_float(rows[i]);
      ASSERT_EQ(int{pool.bytes()[at]}, int{nearest_e4m3(x / k_scale)}) << x << " / " << k_scale;
    }
  }
}

TEST_P(PackRowsTest, Bf16RowsAreCopiedBitForBitIntoBothKindsOfPool) {
  std::vector<bf16_t> rows(4 * 19);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].bits = static_cast<uint16_t>(0x7F70 + i);  // runs into infinity and signalling NaN
  }
  const Tensor src = Tensor::bf16({4, 19}, rows);
  const Tensor slots = Tensor::i32({4}, {5, 0, 3, 2});
  Tensor paged(DType::kU8, {3, 2 * 38}), flat(DType::kBf16, {6, 19});
  pack({4, RowFormat::kBf16, 2, 19}, {src, slots, paged}, GetParam().options());
  pack({4, RowFormat::kBf16, 0, 19}, {src, slots, flat}, GetParam().options());
  EXPECT_EQ(paged.bytes(), flat.bytes());
  const int32_t row_of_slot[] = {1, -1, 3, 2, -1, 0};
  for (size_t slot = 0; slot < 6; ++slot) {
    for (size_t d = 0; d < 19; ++d) {
      const auto row = row_of_slot[slot];
      const uint16_t expected = row < 0 ? 0 : rows[static_cast<size_t>(row) * 19 + d].bits;
      EXPECT_EQ(flat.data<bf16_t>()[slot * 19 + d].bits, expected);
    }
  }
}

// Fault 17: a zero group among normal ones, 1e-30, maxima 896 and 900, saturation, -0.0.
TEST_P(PackRowsTest, KnownFault17StoresOfFp8) {
  std::vector<bf16_t> row(576, bf16_from_float(1));
  std::fill_n(row.begin(), 128, bf16_from_float(0));
  row[5] = bf16_from_float(-0.0f);
  std::fill_n(row.begin() + 128, 128, bf16_from_float(1e-30f));
  row[256] = bf16_from_float(896);
  row[384] = bf16_from_float(900);
  const Tensor src = Tensor::bf16({1, 576}, row);
  const Tensor slots = Tensor::i32({1}, {0});
  for (const ScaleMode mode : kModes) {
    const RowCodecProblem problem{1, RowFormat::kV32, 1, 576, mode};
    Tensor pool(DType::kU8, {1, 656}), out(DType::kBf16, {1, 576});
    pool.fill_bytes(0xFF);
    pack(problem, {src, slots, pool}, GetParam().options());
    const bool pow2 = mode == ScaleMode::kPow2;
    const float bf16_900 = bf16_to_float(bf16_from_float(900));
    EXPECT_EQ(read_float(pool.data<uint8_t>() + 512), pow2 ? 0x1p-13f : 1.0f);
    EXPECT_EQ(read_float(pool.data<uint8_t>() + 520), 2.0f);
    EXPECT_EQ(read_float(pool.data<uint8_t>() + 524), pow2 ? 4.0f : bf16_900 / 448.0f);
    unpack(problem, {pool, slots, out}, {"ref"});
    for (size_t d = 0; d < 576; ++d) {
      const float expected = bf16_to_float(row[d]);
      const float actual = bf16_to_float(out.data<bf16_t>()[d]);
      ASSERT_TRUE(std::isfinite(actual)) << d;
      if (d < 128) {
        EXPECT_EQ(actual, 0.0f);
      }
      if (d >= 128 && d < 256 && pow2) continue;  // below the scale floor: may decode to 0
      EXPECT_LE(std::fabs(actual - expected), std::fabs(expected) / 16) << d;
    }
  }
}

// The same fault at a fixed scale: +-1e4 saturate, zeros keep their sign, nothing becomes NaN but
// NaN.
TEST_P(PackRowsTest, KnownFault17StoresOfFp8AtAFixedScale) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<bf16_t> row(576, bf16_from_float(1e-30f));
  const std::vector<std::pair<float, int>> cases = {
      {1e4f, 0x7E},      {-1e4f, 0xFE}, {kInfinity, 0x7E}, {-kInfinity, 0xFE},
      {0.0f, 0x00},      {-0.0f, 0x80}, {448, 0x7E},       {std::nanf(""), 0x7F},
      {464, 0x7E},       {480, 0x7E},   {0x1p-10f, 0x00},  // a tie with zero, which is even
      {0x1.8p-9f, 0x02}, {1.0f, 0x38},  {-1.0625f, 0xB8},  {1.1875f, 0x3A}};
  for (size_t i = 0; i < cases.size(); ++i) row[40 * i] = bf16_from_float(cases[i].first);
  const Tensor src = Tensor::bf16({1, 576}, row);
  Tensor pool(DType::kU8, {1, 576});
  pool.fill_bytes(0xFF);
  pack({1, RowFormat::kF576, 1, 576}, {src, Tensor::i32({1}, {0}), pool}, GetParam().options());
  for (size_t d = 0; d < 576; ++d) {
    const bool listed = d % 40 == 0 && d / 40 < cases.size();
    EXPECT_EQ(int{pool.bytes()[d]}, listed ? cases[d / 40].second : 0) << "channel " << d;
  }
}

TEST_P(PackRowsTest, SkipsSlotsOutsideThePoolAndTouchesNothingElse) {
  const std::vector<int32_t> slot_values = {
      -1, 6, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(), 12, 3};
  for (const RowFormat format : kFormats) {
    const int64_t width = width_of(format);
    const Tensor src = Tensor::bf16({6, width}, hostile_rows(format, 6, width));
    const Tensor slots = Tensor::i32({6}, slot_values);
    // 4 pages of 3 tokens; 13 surplus bytes in a page and 21 between pages, all of them 0xA5.
    const int64_t bytes = page_bytes(format, 3, width);
    Tensor memory(DType::kU8, {4, bytes + 34});
    memory.fill_bytes(0xA5);
    TensorView pool = memory.view();
    pool.shape[1] = bytes + 13;
    pack({6, format, 3, width}, {src, slots, pool}, GetParam().options());
    for (size_t i = 0; i < memory.bytes().size(); ++i) {
      bool owned = false;  // by one of the two live slots
      for (const int64_t slot : {6, 3}) {
        const int64_t in_page = static_cast<int64_t>(i) - slot / 3 * (bytes + 34);
        const int64_t j = slot % 3;
        const auto within = [&](int64_t from, int64_t count) {
          return in_page >= from && in_page < from + count;
        };
        owned =
            owned ||
            (format == RowFormat::kI132 ? within(j * width, width) || within(3 * width + 4 * j, 4)
             : format == RowFormat::kV4 ? within(j * 576, 576) || within(3 * 576 + 8 * j, 8)
                                        : within(j * bytes / 3, bytes / 3));
      }
      if (!owned) {
        ASSERT_EQ(memory.bytes()[i], 0xA5) << "byte " << i << " of " << to_string(format);
      }
    }
  }
}

TEST_P(PackRowsTest, AgreesWithTheReferenceForAnyThreadCountStrideAndAlignment) {
  const int64_t num_rows = 100;
  test::Rng rng(13);
  for (const RowFormat format : kFormats) {
    const int64_t width = width_of(format);
    std::vector<bf16_t> values = hostile_rows(format, num_rows, width + 3);
    const Tensor wide = Tensor::bf16({num_rows, width + 3}, values);
    // The row starts one element in, and the rows are 3 elements longer than the view.
    ConstTensorView src = wide.view();
    src.data = wide.data<bf16_t>() + 1;
    src.shape[1] = width;
    for (const int64_t page_size : {1, 2, 61, 64, 256}) {
      const int64_t pages = 2 * num_rows / page_size + 1;
      std::vector<int32_t> free_slots;
      for (int64_t slot = 0; slot < pages * page_size; ++slot) {
        free_slots.push_back(static_cast<int32_t>(slot));
      }
      std::vector<int32_t> slot_values;
      for (int64_t i = 0; i < num_rows; ++i) {
        const auto pick =
            static_cast<size_t>(rng.integer(i, static_cast<int64_t>(free_slots.size()) - 1));
        std::swap(free_slots[static_cast<size_t>(i)], free_slots[pick]);
        slot_values.push_back(i % 9 == 4 ? -1 : free_slots[static_cast<size_t>(i)]);
      }
      const Tensor slots = Tensor::i32({num_rows}, slot_values);
      const int64_t bytes = page_bytes(format, page_size, width);
      for (const ScaleMode mode : kModes) {
        // Of the two scales of f576 one has an exact reciprocal.
        const float k_scale = mode == ScaleMode::kPow2 ? 0.5f : 0.37f;
        const RowCodecProblem problem{num_rows, format, page_size, width, mode, k_scale};
        // An odd stride and an odd start: nothing in the pool is aligned.
        Tensor expected(DType::kU8, {pages * (bytes + 1) + 1});
        const auto view_of = [&](Tensor& memory) {
          TensorView pool = make_tensor(memory.data<uint8_t>() + 1, DType::kU8, {pages, bytes});
          pool.stride[0] = bytes + 1;
          return pool;
        };
        pack(problem, {src, slots, view_of(expected)}, {"ref"});
        for (const int threads : {1, 2, 3}) {
          Tensor memory(DType::kU8, {pages * (bytes + 1) + 1});
          pack(problem, {src, slots, view_of(memory)}, GetParam().options(), threads);
          ASSERT_EQ(memory.bytes(), expected.bytes())
              << to_string(format) << " page " << page_size << " threads " << threads;
        }
      }
    }
  }
}

// Latent and rope where the model left them, each a slice of something wider: the bytes are those
// of the concatenation.
TEST_P(PackRowsTest, SeparateRopePartGivesTheBytesOfTheConcatenation) {
  const int64_t num_rows = 70;
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < 70; ++i) slot_values.push_back(i % 9 == 4 ? -1 : (i * 29) % 75);
  const Tensor slots = Tensor::i32({num_rows}, slot_values);
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576}) {
    const std::vector<bf16_t> rows = hostile_rows(format, num_rows, 576);
    // Rope first here, and odd elements between: nothing is aligned, nothing is adjacent. What
    // belongs to no view is NaN.
    const int64_t stride = 64 + 3 + 512 + 2;
    Tensor memory(DType::kBf16, {num_rows * stride});
    memory.fill_bytes(0xFF);
    for (int64_t i = 0; i < num_rows; ++i) {
      const bf16_t* const row = rows.data() + i * 576;
      bf16_t* const to = memory.data<bf16_t>() + i * stride;
      std::copy_n(row + 512, 64, to + 1);
      std::copy_n(row, 512, to + 67);
    }
    const auto part = [&](int64_t first, int64_t width) {
      ConstTensorView view = make_tensor(static_cast<const void*>(memory.data<bf16_t>() + first),
                                         DType::kBf16, {num_rows, width});
      view.stride[0] = stride;
      return view;
    };
    for (const ScaleMode mode : kModes) {
      const float k_scale = mode == ScaleMode::kPow2 ? 0.5f : 0.37f;
      const RowCodecProblem problem{num_rows, format, 5, 576, mode, k_scale};
      Tensor expected(DType::kU8, {15, page_bytes(format, 5, 576) + 7});
      expected.fill_bytes(0x5A);
      const Tensor before = expected;
      pack(problem, {Tensor::bf16({num_rows, 576}, rows), slots, expected}, {"ref"});
      ASSERT_NE(expected.bytes(), before.bytes());
      for (const int threads : {1, 3}) {
        Tensor pool = before;
        pack(problem, {part(67, 512), slots, pool, part(1, 64)}, GetParam().options(), threads);
        ASSERT_EQ(pool.bytes(), expected.bytes()) << to_string(format) << ' ' << threads;
      }
    }
  }
}

TEST_P(PackRowsTest, SeparateRopePartGoesIntoABf16PoolOfRows) {
  const std::vector<bf16_t> rows = hostile_rows(RowFormat::kBf16, 3, 576);
  const Tensor whole = Tensor::bf16({3, 576}, rows), slots = Tensor::i32({3}, {4, 9, 0});
  ConstTensorView latent = whole.view(), rope = whole.view();
  latent.shape[1] = 512;
  rope.shape[1] = 64;
  rope.data = whole.data<bf16_t>() + 512;
  Tensor pool(DType::kBf16, {6, 576}), expected = pool;
  pack({3, RowFormat::kBf16, 0, 576}, {latent, slots, pool, rope}, GetParam().options());
  pack({3, RowFormat::kBf16, 0, 576}, {whole, slots, expected}, {"ref"});
  EXPECT_EQ(pool.bytes(), expected.bytes());
}

TEST_P(PackRowsTest, ReadsOnlyTheTwoPartsOfARow) {
  const std::vector<bf16_t> rows = hostile_rows(RowFormat::kV32, 1, 576);
  test::GuardedMemory latent(1024), rope(128);
  std::memcpy(latent.data(), rows.data(), 1024);
  std::memcpy(rope.data(), rows.data() + 512, 128);
  const Tensor slots = Tensor::i32({1}, {0});
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576}) {
    Tensor pool(DType::kU8, {1, page_bytes(format, 1, 576)}), expected = pool;
    pack({1, format, 1, 576},
         {make_tensor(static_cast<const void*>(latent.data()), DType::kBf16, {1, 512}), slots, pool,
          make_tensor(static_cast<const void*>(rope.data()), DType::kBf16, {1, 64})},
         GetParam().options());
    pack({1, format, 1, 576}, {Tensor::bf16({1, 576}, rows), slots, expected}, {"ref"});
    EXPECT_EQ(pool.bytes(), expected.bytes());
  }
}

TEST_P(PackRowsTest, ReadsAndWritesOnlyItsRows) {
  for (const RowFormat format : kFormats) {
    const int64_t width = width_of(format);
    test::GuardedMemory src_memory(static_cast<size_t>(3 * width * 2));
    const std::vector<bf16_t> rows = hostile_rows(format, 3, width);
    std::memcpy(src_memory.data(), rows.data(), rows.size() * 2);
    const int64_t bytes = page_bytes(format, 2, width);
    test::GuardedMemory pool_memory(static_cast<size_t>(2 * bytes));
    std::memset(pool_memory.data(), 0, static_cast<size_t>(2 * bytes));
    test::GuardedMemory slot_memory(12);
    const std::vector<int32_t> slots = {3, 2, 1};
    std::memcpy(slot_memory.data(), slots.data(), 12);
    pack({3, format, 2, width},
         {make_tensor(static_cast<const void*>(src_memory.data()), DType::kBf16, {3, width}),
          make_tensor(static_cast<const void*>(slot_memory.data()), DType::kI32, {3}),
          make_tensor(pool_memory.data(), DType::kU8, {2, bytes})},
         GetParam().options());
    Tensor expected(DType::kU8, {2, bytes});
    pack({3, format, 2, width}, {Tensor::bf16({3, width}, rows), Tensor::i32({3}, slots), expected},
         {"ref"});
    EXPECT_EQ(std::memcmp(pool_memory.data(), expected.bytes().data(), expected.bytes().size()), 0);
  }
}

TEST_P(PackRowsTest, KnownFault6PoolsBeyond32Bits) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  for (const auto& [format, page] : kFarPages) {
    expect_far_slots_work(format, page, GetParam().options(), {"ref"});
  }
}

TEST_P(PackRowsTest, RunDoesNotAllocateAndTakesNoRows) {
  Tensor pool(DType::kU8, {4, 64 * 656});
  const Tensor src = Tensor::bf16({200, 576}, hostile_rows(RowFormat::kV32, 200, 576));
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < 200; ++i) slot_values.push_back(i);
  const Tensor slots = Tensor::i32({200}, slot_values);
  const Tensor no_rows(DType::kBf16, {0, 576}), no_slots(DType::kI32, {0});
  for (const int threads : {1, 2, 3}) {
    const PackRows plan = PackRows::plan({200, RowFormat::kV32, 64, 576},
                                         GetParam().device(threads), GetParam().options());
    EXPECT_EQ(plan.workspace_bytes(), 0u);
    for (int warm_up = 0; warm_up < 20; ++warm_up) test::run(plan, {src, slots, pool});
    const std::vector<uint8_t> before = pool.bytes();
    const PackRowsTensors tensors{src, slots, pool};
    const PackRowsTensors empty{no_rows, no_slots, pool};
    const test::AllocationCounter allocations;
    test::run(plan, tensors);
    test::run(plan, empty);
    EXPECT_EQ(allocations.count(), 0) << threads << " threads";
    EXPECT_EQ(pool.bytes(), before);
  }
}

}  // namespace
}  // namespace fovea
