#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "fovea/index_cache.h"
#include "src/index/index_page.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;

// Requests whose lengths end just before, at and just after page boundaries, stored token by token
// in pieces that cross them, come back in order; bytes of no token keep their value.
void expect_round_trip(int64_t page_size, const Options& store_options,
                       const Options& gather_options) {
  const int64_t head_dim = 128, page_bytes = page_size * (head_dim + 4), surplus = 12;
  const std::vector<int64_t> lengths = {1, page_size - 1,     page_size,     page_size + 1,
                                        0, 2 * page_size - 1, 2 * page_size, 2 * page_size + 1};
  const auto requests = static_cast<int64_t>(lengths.size());
  const int64_t table_width = 3, num_pages = requests * table_width + 1;
  test::Rng rng(21);
  // Pages in descending order: neighbours in a request are never neighbours in memory.
  std::vector<int32_t> table;
  for (int64_t i = 0; i < requests * table_width; ++i) {
    table.push_back(static_cast<int32_t>(num_pages - 1 - i));
  }
  std::vector<int32_t> slots, kv_indptr = {0};
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t length = lengths[static_cast<size_t>(r)];
    for (int64_t p = 0; p < length; ++p) {
      const int32_t page = table[static_cast<size_t>(r * table_width + p / page_size)];
      slots.push_back(static_cast<int32_t>(page * page_size + p % page_size));
    }
    kv_indptr.push_back(kv_indptr.back() + static_cast<int32_t>(length));
  }
  const auto total = static_cast<int64_t>(slots.size());
  Tensor codes(DType::kU8, {total, head_dim}), gathered = codes;
  for (int64_t i = 0; i < total * head_dim; ++i) {
    codes.data<uint8_t>()[i] = static_cast<uint8_t>(rng.next());
  }
  const Tensor scales = Tensor::f32({total}, rng.normals(total));
  const Tensor all_slots = Tensor::i32({total}, slots);
  Tensor pool(DType::kU8, {num_pages, page_bytes + surplus}), gathered_scales(DType::kF32, {total});
  pool.fill_bytes(0xFF);
  const IndexStore store = IndexStore::plan({total, head_dim, page_size},
                                            test::device_of(store_options, 1), store_options);
  const int64_t piece = page_size / 2 + 1;
  for (int64_t first = 0; first < total; first += piece) {
    const int64_t count = std::min(piece, total - first);
    store.run(
        {make_tensor(codes.data<uint8_t>() + first * head_dim, DType::kU8, {count, head_dim}),
         make_tensor(static_cast<const void*>(scales.data<float>() + first), DType::kF32, {count}),
         make_tensor(static_cast<const void*>(all_slots.data<int32_t>() + first), DType::kI32,
                     {count}),
         pool},
        {});
  }
  test::run(IndexGather::plan({total, head_dim, page_size}, test::device_of(gather_options, 1),
                              gather_options),
            {pool, Tensor::i32({requests, table_width}, table),
             Tensor::i32({requests + 1}, kv_indptr), gathered, gathered_scales});
  EXPECT_EQ(gathered.bytes(), codes.bytes()) << "page " << page_size;
  EXPECT_EQ(gathered_scales.bytes(), scales.bytes()) << "page " << page_size;
  // Page 0 belongs to nobody, nor do the ends of the pages.
  for (int64_t page = 0; page < num_pages; ++page) {
    const uint8_t* const row = pool.data<uint8_t>() + page * (page_bytes + surplus);
    for (int64_t i = page == 0 ? 0 : page_bytes; i < page_bytes + surplus; ++i) {
      ASSERT_EQ(row[i], 0xFF) << "page " << page << " byte " << i;
    }
  }
}

class IndexStoreRoundTripTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, IndexStoreRoundTripTest,
                         testing::ValuesIn(test::targets_of("index_store")), test::target_name);
class IndexGatherRoundTripTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, IndexGatherRoundTripTest,
                         testing::ValuesIn(test::targets_of("index_gather")), test::target_name);

TEST_P(IndexStoreRoundTripTest, Acceptance7IndexCacheAtPageBoundaries) {
  for (const int64_t page_size : {1, 2, 61, 64, 256}) {
    expect_round_trip(page_size, GetParam().options(), {"ref"});
  }
}

TEST_P(IndexGatherRoundTripTest, Acceptance7IndexCacheAtPageBoundaries) {
  for (const int64_t page_size : {1, 2, 61, 64, 256}) {
    expect_round_trip(page_size, {"ref"}, GetParam().options());
  }
}

// 254200 * 8448 = 2^31 - 2048: the first page with bytes beyond 2^31, and the first one that lies
// there whole.
TEST(IndexPages, Acceptance7AddressesOfPages254200And254201) {
  test::SparseMapping mapping(size_t{254202} * 8448);
  auto* const base = static_cast<uint8_t*>(mapping.data());
  const TensorView pool = make_tensor(base, DType::kU8, {254202, 8448});
  const internal::IndexPages<uint8_t> pages(pool, 64, 128);
  EXPECT_EQ(pages.codes(254200, 0) - base, 2147481600);
  EXPECT_EQ(pages.codes(254200, 15) - base, 2147483520);
  EXPECT_EQ(pages.codes(254200, 16) - base, 2147483648);  // 2^31
  EXPECT_EQ(pages.scale(254200, 0) - base, 2147489792);
  EXPECT_EQ(pages.scale(254200, 63) - base, 2147490044);
  EXPECT_EQ(pages.codes(254201, 0) - base, 2147490048);
  EXPECT_EQ(pages.scale(254201, 63) - base, 2147498492);
}

}  // namespace
}  // namespace fovea
