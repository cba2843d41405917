#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "fovea/device_memory.h"
#include "fovea/error.h"
#include "fovea/stream.h"
#include "src/core/cuda_runtime.h"

/// Suites that run on the CPU and on a GPU with the same tensors (support/device_heap.h).
namespace fovea::test {

inline const char* const kDevices[] = {"cpu", "cuda:0"};

/// "cpu", "cuda": for names of test cases.
inline std::string device_name(const std::string& device) {
  return device.substr(0, device.find(':'));
}

/// Why a suite cannot run on the device; empty when it can.
inline std::string why_skipped(const std::string& device) {
  if (device == "cpu" || cuda_device_count() > 0) return "";
  return internal::cuda::unavailable_reason();
}

/// Base of suites that run on every device:
///
///   INSTANTIATE_TEST_SUITE_P(Devices, MyTest, testing::ValuesIn(test::kDevices),
///                            test::device_test_name);
class DeviceSuite : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const std::string reason = why_skipped(GetParam()); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
    device_ = parse_device(GetParam(), 2);
  }
  Device device_;
};
inline std::string device_test_name(const testing::TestParamInfo<const char*>& info) {
  return device_name(info.param);
}

/// What a resource of host memory does before it frees a piece: the stream may still write there,
/// fills and copies also where launches block. A device that has failed writes no more.
inline void wait_for(const Device& device, Stream stream) noexcept {
  try {
    synchronize(device, stream);
  } catch (const Error&) {  // NOLINT: the test fails at its next call
  }
}

/// While it lives, what the library allocates on the device is memory that a test may read: on a
/// GPU the test's own, mapped heap.
class ReadableDeviceMemory {
 public:
  explicit ReadableDeviceMemory(const Device& device) : device_(device) {
    if (is_needed()) set_memory_resource(device, std::make_shared<MappedHeap>(device));
  }
  ~ReadableDeviceMemory() {
    if (is_needed()) set_memory_resource(device_, nullptr);
  }
  ReadableDeviceMemory(const ReadableDeviceMemory&) = delete;
  ReadableDeviceMemory& operator=(const ReadableDeviceMemory&) = delete;

 private:
  class MappedHeap : public MemoryResource {
   public:
    explicit MappedHeap(const Device& device) : device_(device) {}
    void* allocate(size_t bytes, Stream) noexcept override {
      return ::operator new (bytes, std::align_val_t{256}, std::nothrow);
    }
    void release(void* data, size_t, Stream stream) noexcept override {
      wait_for(device_, stream);
      ::operator delete (data, std::align_val_t{256});
    }

   private:
    Device device_;
  };
  bool is_needed() const { return device_.kind == DeviceKind::kCuda; }

  Device device_;
};

}  // namespace fovea::test
