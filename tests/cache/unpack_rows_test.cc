#include "fovea/row_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/cache/row_codec_case.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::expect_far_slots_work;
using test::hostile_rows;
using test::kFarPages;
using test::kFormats;
using test::kModes;
using test::pack;
using test::read_float;
using test::Tensor;
using test::unpack;
using test::width_of;

class UnpackRowsTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, UnpackRowsTest,
                         testing::ValuesIn(test::targets_of("unpack_rows")), test::target_name);

TEST_P(UnpackRowsTest, KnownFault6PoolsBeyond32Bits) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  for (const auto& [format, page] : kFarPages) {
    expect_far_slots_work(format, page, {"ref"}, GetParam().options());
  }
}

TEST_P(UnpackRowsTest, KnownFault6RowsOfABf16PoolBeyond32Bits) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  const int64_t num_rows = (int64_t{1} << 33) / 1152 + 1;
  test::SparseMapping mapping(static_cast<size_t>(num_rows * 1152));
  const TensorView pool = make_tensor(mapping.data(), DType::kBf16, {num_rows, 576});
  const Tensor src = Tensor::bf16({1, 576}, hostile_rows(RowFormat::kBf16, 1, 576));
  const Tensor slots = Tensor::i32({1}, {static_cast<int32_t>(num_rows - 1)});
  pack({1, RowFormat::kBf16, 0, 576}, {src, slots, pool}, GetParam().options());
  Tensor out(DType::kBf16, {1, 576});
  unpack({1, RowFormat::kBf16, 0, 576}, {pool, slots, out}, GetParam().options());
  EXPECT_EQ(out.bytes(), src.bytes());
}

TEST_P(UnpackRowsTest, DecodesEveryCodeAtAnyScale) {
  test::Rng rng(14);
  std::vector<float> scales = {
      1.0f,      0x1p-13f, 1.2345e-3f, 0x1p120f,  7.57e35f,
      -3.0f,     0.0f,     1e-38f,     0x1p-149f, std::nextafter(1.0f, 2.0f),
      0x1p-127f, 0x1p127f};
  while (scales.size() < 40) scales.push_back(std::exp(10 * rng.normal()));
  const auto num_rows = static_cast<int64_t>(scales.size());
  Tensor pool(DType::kU8, {num_rows, 656}), out(DType::kBf16, {num_rows, 576});
  out.fill_bytes(0xFF);
  std::vector<int32_t> slot_values;
  for (int64_t i = 0; i < num_rows; ++i) {
    uint8_t* record = pool.data<uint8_t>() + 656 * i;
    // Tiles 0 and 1 go through all numbers of each sign, 2 and 3 through all codes, NaN included.
    for (int c = 0; c < 512; ++c) record[c] = static_cast<uint8_t>(c < 256 ? c % 128 : c);
    for (int c = 128; c < 256; ++c) record[c] = static_cast<uint8_t>(record[c] | 0x80);
    record[127] = record[255] = 1;
    for (int g = 0; g < 4; ++g) {
      std::memcpy(record + 512 + 4 * g, &scales[static_cast<size_t>((i + g) % num_rows)], 4);
    }
    for (int d = 0; d < 128; ++d) record[528 + d] = static_cast<uint8_t>(rng.next());
    slot_values.push_back(static_cast<int32_t>(i));
  }
  unpack({num_rows, RowFormat::kV32, 1, 576}, {pool, Tensor::i32({num_rows}, slot_values), out},
         GetParam().options());
  for (int64_t i = 0; i < num_rows; ++i) {
    const uint8_t* record = pool.data<uint8_t>() + 656 * i;
    const bf16_t* row = out.data<bf16_t>() + 576 * i;
    for (int64_t d = 0; d < 512; ++d) {
      const float value = e4m3_to_float(record[d]) * read_float(record + 512 + 4 * (d / 128));
      const uint16_t expected = std::isnan(value) ? uint16_t{0x7FC0} : bf16_from_float(value).bits;
      ASSERT_EQ(row[d].bits, expected) << "row " << i << " channel " << d;
    }
    ASSERT_EQ(std::memcmp(row + 512, record + 528, 128), 0);  // rope, whatever its bits
  }
}

