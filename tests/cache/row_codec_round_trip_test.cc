#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "fovea/row_codec.h"
#include "src/core/row_layout.h"
#include "tests/cache/row_codec_case.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::kModes;
using test::pack;
using test::read_float;
using test::Tensor;
using test::unpack;

class PackRowsRoundTripTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, PackRowsRoundTripTest,
                         testing::ValuesIn(test::targets_of("pack_rows")), test::target_name);
class UnpackRowsRoundTripTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, UnpackRowsRoundTripTest,
                         testing::ValuesIn(test::targets_of("unpack_rows")), test::target_name);

// Rows of normals of very different sizes, one tile of zeros, one tile with infinities.
std::vector<bf16_t> round_trip_rows(int64_t num_rows) {
  test::Rng rng(31);
  std::vector<bf16_t> rows;
  for (int64_t i = 0; i < num_rows; ++i) {
    const std::vector<bf16_t> row =
        rng.bf16_normals(576, std::ldexp(1.0f, static_cast<int>(i % 21) - 10));
    rows.insert(rows.end(), row.begin(), row.end());
  }
  std::fill_n(rows.begin() + 3 * 576 + 128, 128, bf16_from_float(0));
  rows[4 * 576 + 256] = bf16_from_float(448);
  rows[4 * 576 + 257] = bf16_from_float(std::numeric_limits<float>::infinity());
  rows[4 * 576 + 258] = bf16_from_float(-std::numeric_limits<float>::infinity());
  return rows;
}

// 656 bytes and back: rope bit for bit, zeros exact with a finite scale, infinities at +-448 times
// the scale, everything else within half a step of the code.
void expect_v32_round_trip(ScaleMode mode, const Options& pack_options,
                           const Options& unpack_options) {
  const int64_t num_rows = 64;
  const std::vector<bf16_t> rows = round_trip_rows(num_rows);
  std::vector<int32_t> slot_values;
  for (int32_t i = 0; i < 64; ++i) slot_values.push_back(64 * 3 - 1 - 3 * i);
  const Tensor slots = Tensor::i32({num_rows}, slot_values);
  Tensor pool(DType::kU8, {3, 64 * 656}), out(DType::kBf16, {num_rows, 576});
  pool.fill_bytes(0x7F);
  const RowCodecProblem problem{num_rows, RowFormat::kV32, 64, 576, mode};
  pack(problem, {Tensor::bf16({num_rows, 576}, rows), slots, pool}, pack_options);
  unpack(problem, {pool, slots, out}, unpack_options);
  for (int64_t i = 0; i < num_rows; ++i) {
    const uint8_t* const record =
        pool.data<uint8_t>() + int64_t{656} * slot_values[static_cast<size_t>(i)];
    const bf16_t* const x = rows.data() + 576 * i;
    const bf16_t* const y = out.data<bf16_t>() + 576 * i;
    ASSERT_EQ(std::memcmp(y + 512, x + 512, 128), 0) << "rope of row " << i;
    for (int64_t d = 0; d < 512; ++d) {
      const float scale = read_float(record + 512 + 4 * (d / 128));
      ASSERT_TRUE(std::isfinite(scale) && scale > 0);
      const float before = bf16_to_float(x[d]), after = bf16_to_float(y[d]);
      if (std::isinf(before)) {
        ASSERT_EQ(after, std::copysign(bf16_to_float(bf16_from_float(448 * scale)), before));
      } else if (before == 0) {
        ASSERT_EQ(after, 0.0f);
      } else {
        // Half a step of the code, and the rounding to bf16.
        const float bound = std::max(std::fabs(before) / 16, scale * 0x1p-10f) * 1.01f;
        ASSERT_LE(std::fabs(after - before), bound) << "row " << i << " channel " << d;
      }
    }
  }
}

TEST_P(PackRowsRoundTripTest, Acceptance8RecordsOf656Bytes) {
  for (const ScaleMode mode : kModes) expect_v32_round_trip(mode, GetParam().options(), {"ref"});
}

TEST_P(UnpackRowsRoundTripTest, Acceptance8RecordsOf656Bytes) {
  for (const ScaleMode mode : kModes) expect_v32_round_trip(mode, {"ref"}, GetParam().options());
}

// Requests that share a prefix list its slots once each: the output is longer than the pool. Slots
// of padding are negative.
TEST_P(UnpackRowsRoundTripTest, Acceptance8RepeatedSlotsExceedThePoolAndNegativeOnesGiveZeros) {
  const int64_t capacity = 2 * 4;
  Tensor pool(DType::kU8, {2, 4 * 656}), stored(DType::kBf16, {capacity, 576});
  std::vector<int32_t> own = {0, 1, 2, 3, 4, 5, 6, 7}, listed;
  const std::vector<bf16_t> rows = round_trip_rows(capacity);
  const RowCodecProblem problem{100, RowFormat::kV32, 4, 576};
  pack(problem, {Tensor::bf16({capacity, 576}, rows), Tensor::i32({capacity}, own), pool}, {"ref"});
  unpack(problem, {pool, Tensor::i32({capacity}, own), stored}, {"ref"});
  for (int32_t request = 0; request < 5; ++request) {  // prefix 4 .. 7, then a token of its own
    listed.insert(listed.end(), {4, 5, 6, 7, request % 4, -1, -1 - 1000 * request});
  }
  const auto num_rows = static_cast<int64_t>(listed.size());
  ASSERT_GT(num_rows, capacity);
  Tensor out(DType::kBf16, {num_rows, 576});
  out.fill_bytes(0xFF);
  unpack(problem, {pool, Tensor::i32({num_rows}, listed), out}, GetParam().options());
  const std::vector<bf16_t> zeros(576, bf16_t{0});
  for (int64_t i = 0; i < num_rows; ++i) {
    const int32_t slot = listed[static_cast<size_t>(i)];
    const bf16_t* const expected = slot < 0 ? zeros.data() : stored.data<bf16_t>() + 576 * slot;
    EXPECT_EQ(std::memcmp(out.data<bf16_t>() + 576 * i, expected, 1152), 0) << "row " << i;
  }
}

// 254200 * 8448 = 2^31 - 2048: the first page of an index pool with bytes beyond 2^31, and the
// first one that lies there whole. With a longer page stride the same holds earlier.
TEST(PagedRows, Acceptance7AddressesOfPages254200And254201) {
  for (const int64_t stride : {8448, 8512}) {
    test::SparseMapping mapping(static_cast<size_t>(254202 * stride));
    auto* const base = static_cast<uint8_t*>(mapping.data());
    TensorView pool = make_tensor(base, DType::kU8, {254202, 8448});
    pool.stride[0] = stride;
    const auto rows = internal::paged_rows<uint8_t>(pool, 64);
    const int64_t padding = (stride - 8448) * 254200;
    const int32_t first = 254200 * 64;
    EXPECT_EQ(rows.i132_codes(first, 128) - base, 2147481600 + padding);
    EXPECT_EQ(rows.i132_codes(first + 16, 128) - base, 2147483648 + padding);
    EXPECT_EQ(rows.i132_scale(first, 128) - base, 2147489792 + padding);
    EXPECT_EQ(rows.i132_scale(first + 63, 128) - base, 2147490044 + padding);
    EXPECT_EQ(rows.i132_codes(first + 64, 128) - base, 2147481600 + padding + stride);
    EXPECT_EQ(rows.i132_scale(first + 127, 128) - base, 2147490044 + padding + stride);
  }
}

}  // namespace
}  // namespace fovea
