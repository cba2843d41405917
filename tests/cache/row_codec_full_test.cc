#include "fovea/row_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/cache/row_codec_case.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::hostile_rows;
using test::pack;
using test::Tensor;
using test::unpack;

// Calls that write tens of megabytes take another path, past the caches. Their bytes are those of
// the reference too, also where rows start and end in the middle of a cache line, at every kind of
// slot.
class FullPackRowsTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, FullPackRowsTest,
                         testing::ValuesIn(test::targets_of("pack_rows")), test::target_name);
class FullUnpackRowsTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, FullUnpackRowsTest,
                         testing::ValuesIn(test::targets_of("unpack_rows")), test::target_name);

struct LargeCall {
  RowFormat format;
  int64_t width;
  int64_t num_rows;
};
// More than 32 MiB of records, and of bf16 rows, each.
constexpr LargeCall kLargeCalls[] = {
    {RowFormat::kV32, 576, 52'000},  {RowFormat::kF576, 576, 60'000},
    {RowFormat::kBf16, 576, 30'000}, {RowFormat::kBf16, 520, 34'000},
    {RowFormat::kBf16, 77, 250'000}, {RowFormat::kI132, 128, 270'000}};

Tensor large_source(const LargeCall& call) {
  const std::vector<bf16_t> rows = hostile_rows(call.format, 500, call.width);
  Tensor src(DType::kBf16, {call.num_rows, call.width});
  for (int64_t i = 0; i < call.num_rows; ++i) {
    std::memcpy(src.data<bf16_t>() + i * call.width, rows.data() + i % 500 * call.width,
                static_cast<size_t>(2 * call.width));
  }
  return src;
}

// Slots in random order, some of them outside the pool of num_rows tokens.
Tensor large_slots(int64_t num_rows) {
  std::vector<int32_t> slots(static_cast<size_t>(num_rows));
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  test::Rng rng(17);
  for (size_t i = slots.size() - 1; i > 0; --i) {
    std::swap(slots[i], slots[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(i)))]);
  }
  for (size_t i = 0; i < slots.size(); i += 100) slots[i] = i % 200 == 0 ? -1 : 1 << 30;
  return Tensor::i32({num_rows}, slots);
}

TEST_P(FullPackRowsTest, LargeCallsAgreeWithTheReferenceForAnyThreadCountAndAlignment) {
  for (const LargeCall& call : kLargeCalls) {
    const Tensor src = large_source(call), slots = large_slots(call.num_rows);
    const RowCodecProblem problem{call.num_rows, call.format,      50,
                                  call.width,    ScaleMode::kFp32, 0.37f};
    const int64_t pages = call.num_rows / 50;
    const int64_t bytes = page_bytes(call.format, 50, call.width);
    for (const int64_t offset : {0, 16, 1}) {
      const auto view_of = [&](Tensor& memory) {
        TensorView pool = make_tensor(memory.data<uint8_t>() + offset, DType::kU8, {pages, bytes});
        pool.stride[0] = bytes + 48;
        return pool;
      };
      Tensor expected(DType::kU8, {pages * (bytes + 48) + 16});
      pack(problem, {src, slots, view_of(expected)}, {"ref"});
      for (const int threads : {1, 2, 3}) {
        Tensor memory(DType::kU8, {pages * (bytes + 48) + 16});
        pack(problem, {src, slots, view_of(memory)}, GetParam().options(), threads);
        ASSERT_TRUE(memory.bytes() == expected.bytes())
            << to_string(call.format) << " offset " << offset << " threads " << threads;
        if (call.width != 576) continue;
        Tensor from_parts(DType::kU8, {pages * (bytes + 48) + 16});
        ConstTensorView latent = src.view(), rope = src.view();
        latent.shape[1] = 512;
        rope.shape[1] = 64;
        rope.data = src.data<bf16_t>() + 512;
        pack(problem, {latent, slots, view_of(from_parts), rope}, GetParam().options(), threads);
        ASSERT_TRUE(from_parts.bytes() == expected.bytes()) << to_string(call.format);
      }
    }
  }
}

TEST_P(FullUnpackRowsTest, LargeCallsAgreeWithTheReferenceForAnyThreadCountAndAlignment) {
  for (const LargeCall& call : kLargeCalls) {
    const int64_t pages = call.num_rows / 50;
    const Tensor slots = large_slots(call.num_rows);
    const RowCodecProblem problem{call.num_rows, call.format,      50,
                                  call.width,    ScaleMode::kFp32, 0.37f};
    Tensor pool(DType::kU8, {pages, page_bytes(call.format, 50, call.width)});
    pack(problem, {large_source(call), slots, pool}, {"ref"});
    const int64_t stride = (call.width + 31) / 32 * 32 + 32;
    for (const int64_t offset : {0, 3}) {
      const auto view_of = [&](HostBuffer& memory) {
        const auto elements = static_cast<size_t>(call.num_rows * stride + 3);
        memory.reserve(2 * elements);
        std::fill_n(static_cast<uint8_t*>(memory.data()), 2 * elements, uint8_t{0x33});
        TensorView out = make_tensor(static_cast<bf16_t*>(memory.data()) + offset, DType::kBf16,
                                     {call.num_rows, call.width});
        out.stride[0] = stride;
        return out;
      };
      HostBuffer expected;
      unpack(problem, {pool, slots, view_of(expected)}, {"ref"});
      for (const int threads : {1, 2, 3}) {
        HostBuffer memory;
        unpack(problem, {pool, slots, view_of(memory)}, GetParam().options(), threads);
        ASSERT_EQ(std::memcmp(memory.data(), expected.data(), expected.bytes()), 0)
            << to_string(call.format) << " offset " << offset << " threads " << threads;
      }
    }
  }
}

}  // namespace
}  // namespace fovea