TEST_P(UnpackRowsTest, DecodesEveryCodeOfV4AtEveryScale) {
  // Row i: tile g has the scale byte (i + 37 g) mod 256; codes of every value; the pad byte and the
  // rope hold anything.
  Tensor pool(DType::kU8, {256, 584}), out(DType::kBf16, {256, 512});
  out.fill_bytes(0xFF);
  test::Rng rng(17);
  std::vector<int32_t> slots(256);
  for (int32_t i = 0; i < 256; ++i) {
    slots[static_cast<size_t>(i)] = i;
    uint8_t* row = pool.data<uint8_t>() + 584 * i;
    for (int d = 0; d < 584; ++d) row[d] = static_cast<uint8_t>(rng.next());
    for (int d = 0; d < 448; ++d) row[d] = static_cast<uint8_t>(d * 5 + i);
    for (int g = 0; g < 7; ++g) row[576 + g] = static_cast<uint8_t>(i + 37 * g);
  }
  unpack({256, RowFormat::kV4, 1, 512}, {pool, Tensor::i32({256}, slots), out},
         GetParam().options());
  for (int64_t i = 0; i < 256; ++i) {
    const uint8_t* row = pool.data<uint8_t>() + 584 * i;
    const bf16_t* found = out.data<bf16_t>() + 512 * i;
    for (int64_t d = 0; d < 448; ++d) {
      const int code = row[576 + d / 64];
      const float scale =
          code == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, code - 127);
      const float value = e4m3_to_float(row[d]) * scale;
      const uint16_t expected = std::isnan(value) ? uint16_t{0x7FC0} : bf16_from_float(value).bits;
      ASSERT_EQ(found[d].bits, expected) << "row " << i << " channel " << d;
    }
    ASSERT_EQ(std::memcmp(found + 448, row + 448, 128), 0);  // rope, whatever its bits
  }
}

TEST_P(UnpackRowsTest, DecodesEveryCodeOfF576AtTheScaleOfTheCache) {
  Tensor pool(DType::kU8, {2, 576}), out(DType::kBf16, {2, 576});
  // The first row has no NaN code, the second one has.
  for (size_t d = 0; d < 1152; ++d) {
    const auto code = static_cast<uint8_t>(d * 3);
    pool.data<uint8_t>()[d] = d < 576 && code % 128 == 127 ? uint8_t{1} : code;
  }
  for (const float k_scale : {1.0f, 0.5f, 2.0f, 1.2345e-3f, 0x1p-127f, 0x1p127f, 3e38f}) {
    out.fill_bytes(0xFF);
    unpack({2, RowFormat::kF576, 1, 576, ScaleMode::kFp32, k_scale},
           {pool, Tensor::i32({2}, {1, 0}), out}, GetParam().options());
    for (size_t d = 0; d < 1152; ++d) {
      const float value = e4m3_to_float(pool.bytes()[(d + 576) % 1152]) * k_scale;
      const uint16_t expected = std::isnan(value) ? uint16_t{0x7FC0} : bf16_from_float(value).bits;
      ASSERT_EQ(out.data<bf16_t>()[d].bits, expected) << "element " << d << " scale " << k_scale;
    }
  }
}

