#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "fovea/error.h"
#include "fovea/move_rows.h"
#include "fovea/row_codec.h"
#include "tests/cache/row_codec_case.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

// r512: rows of codes whose scales are a tensor beside the pool.
namespace fovea {
namespace {

using test::hostile_rows;
using test::nearest_e4m3;
using test::pack;
using test::Tensor;
using test::unpack;

constexpr DType kScaleTypes[] = {DType::kF32, DType::kBf16};

class PackR512Test : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, PackR512Test, testing::ValuesIn(test::targets_of("pack_rows")),
                         test::target_name);
class UnpackR512Test : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, UnpackR512Test,
                         testing::ValuesIn(test::targets_of("unpack_rows")), test::target_name);

RowCodecProblem problem_of(int64_t rows, int64_t page_size) {
  return {rows, RowFormat::kR512, page_size, 512};
}

// Scales of 2 elements a slot, of which the view takes the first.
struct Scales {
  explicit Scales(DType scale_type, int64_t slots)
      : memory(scale_type, {slots, 2}), type(scale_type) {
    memory.fill_bytes(0xEE);
  }
  TensorView view() {
    TensorView scales = memory.view();
    scales.shape[1] = 1;
    return scales;
  }
  float at(int64_t slot) {
    if (type == DType::kF32) return memory.data<float>()[2 * slot];
    return bf16_to_float(memory.data<bf16_t>()[2 * slot]);
  }
  void set(int64_t slot, float value) {
    if (type == DType::kF32)
      memory.data<float>()[2 * slot] = value;
    else
      memory.data<bf16_t>()[2 * slot] = bf16_from_float(value);
  }
  Tensor memory;
  DType type;
};

float largest_finite(const bf16_t* x) {
  float largest = 0;
  for (int64_t d = 0; d < 512; ++d) {
    const float value = std::fabs(bf16_to_float(x[d]));
    if (std::isfinite(value)) largest = std::max(largest, value);
  }
  return largest;
}

// Rows of one magnitude each, zero, tiny and huge ones among them, then tiles of every kind.
std::vector<bf16_t> rows_of_all_sizes(int64_t count) {
  std::vector<bf16_t> rows = hostile_rows(RowFormat::kR512, count, 512);
  test::Rng rng(71);
  for (int64_t i = 0; i < count / 2; ++i) {
    const float size = i == 0 ? 0.0f : std::ldexp(1.3f, static_cast<int>(8 * i) - 120);
    const std::vector<bf16_t> row = rng.bf16_normals(512, size);
    std::copy(row.begin(), row.end(), rows.begin() + i * 512);
  }
  return rows;
}

TEST_P(PackR512Test, CodesAreQuotientsByTheScaleAsItIsStored) {
  const int64_t num_rows = 40;
  const std::vector<bf16_t> rows = rows_of_all_sizes(num_rows);
  const Tensor src = Tensor::bf16({num_rows, 512}, rows);
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < 40; ++i) slot_values.push_back(39 - i);
  const Tensor slots = Tensor::i32({num_rows}, slot_values);
  for (const DType type : kScaleTypes) {
    for (const int64_t page_size : {1, 5, 40}) {
      Tensor pool(DType::kU8, {num_rows / page_size, page_size * 512 + 3});
      Scales scales(type, num_rows);
      pack(problem_of(num_rows, page_size), {src, slots, pool, {}, scales.view()},
           GetParam().options());
      for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t slot = slot_values[static_cast<size_t>(i)];
        const bf16_t* x = rows.data() + i * 512;
        float scale = std::max(largest_finite(x), 1e-12f) / 448.0f;
        if (type == DType::kBf16) scale = bf16_to_float(bf16_from_float(scale));
        ASSERT_EQ(scales.at(slot), scale) << "row " << i;
        const uint8_t* codes = pool.data<uint8_t>() + slot / page_size * (page_size * 512 + 3) +
                               slot % page_size * 512;
        for (int64_t d = 0; d < 512; ++d) {
          ASSERT_EQ(int{codes[d]}, int{nearest_e4m3(bf16_to_float(x[d]) / scale)})
              << "row " << i << " channel " << d;
        }
      }
    }
  }
}

