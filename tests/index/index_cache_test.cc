#include "fovea/index_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "fovea/error.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;

std::vector<uint8_t> random_codes(test::Rng& rng, int64_t count) {
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(rng.next());
  return codes;
}

Tensor u8(std::initializer_list<int64_t> shape, const std::vector<uint8_t>& values) {
  return Tensor::from(DType::kU8, shape, values);
}

// A view of `memory` with free strides.
TensorView view_of(void* memory, DType dtype, std::initializer_list<int64_t> shape,
                   std::initializer_list<int64_t> stride) {
  TensorView view = make_tensor(memory, dtype, shape);
  std::copy(stride.begin(), stride.end(), view.stride.begin());
  return view;
}

class IndexStoreTest : public test::TargetTest {
 protected:
  void store(const IndexCacheProblem& problem, const IndexStoreTensors& tensors, int threads = 1) {
    test::run(IndexStore::plan(problem, GetParam().device(threads), GetParam().options()), tensors);
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, IndexStoreTest,
                         testing::ValuesIn(test::targets_of("index_store")), test::target_name);

class IndexGatherTest : public test::TargetTest {
 protected:
  void gather(const IndexCacheProblem& problem, const IndexGatherTensors& tensors,
              int threads = 1) {
    test::run(IndexGather::plan(problem, GetParam().device(threads), GetParam().options()),
              tensors);
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, IndexGatherTest,
                         testing::ValuesIn(test::targets_of("index_gather")), test::target_name);

TEST_P(IndexStoreTest, PutsAllCodesOfAPageBeforeAllScales) {
  test::Rng rng(1);
  for (const int64_t page_size : {1, 2, 61, 64}) {
    const int64_t page_bytes = page_size * 132;
    const std::vector<uint8_t> codes = random_codes(rng, 3 * 128);
    const std::vector<float> scales = rng.normals(3);
    // First slot of page 0, last slot of page 1, first slot of page 2.
    const std::vector<int32_t> slots = {0, static_cast<int32_t>(2 * page_size - 1),
                                        static_cast<int32_t>(2 * page_size)};
    Tensor pool(DType::kU8, {3, page_bytes});
    std::vector<uint8_t> expected(static_cast<size_t>(3 * page_bytes), 0);
    const int64_t code_at[3] = {0, page_bytes + (page_size - 1) * 128, 2 * page_bytes};
    const int64_t scale_at[3] = {page_size * 128,
                                 page_bytes + page_size * 128 + (page_size - 1) * 4,
                                 2 * page_bytes + page_size * 128};
    for (size_t i = 0; i < 3; ++i) {
      std::memcpy(&expected[static_cast<size_t>(code_at[i])], &codes[i * 128], 128);
      std::memcpy(&expected[static_cast<size_t>(scale_at[i])], &scales[i], 4);
    }
    store({3, 128, page_size},
          {u8({3, 128}, codes), Tensor::f32({3}, scales), Tensor::i32({3}, slots), pool});
    EXPECT_EQ(pool.bytes(), expected) << "page_size " << page_size;
  }
}

TEST_P(IndexStoreTest, SkipsSlotsOutsideThePoolAndKeepsEveryOtherByte) {
  test::Rng rng(2);
  const std::vector<uint8_t> codes = random_codes(rng, 6 * 16);
  const std::vector<int64_t> slots = {-1, 12, 5, int64_t{1} << 40, -(int64_t{1} << 40), 2147480000};
  // Pages of 4 tokens take 80 bytes; 7 more belong to somebody else, and so does the stride's rest.
  std::vector<uint8_t> memory(3 * 100, 0xAB);
  const TensorView pool = view_of(memory.data(), DType::kU8, {3, 87}, {100, 1});
  store({6, 16, 4}, {u8({6, 16}, codes), Tensor::f32({6}, std::vector<float>(6, 0.5f)),
                     Tensor::from(DType::kI64, {6}, slots), pool});
  std::vector<uint8_t> expected(3 * 100, 0xAB);
  std::memcpy(&expected[100 + 16], &codes[2 * 16], 16);
  const float scale = 0.5f;
  std::memcpy(&expected[100 + 64 + 4], &scale, 4);
  EXPECT_EQ(memory, expected);
}

TEST_P(IndexStoreTest, TakesStridedRowsAndBothSlotTypes) {
  test::Rng rng(3);
  const std::vector<uint8_t> wide = random_codes(rng, 100 * 40);
  const std::vector<float> scales = rng.normals(100);
  std::vector<int32_t> slots(100);
  std::iota(slots.begin(), slots.end(), 3);
  std::vector<uint8_t> packed;
  for (size_t t = 0; t < 100; ++t) {
    packed.insert(packed.end(), wide.begin() + 40 * t + 5, wide.begin() + 40 * t + 5 + 24);
  }
  Tensor pool(DType::kU8, {15, 7 * 28}), strided_pool(DType::kU8, {15, 7 * 28});
  const Tensor scale = Tensor::f32({100}, scales);
  store({100, 24, 7}, {u8({100, 24}, packed), scale, Tensor::i32({100}, slots), pool});
  const ConstTensorView strided =
      view_of(const_cast<uint8_t*>(wide.data()) + 5, DType::kU8, {100, 24}, {40, 1});
  const std::vector<int64_t> wide_slots(slots.begin(), slots.end());
  store({100, 24, 7}, {strided, scale, Tensor::from(DType::kI64, {100}, wide_slots), strided_pool},
        2);
  EXPECT_EQ(pool.bytes(), strided_pool.bytes());
  EXPECT_NE(pool.bytes(), std::vector<uint8_t>(pool.bytes().size(), 0));
}

// Page 254200 crosses byte offset 2^31 of an index cache, page 508400 crosses 2^32.
constexpr int64_t kFarPages[] = {254200, 254201, 508400, 508401};

TEST_P(IndexStoreTest, ReachesPagesBeyondTwoToThe32Bytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  constexpr int64_t kPageBytes = 8448;
  test::SparseMapping mapping(508402 * kPageBytes);
  auto* bytes = static_cast<uint8_t*>(mapping.data());
  test::Rng rng(4);
  const std::vector<uint8_t> codes = random_codes(rng, 8 * 128);
  const std::vector<float> scales = rng.normals(8);
  std::vector<int32_t> slots;
  for (const int64_t page : kFarPages) {
    slots.push_back(static_cast<int32_t>(page * 64));
    slots.push_back(static_cast<int32_t>(page * 64 + 63));
  }
  store({8, 128, 64}, {u8({8, 128}, codes), Tensor::f32({8}, scales), Tensor::i32({8}, slots),
                       make_tensor(bytes, DType::kU8, {508402, kPageBytes})});
  for (size_t i = 0; i < 8; ++i) {
    const uint8_t* page = bytes + kFarPages[i / 2] * kPageBytes;
    const int64_t offset = i % 2 == 0 ? 0 : 63;
    EXPECT_EQ(std::memcmp(page + offset * 128, &codes[i * 128], 128), 0) << i;
    EXPECT_EQ(std::memcmp(page + 8192 + offset * 4, &scales[i], 4), 0) << i;
  }
  // Where a 32-bit product would land.
  for (const int64_t page : kFarPages) {
    const uint64_t low = static_cast<uint64_t>(page * kPageBytes) & 0xFFFFFFFFu;
    if (static_cast<int64_t>(low) == page * kPageBytes) continue;
    EXPECT_EQ(std::count(bytes + low, bytes + low + 128, 0), 128);
  }
}

// The cache of one request of `length` tokens in the given pages, and what a gather must return.
struct Filled {
  std::vector<uint8_t> pool;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};
Filled fill(int64_t num_pages, int64_t page_size, int64_t head_dim, int64_t length,
            const std::vector<int32_t>& pages, uint8_t background) {
  test::Rng rng(5);
  Filled filled;
  const int64_t page_bytes = page_size * (head_dim + 4);
  filled.pool.assign(static_cast<size_t>(num_pages * page_bytes), background);
  filled.codes = random_codes(rng, length * head_dim);
  filled.scales = rng.normals(length);
  for (int64_t p = 0; p < length; ++p) {
    uint8_t* page = filled.pool.data() + pages[static_cast<size_t>(p / page_size)] * page_bytes;
    std::memcpy(page + (p % page_size) * head_dim, &filled.codes[static_cast<size_t>(p * head_dim)],
                static_cast<size_t>(head_dim));
    std::memcpy(page + page_size * head_dim + (p % page_size) * 4,
                &filled.scales[static_cast<size_t>(p)], 4);
  }
  return filled;
}

TEST_P(IndexGatherTest, ReturnsWhatTheCacheHoldsWhateverThePageSizeAndTheUnwrittenTail) {
  for (const int64_t page_size : {1, 2, 61, 64}) {
    for (const int64_t length : {1, 13, 63, 64, 65, 130}) {
      const int64_t num_pages = (length + page_size - 1) / page_size;
      std::vector<int32_t> pages(static_cast<size_t>(num_pages));
      for (int64_t i = 0; i < num_pages; ++i) {
        pages[static_cast<size_t>(i)] = static_cast<int32_t>(num_pages - 1 - i);
      }
      for (const uint8_t background : {uint8_t{0x00}, uint8_t{0xFF}}) {
        const Filled filled = fill(num_pages, page_size, 128, length, pages, background);
        Tensor k_fp8(DType::kU8, {length, 128}), k_scale(DType::kF32, {length});
        gather({length, 128, page_size},
               {u8({num_pages, page_size * 132}, filled.pool), Tensor::i32({1, num_pages}, pages),
                Tensor::i32({2}, {0, static_cast<int32_t>(length)}), k_fp8, k_scale});
        EXPECT_EQ(k_fp8.bytes(), filled.codes);
        EXPECT_EQ(k_scale.values<float>(), filled.scales);
      }
    }
  }
}

TEST_P(IndexGatherTest, PutsRequestsInOrderAndZerosForPagesOutsideThePool) {
  // Pages of 2 tokens, Di = 1: token j of page i has code 16 i + j + 1 and scale 16 i + j.
  std::vector<uint8_t> pool;
  for (int i = 0; i < 4; ++i) {
    pool.push_back(static_cast<uint8_t>(16 * i + 1));
    pool.push_back(static_cast<uint8_t>(16 * i + 2));
    for (int j = 0; j < 2; ++j) {
      const auto scale = static_cast<float>(16 * i + j);
      uint8_t bytes[4];
      std::memcpy(bytes, &scale, 4);
      pool.insert(pool.end(), bytes, bytes + 4);
    }
  }
  // Request 0: pages 3, 1; request 1: nothing; request 2: page -1, page 4 (outside), page 3, then
  // past the table.
  const Tensor page_table = Tensor::i32({3, 3}, {3, 1, 77, -9, -9, -9, -1, 4, 3});
  const Tensor kv_indptr = Tensor::i32({4}, {0, 3, 3, 10});
  Tensor k_fp8(DType::kU8, {12, 1}), k_scale(DType::kF32, {12});
  k_fp8.fill_bytes(0xEE);
  k_scale.fill_bytes(0xEE);
  for (const int threads : {1, 2, 3}) {
    gather({12, 1, 2}, {u8({4, 10}, pool), page_table, kv_indptr, k_fp8, k_scale}, threads);
    EXPECT_EQ(k_fp8.bytes(), std::vector<uint8_t>({49, 50, 17, 0, 0, 0, 0, 49, 50, 0, 0xEE, 0xEE}));
    const std::vector<float> scales = k_scale.values<float>();
    EXPECT_EQ(std::vector<float>(scales.begin(), scales.begin() + 10),
              std::vector<float>({48, 49, 16, 0, 0, 0, 0, 48, 49, 0}));
    EXPECT_EQ(std::memcmp(&scales[10], "\xEE\xEE\xEE\xEE\xEE\xEE\xEE\xEE", 8), 0);
  }
}

TEST_P(IndexGatherTest, StaysInsideTheOutputForAnyOffsets) {
  std::vector<int32_t> pages = {1, 0, 2};
  const Filled filled = fill(3, 4, 8, 12, pages, 0);
  const Tensor pool = u8({3, 48}, filled.pool);
  const Tensor page_table = Tensor::i32({3, 3}, {1, 0, 2, 1, 0, 2, 1, 0, 2});
  test::GuardedMemory codes(10 * 8), scales(10 * 4);
  const TensorView k_fp8 = make_tensor(codes.data(), DType::kU8, {10, 8});
  const TensorView k_scale = make_tensor(scales.data(), DType::kF32, {10});
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  for (const auto& offsets : {std::vector<int32_t>{0, 6, 3, 8},
                              {kMin, kMax, kMin, kMax},
                              {5, 0, 100, 7},
                              {-3, 2, 9, 11}}) {
    std::vector<uint8_t> first;
    for (const std::string& implementation : {std::string("ref"), GetParam().implementation}) {
      std::memset(codes.data(), 0x11, 80);
      std::memset(scales.data(), 0x11, 40);
      test::run(
          IndexGather::plan({10, 8, 4}, test::device_of({implementation}, 3), {implementation}),
          {pool, page_table, Tensor::i32({4}, offsets), k_fp8, k_scale});
      const auto* bytes = static_cast<const uint8_t*>(codes.data());
      const std::vector<uint8_t> result(bytes, bytes + 80);
      if (first.empty()) first = result;
      EXPECT_EQ(result, first);
    }
  }
}

TEST_P(IndexGatherTest, ReadsOnlyTheTableColumnsItNeeds) {
  // 9 tokens in pages of 4 need 3 columns; the table claims 1000 but ends after the third.
  const std::vector<int32_t> pages = {2, 0, 1};
  const Filled filled = fill(3, 4, 8, 9, pages, 0xFF);
  test::GuardedMemory table(3 * sizeof(int32_t));
  std::memcpy(table.data(), pages.data(), 3 * sizeof(int32_t));
  Tensor k_fp8(DType::kU8, {9, 8}), k_scale(DType::kF32, {9});
  gather({9, 8, 4}, {u8({3, 48}, filled.pool), make_tensor(table.data(), DType::kI32, {1, 1000}),
                     Tensor::i32({2}, {0, 9}), k_fp8, k_scale});
  EXPECT_EQ(k_fp8.bytes(), filled.codes);
}

TEST_P(IndexGatherTest, ReachesPagesBeyondTwoToThe32Bytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  constexpr int64_t kPageBytes = 8448;
  test::SparseMapping mapping(508402 * kPageBytes);
  auto* bytes = static_cast<uint8_t*>(mapping.data());
  const std::vector<int32_t> near = {0, 1, 2, 3};
  const Filled filled = fill(4, 64, 128, 256, near, 0);
  std::vector<int32_t> pages;
  for (size_t i = 0; i < 4; ++i) {
    std::memcpy(bytes + kFarPages[i] * kPageBytes, &filled.pool[i * kPageBytes], kPageBytes);
    pages.push_back(static_cast<int32_t>(kFarPages[i]));
  }
  Tensor k_fp8(DType::kU8, {256, 128}), k_scale(DType::kF32, {256});
  gather({256, 128, 64}, {make_tensor(bytes, DType::kU8, {508402, kPageBytes}),
                          Tensor::i32({1, 4}, pages), Tensor::i32({2}, {0, 256}), k_fp8, k_scale});
  EXPECT_EQ(k_fp8.bytes(), filled.codes);
  EXPECT_EQ(k_scale.values<float>(), filled.scales);
}

TEST_P(IndexGatherTest, DoesNotAllocateAndDoesNotDependOnThreads) {
  const std::vector<int32_t> pages = {3, 1, 0, 2};
  const Filled filled = fill(4, 256, 12, 1024, pages, 0);
  const Tensor pool = u8({4, 256 * 16}, filled.pool);
  const Tensor page_table = Tensor::i32({1, 4}, pages);
  const Tensor kv_indptr = Tensor::i32({2}, {0, 1024});
  for (const int threads : {1, 2, 3}) {
    Tensor wide(DType::kU8, {1024, 20}), k_scale(DType::kF32, {1024});
    const TensorView k_fp8 = view_of(wide.data<uint8_t>() + 3, DType::kU8, {1024, 12}, {20, 1});
    const IndexGather plan =
        IndexGather::plan({1024, 12, 256}, GetParam().device(threads), GetParam().options());
    const IndexGatherTensors tensors{pool, page_table, kv_indptr, k_fp8, k_scale};
    test::run(plan, tensors);
    const test::AllocationCounter counter;
    test::run(plan, tensors);
    EXPECT_EQ(counter.count(), 0);
    EXPECT_EQ(k_scale.values<float>(), filled.scales);
    for (size_t row = 0; row < 1024; ++row) {
      ASSERT_EQ(std::memcmp(wide.data<uint8_t>() + row * 20 + 3, &filled.codes[row * 12], 12), 0);
    }
  }
}

TEST(IndexCache, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  EXPECT_THROW(IndexStore::plan({1, 128, 0}, cpu), Error);
  EXPECT_THROW(IndexStore::plan({1, 128, 257}, cpu), Error);
  EXPECT_THROW(IndexStore::plan({1, 0, 64}, cpu), Error);
  EXPECT_THROW(IndexGather::plan({-1, 128, 64}, cpu), Error);
  Tensor k_fp8(DType::kU8, {2, 128}), k_scale(DType::kF32, {2}), slots(DType::kI32, {2});
  Tensor pool(DType::kU8, {1, 64 * 132}), short_pool(DType::kU8, {1, 64 * 132 - 1});
  const IndexStore store = IndexStore::plan({2, 128, 64}, cpu);
  EXPECT_NO_THROW(store.run({k_fp8, k_scale, slots, pool}, {}));
  EXPECT_THROW(store.run({k_fp8, k_scale, slots, short_pool}, {}), Error);
  EXPECT_THROW(store.run({k_fp8, k_scale, k_scale, pool}, {}), Error);  // slots as floats
  EXPECT_THROW(store.run({k_fp8, k_scale, {}, pool}, {}), Error);
  const IndexStore smaller = IndexStore::plan({1, 128, 64}, cpu);
  EXPECT_THROW(smaller.run({k_fp8, k_scale, slots, pool}, {}), Error);
  try {
    store.run({k_fp8, k_scale, slots, short_pool}, {});
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "invalid_argument: index_store: index_pool.shape[1] = 8447, expected at least 8448 = "
              "page_size * "
              "(head_dim + 4)");
  }
  const IndexGather gather = IndexGather::plan({2, 128, 64}, cpu);
  const Tensor table = Tensor::i32({1, 1}, {0});
  EXPECT_NO_THROW(gather.run({pool, table, Tensor::i32({2}, {0, 2}), k_fp8, k_scale}, {}));
  EXPECT_THROW(gather.run({pool, table, Tensor::i32({3}, {0, 2, 2}), k_fp8, k_scale}, {}), Error);
}

}  // namespace
}  // namespace fovea
