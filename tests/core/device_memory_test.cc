#include "fovea/device_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "fovea/device_tensors.h"
#include "fovea/error.h"
#include "fovea/stream.h"
#include "src/core/cuda_runtime.h"

namespace fovea {
namespace {

using testing::HasSubstr;

// Everything here holds for the CPU and for a GPU; the latter is skipped where there is none.
class DeviceTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) != "cpu" && cuda_device_count() == 0) {
      GTEST_SKIP() << internal::cuda::unavailable_reason();
    }
    device_ = parse_device(GetParam());
  }

  std::vector<uint8_t> read(const DeviceBuffer& buffer, size_t bytes) {
    std::vector<uint8_t> host(bytes);
    copy_bytes(host.data(), cpu_, buffer.data(), device_, bytes);
    synchronize(device_);
    return host;
  }

  Device cpu_ = Device::cpu(1);
  Device device_;
};
INSTANTIATE_TEST_SUITE_P(Devices, DeviceTest, testing::Values("cpu", "cuda:0"),
                         [](const auto& param_info) {
                           return std::string(param_info.param) == "cpu" ? "cpu" : "cuda";
                         });

TEST_P(DeviceTest, CopiesThereAndBack) {
  std::vector<uint8_t> source(100'003);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 31);
  DeviceBuffer first(device_, source.size()), second(device_, source.size());
  copy_bytes(first.data(), device_, source.data(), cpu_, source.size());
  copy_bytes(second.data(), device_, first.data(), device_, source.size());
  EXPECT_EQ(read(second, source.size()), source);
  fill_bytes(second.data(), device_, 0x5A, 17);
  std::fill_n(source.begin(), 17, uint8_t{0x5A});
  EXPECT_EQ(read(second, source.size()), source);
}

TEST_P(DeviceTest, BuffersGrowAndMove) {
  DeviceBuffer buffer(device_, 100);
  const void* const address = buffer.data();
  buffer.reserve(device_, 50);
  EXPECT_EQ(buffer.data(), address) << "a smaller wish changes nothing";
  buffer.reserve(device_, 1 << 20);
  EXPECT_GE(buffer.bytes(), size_t{1} << 20);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
  DeviceBuffer other = std::move(buffer);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.bytes(), 0u);
  EXPECT_NE(other.data(), nullptr);
  DeviceBuffer empty(device_, 0);
  copy_bytes(empty.data(), device_, nullptr, cpu_, 0);
}

TEST_P(DeviceTest, OutOfMemoryNamesTheBytesAndLosesNothing) {
#if defined(__SANITIZE_ADDRESS__)
  if (device_.kind == DeviceKind::kCpu) GTEST_SKIP() << "the sanitizer's heap ends the process";
#endif
  const size_t impossible = size_t{1} << 52;
  DeviceBuffer buffer(device_, 64);
  try {
    DeviceBuffer too_large(device_, impossible);
    FAIL() << "4 PiB were given";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(), HasSubstr(std::to_string(impossible) + " bytes asked"));
    if (device_.kind == DeviceKind::kCuda) {
      EXPECT_THAT(error.what(), HasSubstr("free"));
    }
  }
  DeviceBuffer again(device_, 1 << 20);
  EXPECT_NE(again.data(), nullptr);
  EXPECT_NE(buffer.data(), nullptr);
}

// Counts what is asked of the default.
class CountingResource : public MemoryResource {
 public:
  void* allocate(size_t bytes, Stream) noexcept override {
    if (refuse) return nullptr;
    ++allocations;
    held += static_cast<int64_t>(bytes);
    return memory + 64 * (allocations - 1);
  }
  void release(void* data, size_t bytes, Stream) noexcept override {
    EXPECT_GE(static_cast<char*>(data), memory);
    held -= static_cast<int64_t>(bytes);
  }
  int allocations = 0;
  int64_t held = 0;
  bool refuse = false;
  alignas(64) char memory[1024];
};

TEST_P(DeviceTest, AnInjectedResourceServesLaterAllocations) {
  const auto resource = std::make_shared<CountingResource>();
  DeviceBuffer before(device_, 64);
  set_memory_resource(device_, resource);
  {
    DeviceBuffer mine(device_, 64);
    EXPECT_EQ(mine.data(), static_cast<void*>(resource->memory));
    before = {};
    EXPECT_EQ(resource->held, 64) << "what came from elsewhere went back there";
    set_memory_resource(device_, nullptr);
    DeviceBuffer after(device_, 64);
    EXPECT_EQ(resource->allocations, 1);
  }
  EXPECT_EQ(resource->held, 0);
}

// The text names bytes, what is held stays, and nothing is lost however often it happens.
TEST_P(DeviceTest, ARefusedAllocationLeavesNothingBehind) {
  const auto resource = std::make_shared<CountingResource>();
  set_memory_resource(device_, resource);
  {
    DeviceBuffer kept(device_, 64);
    resource->refuse = true;
    for (int attempt = 0; attempt < 3; ++attempt) {
      DeviceBuffer grown;
      try {
        grown.reserve(device_, 128 + static_cast<size_t>(attempt));
        ADD_FAILURE() << "the resource refuses";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
        EXPECT_THAT(error.what(), HasSubstr(to_string(device_) + ": " +
                                            std::to_string(128 + attempt) + " bytes asked"));
      }
      EXPECT_EQ(grown.data(), nullptr);
      EXPECT_EQ(grown.bytes(), 0u);
    }
    EXPECT_EQ(kept.bytes(), 64u);
    resource->refuse = false;
    kept.reserve(device_, 128);
    EXPECT_EQ(kept.bytes(), 128u);
  }
  set_memory_resource(device_, nullptr);
  EXPECT_EQ(resource->held, 0);
}