TEST_P(PackR512Test, SlotsOutsideThePoolAndNeighboursKeepTheirBytes) {
  const std::vector<int32_t> slot_values = {
      -1, 4, 6, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(), 1};
  const Tensor src = Tensor::bf16({6, 512}, rows_of_all_sizes(6));
  for (const DType type : kScaleTypes) {
    for (const int threads : {1, 3}) {
      Tensor pool(DType::kU8, {2, 3 * 512 + 7});
      pool.fill_bytes(0xA5);
      Scales scales(type, 6);
      pack(problem_of(6, 3), {src, Tensor::i32({6}, slot_values), pool, {}, scales.view()},
           GetParam().options(), threads);
      for (size_t i = 0; i < pool.bytes().size(); ++i) {
        const size_t page = i / (3 * 512 + 7), offset = i % (3 * 512 + 7) / 512;
        if (page == 1 && offset == 1) continue;  // slot 4
        if (page == 0 && offset == 1) continue;  // slot 1
        ASSERT_EQ(pool.bytes()[i], 0xA5) << i;
      }
      const size_t bytes = 2 * size_of(type);
      for (size_t i = 0; i < scales.memory.bytes().size(); ++i) {
        const bool owned = (i / bytes == 4 || i / bytes == 1) && i % bytes < bytes / 2;
        if (!owned) {
          ASSERT_EQ(scales.memory.bytes()[i], 0xEE) << i;
        }
      }
    }
  }
}

TEST_P(PackR512Test, ReadsAndWritesOnlyItsRows) {
  const std::vector<bf16_t> rows = rows_of_all_sizes(3);
  test::GuardedMemory src(3 * 1024), pool(4 * 512), scales(4 * 4), slots(12);
  std::memcpy(src.data(), rows.data(), 3 * 1024);
  const int32_t slot_values[] = {3, 0, 2};
  std::memcpy(slots.data(), slot_values, 12);
  pack(problem_of(3, 2),
       {make_tensor(static_cast<const void*>(src.data()), DType::kBf16, {3, 512}),
        make_tensor(static_cast<const void*>(slots.data()), DType::kI32, {3}),
        make_tensor(pool.data(), DType::kU8, {2, 1024}),
        {},
        make_tensor(scales.data(), DType::kF32, {4, 1})},
       GetParam().options());
  EXPECT_EQ(static_cast<float*>(scales.data())[3],
            std::max(largest_finite(rows.data()), 1e-12f) / 448.0f);
}

TEST_P(UnpackR512Test, DecodesEveryCodeAtAnyScale) {
  std::vector<float> values = {
      1.0f,         0x1p-13f, 1.2345e-3f, 0x1p120f, -3.0f,
      0.0f,         1e-38f,   0x1p-127f,  0x1p127f, std::numeric_limits<float>::infinity(),
      std::nanf("")};
  const auto num_rows = static_cast<int64_t>(values.size());
  Tensor pool(DType::kU8, {num_rows, 512});
  for (int64_t i = 0; i < num_rows * 512; ++i)
    pool.data<uint8_t>()[i] = static_cast<uint8_t>(i % 512 + i / 512);
  std::vector<int32_t> slots;
  for (int64_t i = 0; i < num_rows; ++i) slots.push_back(static_cast<int32_t>(i));
  slots.insert(slots.end(), {-1, static_cast<int32_t>(num_rows), 2});
  const auto count = static_cast<int64_t>(slots.size());
  for (const DType type : kScaleTypes) {
    Scales scales(type, num_rows);
    for (int64_t i = 0; i < num_rows; ++i) scales.set(i, values[static_cast<size_t>(i)]);
    for (const int threads : {1, 3}) {
      Tensor out(DType::kBf16, {count, 512});
      out.fill_bytes(0xFF);
      unpack(problem_of(count, 1), {pool, Tensor::i32({count}, slots), out, scales.view()},
             GetParam().options(), threads);
      for (int64_t i = 0; i < count; ++i) {
        const int32_t slot = slots[static_cast<size_t>(i)];
        for (int64_t d = 0; d < 512; ++d) {
          uint16_t expected = 0;
          if (slot >= 0 && slot < num_rows) {
            const float value =
                e4m3_to_float(pool.data<uint8_t>()[slot * 512 + d]) * scales.at(slot);
            expected = std::isnan(value) ? uint16_t{0x7FC0} : bf16_from_float(value).bits;
          }
          ASSERT_EQ(out.data<bf16_t>()[i * 512 + d].bits, expected) << slot << " " << d;
        }
      }
    }
  }
}

