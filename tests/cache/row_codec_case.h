#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "fovea/row_codec.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

/// Rows that break quantisers, and what the formats say about them, for the tests of pack_rows and
/// unpack_rows.
namespace fovea::test {

inline constexpr ScaleMode kModes[] = {ScaleMode::kFp32, ScaleMode::kPow2};
inline constexpr RowFormat kFormats[] = {RowFormat::kBf16, RowFormat::kV32, RowFormat::kI132,
                                         RowFormat::kV4, RowFormat::kF576};

inline int64_t width_of(RowFormat format) {
  if (format == RowFormat::kV4) return 512;
  return format == RowFormat::kI132 ? 128 : 576;
}

inline void pack(const RowCodecProblem& problem, const PackRowsTensors& tensors,
                 const Options& options, int threads = 1) {
  test::run(PackRows::plan(problem, test::device_of(options, threads), options), tensors);
}

inline void unpack(const RowCodecProblem& problem, const UnpackRowsTensors& tensors,
                   const Options& options, int threads = 1) {
  test::run(UnpackRows::plan(problem, test::device_of(options, threads), options), tensors);
}

/// The e4m3 code nearest to a float by definition: all codes are tried, a tie goes to the even one,
/// and 448 takes everything above it.
inline uint8_t nearest_e4m3(float value) {
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

/// 2^ceil(log2 value) by search.
inline double power_above(double value) {
  int exponent = -160;
  while (std::ldexp(1.0, exponent) < value) ++exponent;
  return std::ldexp(1.0, exponent);
}

/// A tile as the formats define it, written without the library's helpers.
inline ExpectedTile expected_tile(const bf16_t* x, int64_t count, RowFormat format,
                                  ScaleMode mode) {
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

/// Tiles that break quantisers, each of `count` channels.
inline std::vector<std::vector<bf16_t>> hostile_tiles(size_t count) {
  Rng rng(11);
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
  add(std::numeric_limits<float>::infinity(), -3);
  add(-std::numeric_limits<float>::infinity(), 0);
  add(std::nanf(""), std::numeric_limits<float>::infinity());
  add(-0.0f, 1);
  for (const float magnitude : {1e-20f, 1e-3f, 1.0f, 3.7f, 1e4f, 1e30f}) {
    tiles.push_back(rng.bf16_normals(static_cast<int64_t>(count), magnitude));
  }
  return tiles;
}

/// Rows of any format whose quantised part goes through the hostile tiles.
inline std::vector<bf16_t> hostile_rows(RowFormat format, int64_t num_rows, int64_t width) {
  const size_t tile_dim = 128;
  const auto tiles = hostile_tiles(tile_dim);
  Rng rng(12);
  std::vector<bf16_t> rows = rng.bf16_normals(num_rows * width);
  size_t next = 0;
  const int64_t quantised = format == RowFormat::kV32  ? 512
                            : format == RowFormat::kV4 ? 448
                                                       : width;
  const int64_t step = format == RowFormat::kV4 ? 64 : 128;
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t d = 0; d < quantised; d += step, ++next) {
      const auto& tile = tiles[next % tiles.size()];
      std::copy_n(tile.begin(), std::min<int64_t>(step, quantised - d),
                  rows.begin() + i * width + d);
    }
  }
  return rows;
}

inline float read_float(const uint8_t* bytes) {
  float value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}
/// Offsets beyond 2^31 and 2^32 bytes: a row packed there and unpacked again is the row of a small
/// pool, and the places where 32-bit arithmetic would land stay untouched.
inline void expect_far_slots_work(RowFormat format, int64_t page, const Options& pack_options,
                                  const Options& unpack_options) {
  const int64_t width = width_of(format);
  const int64_t page_size = 64;
  const int64_t bytes = page_bytes(format, page_size, width);
  const int64_t num_pages = page + 1;
  SparseMapping mapping(static_cast<size_t>(num_pages * bytes));
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

inline constexpr std::pair<RowFormat, int64_t> kFarPages[] = {
    {RowFormat::kBf16, 29'128},  {RowFormat::kBf16, 58'255},  {RowFormat::kBf16, 116'509},
    {RowFormat::kV32, 51'151},   {RowFormat::kV32, 102'301},  {RowFormat::kI132, 254'200},
    {RowFormat::kI132, 254'201}, {RowFormat::kI132, 508'401}, {RowFormat::kF576, 58'255},
    {RowFormat::kF576, 116'509}, {RowFormat::kV4, 57'359},    {RowFormat::kV4, 114'718}};
}  // namespace fovea::test