TEST_P(DeviceTest, MoreThanIsFreeIsRefusedWithBothNumbers) {
  if (device_.kind == DeviceKind::kCpu) {
    EXPECT_EQ(memory_info(device_).total_bytes, 0u) << "its system overcommits";
    return;
  }
  const MemoryInfo before = memory_info(device_);
  for (int attempt = 0; attempt < 3; ++attempt) {
    try {
      DeviceBuffer too_large(device_, before.total_bytes + 1);
      ADD_FAILURE() << "more than the device has";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_THAT(error.what(), HasSubstr(std::to_string(before.total_bytes + 1) + " bytes asked"));
      EXPECT_THAT(error.what(), HasSubstr(" free"));
    }
  }
  EXPECT_GE(memory_info(device_).free_bytes, before.free_bytes);
}

TEST_P(DeviceTest, TensorsGoThereAndBack) {
  std::vector<int32_t> host(20);
  for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<int32_t>(i);
  // Rows of 3 in a stride of 5: the two elements between are kept.
  TensorView view = make_tensor(host.data(), DType::kI32, {4, 3});
  view.stride[0] = 5;
  DeviceTensors there(device_);
  const TensorView copy = there.output(view);
  EXPECT_EQ(copy.stride, view.stride);
  EXPECT_EQ(copy.data == view.data, device_.kind == DeviceKind::kCpu);
  EXPECT_EQ(there.input(view).data, copy.data) << "one copy of one view";
  EXPECT_FALSE(there.input({}).defined());
  const ConstTensorView empty = there.input(make_tensor(host.data(), DType::kI32, {0, 3}));
  EXPECT_NE(empty.data, nullptr);
  const int32_t value = -9;
  copy_bytes(static_cast<int32_t*>(copy.data) + 6, device_, &value, cpu_, sizeof(value));
  there.fetch();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(host[static_cast<size_t>(i)], i == 6 ? -9 : i);
  view.stride[0] = -5;
  if (device_.kind == DeviceKind::kCuda) {
    EXPECT_THROW(there.input(view), Error);
  }
}

TEST_P(DeviceTest, EventsOrderStreamsAndMeasureTime) {
  const OwnedStream one(device_), two(device_);
  DeviceBuffer buffer(device_, 1 << 20);
  Event begin(device_), filled(device_);
  begin.record(one);
  fill_bytes(buffer.data(), device_, 7, buffer.bytes(), one);
  filled.record(one);
  filled.wait(two);
  std::vector<uint8_t> host(16);
  copy_bytes(host.data(), cpu_, buffer.data(), device_, host.size(), two);
  two.synchronize();
  EXPECT_EQ(host, std::vector<uint8_t>(16, 7));
  filled.synchronize();
  EXPECT_TRUE(begin.is_done());
  EXPECT_TRUE(filled.is_done());
  EXPECT_GE(Event::elapsed_ms(begin, filled), 0.0);
}

TEST_P(DeviceTest, GraphsRunOnLaunchAndOftenOnTheSameAddresses) {
  const OwnedStream stream(device_);
  DeviceBuffer from(device_, 64), to(device_, 64);
  fill_bytes(from.data(), device_, 1, 64, stream);
  fill_bytes(to.data(), device_, 2, 64, stream);
  const Graph graph = Graph::capture(device_, stream, [&](Stream on) {
    EXPECT_EQ(is_capturing(device_, on), device_.kind == DeviceKind::kCuda);
    copy_bytes(to.data(), device_, from.data(), device_, 64, on);
  });
  EXPECT_FALSE(is_capturing(device_, stream));
  EXPECT_FALSE(is_capturing(device_, {}));
  stream.synchronize();
  EXPECT_EQ(read(to, 64), std::vector<uint8_t>(64, 2)) << "capturing runs nothing";
  for (const uint8_t value : {uint8_t{3}, uint8_t{4}}) {
    fill_bytes(from.data(), device_, value, 64, stream);
    graph.launch(stream);
    stream.synchronize();
    EXPECT_EQ(read(to, 64), std::vector<uint8_t>(64, value));
  }
  if (device_.kind == DeviceKind::kCuda) {
    EXPECT_EQ(graph.num_nodes(), 1);
  }
}

TEST_P(DeviceTest, AFailedCaptureLeavesTheStreamUsable) {
  const OwnedStream stream(device_);
  const auto fails = [](Stream) { throw Error(ErrorCode::kInternal, "on purpose"); };
  if (device_.kind == DeviceKind::kCuda) {
    EXPECT_THROW(Graph::capture(device_, stream, fails), Error);
    EXPECT_THROW(Graph::capture(device_, {}, [](Stream) {}), Error) << "the default stream";
  }
  DeviceBuffer buffer(device_, 64, stream);
  fill_bytes(buffer.data(), device_, 9, 64, stream);
  stream.synchronize();
  EXPECT_EQ(read(buffer, 64), std::vector<uint8_t>(64, 9));
}

TEST(DeviceNames, OfWhatIsThereAndWhatIsNot) {
  EXPECT_EQ(parse_device("cpu").kind, DeviceKind::kCpu);
  for (const char* const text : {"cuda:", "cuda:x", "cuda:-1", "gpu", ""}) {
    EXPECT_THROW(parse_device(text), Error) << text;
  }
  try {
    parse_device("cuda:1000");
    FAIL() << "there is no such GPU";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), HasSubstr("cuda:1000"));
  }
}

}  // namespace
}  // namespace fovea