TEST_P(UnpackR512Test, PackedRowsComeBackWithinHalfAStep) {
  const int64_t num_rows = 64;
  test::Rng rng(72);
  const std::vector<bf16_t> rows = rng.bf16_normals(num_rows * 512, 0.7f);
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < 64; ++i) slot_values.push_back((i * 37) % 64);
  const Tensor src = Tensor::bf16({num_rows, 512}, rows), slots = Tensor::i32({64}, slot_values);
  for (const DType type : kScaleTypes) {
    Tensor pool(DType::kU8, {1, 64 * 512}), out(DType::kBf16, {num_rows, 512});
    Scales scales(type, 64);
    pack(problem_of(64, 64), {src, slots, pool, {}, scales.view()}, {"ref"});
    unpack(problem_of(64, 64), {pool, slots, out, scales.view()}, GetParam().options());
    for (size_t i = 0; i < rows.size(); ++i) {
      const float x = bf16_to_float(rows[i]);
      const float step = scales.at(slot_values[i / 512]) * 0x1p-9f;
      // Half a step of three mantissa bits, the clamp at the rounded scale, and one bf16 rounding.
      ASSERT_NEAR(bf16_to_float(out.data<bf16_t>()[i]), x,
                  std::fabs(x) * (1.0f / 16 + 1.0f / 128) + step);
    }
  }
}

TEST(R512Rows, RefusesScalesThatDoNotBelongToThePool) {
  const Device cpu = Device::cpu(1);
  EXPECT_THROW(PackRows::plan({1, RowFormat::kR512, 4, 576}, cpu), Error);
  EXPECT_THROW(PackRows::plan({1, RowFormat::kR512, 0, 512}, cpu), Error);
  EXPECT_THROW(MoveRows::plan({1, RowFormat::kR512, 4, 512}, cpu), Error);
  const Tensor src(DType::kBf16, {1, 512}), slots = Tensor::i32({1}, {0});
  Tensor pool(DType::kU8, {2, 4 * 512}), out(DType::kBf16, {1, 512});
  Tensor scales(DType::kF32, {8, 1}), wide(DType::kF32, {8, 2}), less(DType::kF32, {7, 1});
  Tensor codes(DType::kU8, {8, 1});
  const PackRows packs = PackRows::plan(problem_of(1, 4), cpu);
  const UnpackRows unpacks = UnpackRows::plan(problem_of(1, 4), cpu);
  EXPECT_NO_THROW(packs.run({src, slots, pool, {}, scales}, {}));
  EXPECT_NO_THROW(unpacks.run({pool, slots, out, scales}, {}));
  pool.fill_bytes(0x11);
  for (Tensor* const wrong : {&wide, &less, &codes}) {
    EXPECT_THROW(packs.run({src, slots, pool, {}, *wrong}, {}), Error);
    EXPECT_THROW(unpacks.run({pool, slots, out, *wrong}, {}), Error);
  }
  EXPECT_THROW(packs.run({src, slots, pool}, {}), Error);
  EXPECT_THROW(unpacks.run({pool, slots, out}, {}), Error);
  TensorView same = scales.view();
  same.stride[0] = 0;
  EXPECT_THROW(packs.run({src, slots, pool, {}, same}, {}), Error);
  EXPECT_EQ(pool.bytes(), std::vector<uint8_t>(2 * 4 * 512, 0x11));
  // A format that keeps its scales in the pool takes none.
  const PackRows v4 = PackRows::plan({1, RowFormat::kV4, 1, 512}, cpu);
  Tensor v4_pool(DType::kU8, {8, 584});
  EXPECT_THROW(v4.run({src, slots, v4_pool, {}, scales}, {}), Error);
}

}  // namespace
}  // namespace fovea
