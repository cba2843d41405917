#include "fovea/kv_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>

#include "fovea/error.h"
#include "fovea/row_codec.h"

namespace fovea {
namespace {

TEST(PageBytes, FollowsTheLayouts) {
  EXPECT_EQ(page_bytes(RowFormat::kBf16, 64, 576), 64 * 1152);
  EXPECT_EQ(page_bytes(RowFormat::kBf16, 1, 512), 1024);
  EXPECT_EQ(page_bytes(RowFormat::kV32, 64, 576), 64 * 656);
  EXPECT_EQ(page_bytes(RowFormat::kF576, 64, 576), 64 * 576);
  EXPECT_EQ(page_bytes(RowFormat::kI132, 64, 128), 8448);
  EXPECT_EQ(page_bytes(RowFormat::kI132, 1, 128), 132);
  EXPECT_EQ(page_bytes(RowFormat::kI132, 4, 64), 4 * 68);
  EXPECT_EQ(page_bytes(RowFormat::kV4, 2, 512), 1728);
  EXPECT_EQ(page_bytes(RowFormat::kV4, 64, 512), 37440);
  EXPECT_EQ(page_bytes(RowFormat::kV4, 256, 512), 149760);
}

TEST(PageBytes, RefusesWhatTheFormatsDoNotHave) {
  EXPECT_THROW(page_bytes(RowFormat::kBf16, 0, 576), Error);
  EXPECT_THROW(page_bytes(RowFormat::kBf16, 257, 576), Error);
  EXPECT_THROW(page_bytes(RowFormat::kBf16, 64, 0), Error);
  EXPECT_THROW(page_bytes(RowFormat::kV32, 64, 512), Error);
  EXPECT_THROW(page_bytes(RowFormat::kI132, 64, -1), Error);
  EXPECT_THROW(page_bytes(RowFormat::kF576, 64, 512), Error);
  EXPECT_THROW(page_bytes(RowFormat::kV4, 64, 576), Error);
  EXPECT_THROW(page_bytes(RowFormat::kBf16, 64, std::numeric_limits<int64_t>::max()), Error);
}

TEST(KvPool, LayersAreZeroAlignedAndApart) {
  KvPool pool({RowFormat::kI132, 128, 3, 5, 7}, Device::cpu(1));
  EXPECT_GE(pool.bytes(), 3 * 5 * 7 * 132);
  for (int64_t layer = 0; layer < 3; ++layer) {
    const TensorView view = pool.layer(layer);
    EXPECT_EQ(to_string(view), "u8 [5, 924]");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % 64, 0u);
    const auto* bytes = static_cast<const uint8_t*>(view.data);
    for (int64_t i = 0; i < 5 * 924; ++i) ASSERT_EQ(bytes[i], 0);
    std::memset(view.data, 0xFF, 5 * 924);
  }
}

TEST(KvPool, AHugePoolCostsNothingUntilItIsTouched) {
  // 16 GiB of address space; two bytes of it are touched.
  KvPool pool({RowFormat::kBf16, 576, 4, 58'255, 64}, Device::cpu(1));
  EXPECT_GT(pool.bytes(), int64_t{1} << 34);
  const TensorView last = pool.layer(3);
  auto* const bytes = static_cast<uint8_t*>(last.data);
  const int64_t end = last.shape[0] * last.stride[0];
  EXPECT_EQ(bytes[end - 1], 0);
  bytes[end - 1] = 1;
  EXPECT_EQ(bytes[0], 0);
}

TEST(KvPool, ASizeThatDoesNotFitIsAnErrorThatNamesBytes) {
  for (const int64_t num_pages : {int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
    try {
      KvPool({RowFormat::kV32, 576, 61, num_pages, 256}, Device::cpu(1));
      ADD_FAILURE() << num_pages;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_THAT(error.what(), testing::HasSubstr("bytes"));
    }
  }
}

// On a GPU: the default source of memory, asked for more than there is.
class KvPoolOnDevice : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Devices, KvPoolOnDevice, testing::Values("cpu", "cuda:0"),
                         [](const auto& param_info) {
                           return std::string(param_info.param) == "cpu" ? "cpu" : "cuda";
                         });

TEST_P(KvPoolOnDevice, TooManyPagesAreRefusedAndNothingIsLost) {
  if (std::string(GetParam()) != "cpu" && cuda_device_count() == 0) {
    GTEST_SKIP() << "this machine has no usable GPU";
  }
  const Device device = parse_device(GetParam(), 1);
  const MemoryInfo before = memory_info(device);
  const KvPoolConfig config{RowFormat::kV32, 576, 61, int64_t{1} << 34, 64};
  for (int attempt = 0; attempt < 3; ++attempt) {
    try {
      KvPool(config, device);
      ADD_FAILURE() << "40 PiB were given";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_THAT(error.what(), testing::HasSubstr(" bytes"));
      if (device.kind == DeviceKind::kCuda) {
        EXPECT_THAT(error.what(), testing::HasSubstr(" free"));
      }
    }
  }
  EXPECT_GE(memory_info(device).free_bytes, before.free_bytes);
  KvPool small({RowFormat::kV32, 576, 2, 4, 64}, device);
  EXPECT_NE(small.layer(1).data, nullptr);
}

TEST(KvPool, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  EXPECT_THROW(KvPool({RowFormat::kV32, 576, 0, 4, 64}, cpu), Error);
  EXPECT_THROW(KvPool({RowFormat::kV32, 576, 1, 0, 64}, cpu), Error);
  EXPECT_THROW(KvPool({RowFormat::kV32, 576, 1, 4, 0}, cpu), Error);
  EXPECT_THROW(KvPool({RowFormat::kV32, 512, 1, 4, 64}, cpu), Error);
  EXPECT_EQ(to_string(KvPool({RowFormat::kF576, 576, 1, 4, 64}, cpu).layer(0)), "u8 [4, 36864]");
  EXPECT_THROW(KvPool({RowFormat::kV32, 576, 1, 4, 64}, Device{DeviceKind::kCuda, 0, 1}), Error);
  KvPool pool({RowFormat::kV32, 576, 2, 4, 64}, cpu);
  EXPECT_THROW(pool.layer(-1), Error);
  EXPECT_THROW(pool.layer(2), Error);
}

}  // namespace
}  // namespace fovea