TEST_P(UnpackRowsTest, SlotsOutsideThePoolGiveZerosAndRepeatsAreFine) {
  std::vector<int32_t> slot_values = {-1, 4, std::numeric_limits<int32_t>::min(),
                                      std::numeric_limits<int32_t>::max()};
  for (int32_t i = 0; i < 50; ++i) slot_values.push_back(i % 4);  // more rows than the pool has
  const auto num_rows = static_cast<int64_t>(slot_values.size());
  const Tensor slots = Tensor::i32({num_rows}, slot_values);
  for (const RowFormat format : kFormats) {
    const int64_t width = width_of(format);
    const RowCodecProblem problem{num_rows, format, 2, width};
    Tensor pool(DType::kU8, {2, page_bytes(format, 2, width)});
    pack(problem,
         {Tensor::bf16({4, width}, hostile_rows(format, 4, width)), Tensor::i32({4}, {0, 1, 2, 3}),
          pool},
         {"ref"});
    Tensor out(DType::kBf16, {num_rows, width});
    out.fill_bytes(0xFF);
    unpack(problem, {pool, slots, out}, GetParam().options());
    const auto row_bytes = static_cast<size_t>(2 * width);
    for (size_t i = 0; i < slot_values.size(); ++i) {
      const uint8_t* row = out.data<uint8_t>() + i * row_bytes;
      if (i < 4) {
        EXPECT_EQ(std::vector<uint8_t>(row, row + row_bytes), std::vector<uint8_t>(row_bytes, 0));
      } else if (i >= 8) {
        EXPECT_EQ(std::memcmp(row, row - 4 * row_bytes, row_bytes), 0);
      }
    }
  }
}

// Fault 5: bytes of other slots (NaN codes and scales) have no influence.
TEST_P(UnpackRowsTest, KnownFault5UnwrittenSlotsHaveNoInfluence) {
  for (const RowFormat format : kFormats) {
    const int64_t width = width_of(format);
    const RowCodecProblem problem{13, format, 4, width};
    const Tensor src = Tensor::bf16({13, width}, hostile_rows(format, 13, width));
    std::vector<int32_t> slot_values;
    for (int32_t i = 0; i < 13; ++i) slot_values.push_back(i);  // 13 rows: the last page holds one
    const Tensor slots = Tensor::i32({13}, slot_values);
    Tensor clean;
    for (const int fill : {0x00, 0x7F, 0xFF}) {
      Tensor pool(DType::kU8, {5, page_bytes(format, 4, width)}), out(DType::kBf16, {13, width});
      pool.fill_bytes(static_cast<uint8_t>(fill));
      pack(problem, {src, slots, pool}, {"ref"});
      unpack(problem, {pool, slots, out}, GetParam().options());
      if (fill == 0) clean = out;
      EXPECT_EQ(out.bytes(), clean.bytes());
    }
  }
}

TEST_P(UnpackRowsTest, ReadsAndWritesOnlyItsRows) {
  for (const RowFormat format : kFormats) {
    const int64_t width = width_of(format);
    const int64_t bytes = page_bytes(format, 2, width);
    Tensor pool(DType::kU8, {2, bytes});
    const RowCodecProblem problem{4, format, 2, width};
    pack(problem,
         {Tensor::bf16({4, width}, hostile_rows(format, 4, width)), Tensor::i32({4}, {0, 1, 2, 3}),
          pool},
         {"ref"});
    test::GuardedMemory pool_memory(pool.bytes().size());
    std::memcpy(pool_memory.data(), pool.bytes().data(), pool.bytes().size());
    test::GuardedMemory out_memory(static_cast<size_t>(4 * width * 2));
    const Tensor slots = Tensor::i32({4}, {3, 0, 2, 3});
    unpack(problem,
           {make_tensor(static_cast<const void*>(pool_memory.data()), DType::kU8, {2, bytes}),
            slots, make_tensor(out_memory.data(), DType::kBf16, {4, width})},
           GetParam().options());
    Tensor expected(DType::kBf16, {4, width});
    unpack(problem, {pool, slots, expected}, {"ref"});
    EXPECT_EQ(std::memcmp(out_memory.data(), expected.bytes().data(), expected.bytes().size()), 0);
  }
}

