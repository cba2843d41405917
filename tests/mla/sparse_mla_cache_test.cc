// Where the keys of sparse_mla lie: the arithmetic that the CPU and the kernels of GPUs share.

#include "src/mla/sparse_mla_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <vector>

#include "src/core/row_layout.h"
#include "tests/support/rng.h"

namespace fovea::internal {
namespace {

constexpr int64_t kPages = 150000;

// A pool that is nowhere: addresses are compared, nothing is read.
struct Nowhere {
  SparseMlaProblem problem;
  SparseMlaTensors tensors;

  Nowhere(RowFormat format, int64_t page_size, bool bf16_scale) {
    problem.head_dim_qk = kLatentDim;
    problem.row_format = format;
    problem.page_size = page_size;
    problem.extra_row_format = format;
    problem.extra_page_size = page_size;
    const int64_t bytes = page_size * row_bytes(format, kLatentDim) + 7;
    tensors.kv = at(0x500000000001, DType::kU8, {kPages, bytes});
    tensors.kv.stride[0] = bytes + 5;
    if (format == RowFormat::kR512) {
      tensors.inv_scale =
          at(0x600000000000, bf16_scale ? DType::kBf16 : DType::kF32, {kPages * page_size, 1});
      tensors.inv_scale.stride[0] = 3;
    }
    tensors.extra_kv = tensors.kv;
    tensors.extra_inv_scale = tensors.inv_scale;
  }

  static ConstTensorView at(uintptr_t address, DType dtype, std::initializer_list<int64_t> shape) {
    return make_tensor(reinterpret_cast<const void*>(address), dtype, shape);
  }

  // Bytes from the base of the pool to a token's row, and to its scales.
  int64_t row_offset(int64_t page, int64_t offset) const {
    return page * tensors.kv.stride[0] +
           offset * (problem.row_format == RowFormat::kV4 ? 576 : 512);
  }
  const uint8_t* row(int64_t page, int64_t offset) const {
    return static_cast<const uint8_t*>(tensors.kv.data) + row_offset(page, offset);
  }
  const uint8_t* scales(int64_t page, int64_t offset) const {
    if (problem.row_format == RowFormat::kV4)
      return row(page, 0) + problem.page_size * 576 + offset * 8;
    return static_cast<const uint8_t*>(tensors.inv_scale.data) +
           (page * problem.page_size + offset) * 3 *
               (tensors.inv_scale.dtype == DType::kBf16 ? 2 : 4);
  }
};

TEST(SparseMlaCache, RowsAndScalesOfLargePoolsLieWhereTheCodecsPutThem) {
  test::Rng rng(1);
  for (const RowFormat format : {RowFormat::kV4, RowFormat::kR512}) {
    for (const int64_t page_size : {1, 2, 53, 64, 256}) {
      const Nowhere pool(format, page_size, page_size % 2 == 0);
      const SparseMlaSegment segment = primary_segment(pool.problem, pool.tensors);
      const auto codec = paged_rows<const uint8_t>(pool.tensors.kv, page_size);
      const int64_t capacity = kPages * page_size;
      for (int i = 0; i < 300; ++i) {
        const auto index =
            static_cast<int32_t>(i == 0 ? capacity - 1 : rng.integer(0, capacity - 1));
        const LatentAddress found = segment.address(rng.integer(0, 1000), index);
        ASSERT_EQ(found.row, pool.row(index / page_size, index % page_size));
        ASSERT_EQ(found.scales, pool.scales(index / page_size, index % page_size));
        if (format == RowFormat::kV4) {
          ASSERT_EQ(found.row, codec.v4_data(index));
          ASSERT_EQ(found.scales, codec.v4_scales(index));
        }
      }
      for (const int64_t index : {int64_t{-1}, int64_t{INT_MIN}, capacity, int64_t{INT_MAX}}) {
        const LatentAddress found = segment.address(0, static_cast<int32_t>(index));
        EXPECT_EQ(found.row, nullptr);
        EXPECT_EQ(found.scales, nullptr);
      }
    }
  }
}

// A table may name pages whose slots 32 bits do not hold.
TEST(SparseMlaCache, KeysOfAPageTableMayLieBehindEverySlot) {
  test::Rng rng(2);
  for (const RowFormat format : {RowFormat::kV4, RowFormat::kR512}) {
    for (const int64_t page_size : {1, 3, 256, 65536}) {
      Nowhere pool(format, page_size, false);
      const std::vector<int32_t> table(4);
      pool.problem.extra_max_pages = 4;
      pool.problem.extra_topk = 1000000;
      pool.tensors.extra_page_table =
          make_tensor(static_cast<const void*>(table.data()), DType::kI32, {1, 4});
      const SparseMlaSegment segment = extra_segment(pool.problem, pool.tensors);
      EXPECT_EQ(segment.max_length, std::min<int64_t>(1000000, 4 * page_size));
      for (int i = 0; i < 300; ++i) {
        const int64_t page = i == 0 ? kPages - 1 : rng.integer(0, kPages - 1);
        const int64_t slot = rng.integer(0, 4 * page_size - 1);
        const LatentAddress found = segment.address(slot, static_cast<int32_t>(page));
        ASSERT_EQ(found.row, pool.row(page, slot % page_size));
        ASSERT_EQ(found.scales, pool.scales(page, slot % page_size));
      }
      for (const int64_t page : {int64_t{-1}, int64_t{INT_MIN}, kPages, int64_t{INT_MAX}})
        EXPECT_EQ(segment.address(5, static_cast<int32_t>(page)).row, nullptr);
    }
  }
}

}  // namespace
}  // namespace fovea::internal
