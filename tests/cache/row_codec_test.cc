#include "fovea/row_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr ScaleMode kModes[] = {ScaleMode::kFp32, ScaleMode::kPow2};
constexpr RowFormat kFormats[] = {RowFormat::kBf16, RowFormat::kV32, RowFormat::kI132};

int64_t width_of(RowFormat format) { return format == RowFormat::kI132 ? 128 : 576; }

void pack(const RowCodecProblem& problem, const PackRowsTensors& tensors, const Options& options,
          int threads = 1) {
  PackRows::plan(problem, Device::cpu(threads), options).run(tensors, {});
}

void unpack(const RowCodecProblem& problem, const UnpackRowsTensors& tensors,
            const Options& options, int threads = 1) {
  UnpackRows::plan(problem, Device::cpu(threads), options).run(tensors, {});
}

// The e4m3 code nearest to a float by definition: all codes are tried, a tie goes to the even one,
// and 448 takes everything above it.
uint8_t nearest_e4m3(float value) {
  if (std::isnan(value)) return 0x7F;
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), 448.0);
  int best = 0;
  for (int code = 1; code <= 0x7E; ++code) {
    const double there = std::fabs(e4m3_to_float(static_cast<uint8_t>(code)) - magnitude);
    const double here = std::fabs(e4m3_to_float(static_cast<uint8_t>(best)) - magnitude);
    if (there < here || (there == here && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

struct ExpectedTile {
  float scale;
  std::vector<uint8_t> codes;
};

// 2^ceil(log2 value) by search.
double power_above(double value) {
  int exponent = -160;
  while (std::ldexp(1.0, exponent) < value) ++exponent;
  return std::ldexp(1.0, exponent);
}

// A tile as the formats define it, written without the library's helpers.
ExpectedTile expected_tile(const bf16_t* x, int64_t count, RowFormat format, ScaleMode mode) {
  float amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = std::fabs(bf16_to_float(x[i]));
    if (std::isfinite(value) && value > amax) amax = value;
  }
  ExpectedTile tile;
  if (format == RowFormat::kI132) {
    const float scale = (amax < 1e-4f ? 1e-4f : amax) / 448.0f;
    tile.scale = mode == ScaleMode::kFp32 ? scale : static_cast<float>(power_above(scale));
  } else if (mode == ScaleMode::kPow2) {
    const float scale = amax / 448.0f;
    tile.scale = static_cast<float>(power_above(scale < 1e-4f ? 1e-4f : scale));
  } else {
    tile.scale = amax == 0 ? 1.0f : amax / 448.0f;
  }
  for (int64_t i = 0; i < count; ++i) {
    tile.codes.push_back(nearest_e4m3(bf16_to_float(x[i]) / tile.scale));
  }
  return tile;
}

// Tiles that break quantisers, each of `count` channels.
std::vector<std::vector<bf16_t>> hostile_tiles(size_t count) {
  test::Rng rng(11);
  std::vector<std::vector<bf16_t>> tiles;
  const auto add = [&](float first, float rest) {
    tiles.emplace_back(count, bf16_from_float(rest));
    tiles.back()[count / 3] = bf16_from_float(first);
  };
  add(0, 0);
  add(448, 0);
  for (int exponent = -30; exponent <= 30; exponent += 5) {
    add(-448 * std::ldexp(1.0f, exponent), std::ldexp(1.0f, exponent));
  }
  add(1e-6f, 1e-6f);
  add(1e-30f, -1e-30f);
  add(std::ldexp(1.0f, -133), 0);  // the smallest bf16
  add(bf16_to_float(bf16_t{0x7F7F}), 1);
  add(896, 1);
  add(900, 1);
  add(std::nanf(""), 3);
  add(kInf, -3);
  add(-kInf, 0);
  add(std::nanf(""), kInf);
  add(-0.0f, 1);
  for (const float magnitude : {1e-20f, 1e-3f, 1.0f, 3.7f, 1e4f, 1e30f}) {
    tiles.push_back(rng.bf16_normals(static_cast<int64_t>(count), magnitude));
  }
  return tiles;
}

// Rows of any format whose quantised part goes through the hostile tiles.
std::vector<bf16_t> hostile_rows(RowFormat format, int64_t num_rows, int64_t width) {
  const size_t tile_dim = 128;
  const auto tiles = hostile_tiles(tile_dim);
  test::Rng rng(12);
  std::vector<bf16_t> rows = rng.bf16_normals(num_rows * width);
  size_t next = 0;
  const int64_t quantised = format == RowFormat::kV32 ? 512 : width;
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t d = 0; d < quantised; d += 128, ++next) {
      const auto& tile = tiles[next % tiles.size()];
      std::copy_n(tile.begin(), std::min<int64_t>(128, quantised - d),
                  rows.begin() + i * width + d);
    }
  }
  return rows;
}