TEST_P(UnpackRowsTest, AgreesWithTheReferenceForAnyThreadCountStrideAndAlignment) {
  const int64_t num_rows = 100;
  test::Rng rng(15);
  for (const RowFormat format : kFormats) {
    const int64_t width = width_of(format);
    const int64_t bytes = page_bytes(format, 7, width);
    Tensor memory(DType::kU8, {20 * (bytes + 5) + 1});
    for (size_t i = 0; i < memory.bytes().size(); ++i) {
      memory.data<uint8_t>()[i] = static_cast<uint8_t>(rng.next());  // any bytes are a pool
    }
    ConstTensorView pool =
        make_tensor(static_cast<const void*>(memory.data<uint8_t>() + 1), DType::kU8, {20, bytes});
    pool.stride[0] = bytes + 5;
    std::vector<int32_t> slot_values;
    for (int64_t i = 0; i < num_rows; ++i) {
      slot_values.push_back(static_cast<int32_t>(rng.integer(-5, 145)));
    }
    const Tensor slots = Tensor::i32({num_rows}, slot_values);
    const RowCodecProblem problem{num_rows, format, 7, width, ScaleMode::kFp32, 0.37f};
    const auto view_of = [&](Tensor& tensor) {
      TensorView out = make_tensor(tensor.data<bf16_t>() + 1, DType::kBf16, {num_rows, width});
      out.stride[0] = width + 3;
      return out;
    };
    Tensor expected(DType::kBf16, {num_rows * (width + 3) + 1});
    unpack(problem, {pool, slots, view_of(expected)}, {"ref"});
    for (const int threads : {1, 2, 3}) {
      Tensor out(DType::kBf16, {num_rows * (width + 3) + 1});
      unpack(problem, {pool, slots, view_of(out)}, GetParam().options(), threads);
      ASSERT_EQ(out.bytes(), expected.bytes()) << to_string(format) << " threads " << threads;
    }
  }
}

TEST_P(UnpackRowsTest, PackingWhatWasUnpackedChangesNothing) {
  for (const RowFormat format : kFormats) {
    const int64_t width = width_of(format);
    test::Rng rng(16);
    const Tensor src = Tensor::bf16({50, width}, rng.bf16_normals(50 * width, 3.0f));
    std::vector<int32_t> slot_values;
    for (int32_t i = 0; i < 50; ++i) slot_values.push_back(i);
    const Tensor slots = Tensor::i32({50}, slot_values);
    for (const ScaleMode mode : kModes) {
      const float k_scale = mode == ScaleMode::kPow2 ? 2.0f : 0.37f;
      const RowCodecProblem problem{50, format, 50, width, mode, k_scale};
      Tensor pool(DType::kU8, {1, page_bytes(format, 50, width)}), again = pool;
      Tensor once(DType::kBf16, {50, width}), twice = once;
      pack(problem, {src, slots, pool}, GetParam().options());
      unpack(problem, {pool, slots, once}, GetParam().options());
      pack(problem, {once, slots, again}, GetParam().options());
      unpack(problem, {again, slots, twice}, GetParam().options());
      EXPECT_EQ(once.bytes(), twice.bytes()) << to_string(format);
    }
  }
}

TEST_P(UnpackRowsTest, RunDoesNotAllocateAndTakesNoRows) {
  const Tensor pool(DType::kU8, {4, 64 * 656});
  const Tensor slots(DType::kI32, {200});
  Tensor out(DType::kBf16, {200, 576}), no_rows(DType::kBf16, {0, 576});
  const Tensor no_slots(DType::kI32, {0});
  for (const int threads : {1, 2, 3}) {
    const UnpackRows plan = UnpackRows::plan({200, RowFormat::kV32, 64, 576},
                                             GetParam().device(threads), GetParam().options());
    EXPECT_EQ(plan.workspace_bytes(), 0u);
    for (int warm_up = 0; warm_up < 20; ++warm_up) test::run(plan, {pool, slots, out});
    const UnpackRowsTensors tensors{pool, slots, out};
    const UnpackRowsTensors empty{pool, no_slots, no_rows};
    const test::AllocationCounter allocations;
    test::run(plan, tensors);
    test::run(plan, empty);
    EXPECT_EQ(allocations.count(), 0) << threads << " threads";
  }
}

}  // namespace
}  // namespace fovea