float read_float(const uint8_t* bytes) {
  float value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

class PackRowsTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, PackRowsTest, testing::ValuesIn(test::targets_of("pack_rows")),
                         test::target_name);
class UnpackRowsTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, UnpackRowsTest,
                         testing::ValuesIn(test::targets_of("unpack_rows")), test::target_name);

TEST_P(PackRowsTest, V32BytesFollowTheDefinition) {
  const int64_t num_rows = 40;
  const std::vector<bf16_t> rows = hostile_rows(RowFormat::kV32, num_rows, 576);
  const Tensor src = Tensor::bf16({num_rows, 576}, rows);
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < num_rows; ++i) slot_values.push_back(num_rows - 1 - i);
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

TEST_P(PackRowsTest, I132KeepsCodesFirstAndScalesLastInEveryPage) {
  const int64_t num_rows = 60;
  for (const int64_t width : {128, 64, 36}) {
    const std::vector<bf16_t> rows = hostile_rows(RowFormat::kI132, num_rows, width);
    const Tensor src = Tensor::bf16({num_rows, width}, rows);
    std::vector<int32_t> slot_values;
    for (int32_t i = 0; i < num_rows; ++i) slot_values.push_back((i * 7) % num_rows);
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
        owned = owned || (format == RowFormat::kI132
                              ? within(j * width, width) || within(3 * width + 4 * j, 4)
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
        const RowCodecProblem problem{num_rows, format, page_size, width, mode};
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

// Offsets beyond 2^31 and 2^32 bytes: a row packed there and unpacked again is the row of a small
// pool, and the places where 32-bit arithmetic would land stay untouched.
void expect_far_slots_work(RowFormat format, int64_t page, const Options& pack_options,
                           const Options& unpack_options) {
  const int64_t width = width_of(format);
  const int64_t page_size = 64;
  const int64_t bytes = page_bytes(format, page_size, width);
  const int64_t num_pages = page + 1;
  test::SparseMapping mapping(static_cast<size_t>(num_pages * bytes));
  const TensorView pool = make_tensor(mapping.data(), DType::kU8, {num_pages, bytes});
  const std::vector<bf16_t> rows = hostile_rows(format, 2, width);
  const Tensor src = Tensor::bf16({2, width}, rows);
  const auto first_slot = static_cast<int32_t>(page * page_size);
  const Tensor slots = Tensor::i32({2}, {first_slot, first_slot + 63});
  const RowCodecProblem problem{2, format, page_size, width};
  pack(problem, {src, slots, pool}, pack_options);
  Tensor small(DType::kU8, {1, bytes}), out(DType::kBf16, {2, width}),
      expected(DType::kBf16, {2, width});
  const Tensor near_slots = Tensor::i32({2}, {0, 63});
  pack(problem, {src, near_slots, small}, {"ref"});
  const auto* const far_page = static_cast<const uint8_t*>(mapping.data()) + page * bytes;
  EXPECT_EQ(std::memcmp(far_page, small.bytes().data(), static_cast<size_t>(bytes)), 0);
  unpack(problem, {pool, slots, out}, unpack_options);
  unpack(problem, {small, near_slots, expected}, {"ref"});
  EXPECT_EQ(out.bytes(), expected.bytes());
  for (const int bits : {31, 32}) {
    const int64_t wrapped = (page * bytes) & ((int64_t{1} << bits) - 1);
    if (wrapped == page * bytes) continue;
    const auto* const low = static_cast<const uint8_t*>(mapping.data()) + wrapped;
    EXPECT_EQ(std::count(low, low + bytes, 0), bytes);
  }
}

constexpr std::pair<RowFormat, int64_t> kFarPages[] = {
    {RowFormat::kBf16, 29'128},  {RowFormat::kBf16, 58'255}, {RowFormat::kBf16, 116'509},
    {RowFormat::kV32, 51'151},   {RowFormat::kV32, 102'301}, {RowFormat::kI132, 254'200},
    {RowFormat::kI132, 254'201}, {RowFormat::kI132, 508'401}};

TEST_P(PackRowsTest, KnownFault6PoolsBeyond32Bits) {
  for (const auto& [format, page] : kFarPages) {
    expect_far_slots_work(format, page, GetParam().options(), {"ref"});
  }
}

TEST_P(UnpackRowsTest, KnownFault6PoolsBeyond32Bits) {
  for (const auto& [format, page] : kFarPages) {
    expect_far_slots_work(format, page, {"ref"}, GetParam().options());
  }
}

TEST_P(UnpackRowsTest, KnownFault6RowsOfABf16PoolBeyond32Bits) {
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
    const RowCodecProblem problem{num_rows, format, 7, width};
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
      const RowCodecProblem problem{50, format, 50, width, mode};
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

TEST_P(PackRowsTest, RunDoesNotAllocateAndTakesNoRows) {
  Tensor pool(DType::kU8, {4, 64 * 656});
  const Tensor src = Tensor::bf16({200, 576}, hostile_rows(RowFormat::kV32, 200, 576));
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < 200; ++i) slot_values.push_back(i);
  const Tensor slots = Tensor::i32({200}, slot_values);
  const Tensor no_rows(DType::kBf16, {0, 576}), no_slots(DType::kI32, {0});
  for (const int threads : {1, 2, 3}) {
    const PackRows plan =
        PackRows::plan({200, RowFormat::kV32, 64, 576}, Device::cpu(threads), GetParam().options());
    EXPECT_EQ(plan.workspace_bytes(), 0u);
    for (int warm_up = 0; warm_up < 20; ++warm_up) plan.run({src, slots, pool}, {});
    const std::vector<uint8_t> before = pool.bytes();
    const PackRowsTensors tensors{src, slots, pool};
    const PackRowsTensors empty{no_rows, no_slots, pool};
    const test::AllocationCounter allocations;
    plan.run(tensors, {});
    plan.run(empty, {});
    EXPECT_EQ(allocations.count(), 0) << threads << " threads";
    EXPECT_EQ(pool.bytes(), before);
  }
}

TEST_P(UnpackRowsTest, RunDoesNotAllocateAndTakesNoRows) {
  const Tensor pool(DType::kU8, {4, 64 * 656});
  const Tensor slots(DType::kI32, {200});
  Tensor out(DType::kBf16, {200, 576}), no_rows(DType::kBf16, {0, 576});
  const Tensor no_slots(DType::kI32, {0});
  for (const int threads : {1, 2, 3}) {
    const UnpackRows plan = UnpackRows::plan({200, RowFormat::kV32, 64, 576}, Device::cpu(threads),
                                             GetParam().options());
    EXPECT_EQ(plan.workspace_bytes(), 0u);
    for (int warm_up = 0; warm_up < 20; ++warm_up) plan.run({pool, slots, out}, {});
    const UnpackRowsTensors tensors{pool, slots, out};
    const UnpackRowsTensors empty{pool, no_slots, no_rows};
    const test::AllocationCounter allocations;
    plan.run(tensors, {});
    plan.run(empty, {});
    EXPECT_EQ(allocations.count(), 0) << threads << " threads";
  }
}

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
constexpr LargeCall kLargeCalls[] = {{RowFormat::kV32, 576, 52'000},
                                     {RowFormat::kBf16, 576, 30'000},
                                     {RowFormat::kBf16, 520, 34'000},
                                     {RowFormat::kBf16, 77, 250'000},
                                     {RowFormat::kI132, 128, 270'000}};

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
    const RowCodecProblem problem{call.num_rows, call.format, 50, call.width};
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
      }
    }
  }
}

TEST_P(FullUnpackRowsTest, LargeCallsAgreeWithTheReferenceForAnyThreadCountAndAlignment) {
  for (const LargeCall& call : kLargeCalls) {
    const int64_t pages = call.num_rows / 50;
    const Tensor slots = large_slots(call.num_rows);
    const RowCodecProblem problem{call.num_rows, call.format, 50, call.width};
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

TEST(RowCodec, PlansRefuseWhatTheirTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  for (const RowCodecProblem& wrong :
       {RowCodecProblem{-1, RowFormat::kV32, 64, 576}, RowCodecProblem{1, RowFormat::kV32, 0, 576},
        RowCodecProblem{1, RowFormat::kV32, 257, 576}, RowCodecProblem{1, RowFormat::kV32, 64, 512},
        RowCodecProblem{1, RowFormat::kV32, 64, 0}, RowCodecProblem{1, RowFormat::kI132, 0, 128},
        RowCodecProblem{1, RowFormat::kI132, 64, 0}, RowCodecProblem{1, RowFormat::kBf16, -1, 576},
        RowCodecProblem{1, RowFormat::kBf16, 64, 0}}) {
    EXPECT_THROW(PackRows::plan(wrong, cpu), Error);
    EXPECT_THROW(UnpackRows::plan(wrong, cpu), Error);
  }
  EXPECT_THROW(PackRows::plan({1, RowFormat::kV32, 64, 576}, cpu, {"nonsense"}), Error);
}

TEST(RowCodec, RunRefusesTensorsThatDoNotMatchThePlanBeforeItWrites) {
  const Device cpu = Device::cpu(1);
  Tensor pool(DType::kU8, {3, 2 * 656}), bf16_pool(DType::kBf16, {6, 576});
  pool.fill_bytes(0x11);
  const Tensor src(DType::kBf16, {2, 576}), slots(DType::kI32, {2});
  Tensor out(DType::kBf16, {2, 576});
  const PackRows packs = PackRows::plan({2, RowFormat::kV32, 2, 576}, cpu);
  const UnpackRows unpacks = UnpackRows::plan({2, RowFormat::kV32, 2, 576}, cpu);
  const Tensor more_src(DType::kBf16, {3, 576}), more_slots(DType::kI32, {3});
  EXPECT_THROW(packs.run({more_src, more_slots, pool}, {}), Error);  // planned for 2 rows
  EXPECT_THROW(packs.run({more_src, slots, pool}, {}), Error);
  EXPECT_THROW(packs.run({Tensor(DType::kF32, {2, 576}), slots, pool}, {}), Error);
  EXPECT_THROW(packs.run({src, Tensor(DType::kI64, {2}), pool}, {}), Error);
  EXPECT_THROW(packs.run({src, slots, Tensor(DType::kU8, {3, 2 * 656 - 1})}, {}), Error);
  EXPECT_THROW(packs.run({src, slots, bf16_pool}, {}), Error);  // v32 is packed
  EXPECT_THROW(packs.run({src, slots, {}}, {}), Error);
  TensorView overlapping = pool.view();
  overlapping.stride[0] = 656;
  EXPECT_THROW(packs.run({src, slots, overlapping}, {}), Error);
  TensorView strided_slots = Tensor(DType::kI32, {4}).view();
  strided_slots.shape[0] = 2;
  strided_slots.stride[0] = 2;
  EXPECT_THROW(packs.run({src, strided_slots, pool}, {}), Error);
  TensorView overlapping_out = out.view();
  overlapping_out.stride[0] = 100;
  EXPECT_THROW(unpacks.run({pool, slots, overlapping_out}, {}), Error);
  EXPECT_THROW(unpacks.run({pool, slots, Tensor(DType::kBf16, {2, 512})}, {}), Error);
  EXPECT_EQ(pool.bytes(), std::vector<uint8_t>(3 * 2 * 656, 0x11));
  // A paged bf16 pool needs a page size; a flat one does not.
  const PackRows flat = PackRows::plan({2, RowFormat::kBf16, 0, 576}, cpu);
  EXPECT_THROW(flat.run({src, slots, Tensor(DType::kU8, {3, 2 * 1152})}, {}), Error);
  EXPECT_NO_THROW(flat.run({src, Tensor::i32({2}, {0, 1}), bf16_pool}, {}));
}

}  // namespace
}  // namespace fovea
