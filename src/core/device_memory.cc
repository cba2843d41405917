#include "fovea/device_memory.h"

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "src/core/check.h"
#include "src/core/cuda_runtime.h"
#include "src/core/host_memory.h"

namespace fovea {
namespace {

class HostMemory : public MemoryResource {
 public:
  void* allocate(size_t bytes, Stream) noexcept override { return internal::allocate_host(bytes); }
  void release(void* data, size_t, Stream) noexcept override { internal::release_host(data); }
};

class GpuMemory : public MemoryResource {
 public:
  explicit GpuMemory(int ordinal) : ordinal_(ordinal) {}
  void* allocate(size_t bytes, Stream stream) noexcept override {
    return internal::cuda::allocate(ordinal_, bytes, stream);
  }
  void release(void* data, size_t, Stream stream) noexcept override {
    internal::cuda::release(ordinal_, data, stream);
  }

 private:
  int ordinal_;
};

struct Resources {
  std::mutex mutex;
  std::map<std::pair<DeviceKind, int>, std::shared_ptr<MemoryResource>> by_device;
};

Resources& resources() {
  static Resources* const instance = new Resources;  // buffers may outlive other statics
  return *instance;
}

std::shared_ptr<MemoryResource> default_resource(const Device& device) {
  if (device.kind == DeviceKind::kCpu) return std::make_shared<HostMemory>();
  return std::make_shared<GpuMemory>(device.ordinal);
}

std::shared_ptr<MemoryResource> resource_of(const Device& device) {
  const std::lock_guard<std::mutex> lock(resources().mutex);
  std::shared_ptr<MemoryResource>& entry = resources().by_device[{device.kind, device.ordinal}];
  if (entry == nullptr) entry = default_resource(device);
  return entry;
}

}  // namespace

void set_memory_resource(const Device& device, std::shared_ptr<MemoryResource> resource) {
  const std::lock_guard<std::mutex> lock(resources().mutex);
  resources().by_device[{device.kind, device.ordinal}] = std::move(resource);
}

MemoryInfo memory_info(const Device& device) {
  MemoryInfo info;
  if (device.kind == DeviceKind::kCuda) {
    internal::cuda::memory_info(device.ordinal, &info.free_bytes, &info.total_bytes);
  }
  return info;
}

DeviceBuffer::DeviceBuffer(const Device& device, size_t bytes, Stream stream) {
  reserve(device, bytes, stream);
}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this == &other) return *this;
  release();
  device_ = other.device_;
  stream_ = other.stream_;
  resource_ = std::move(other.resource_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void DeviceBuffer::release() noexcept {
  if (data_ != nullptr) resource_->release(data_, bytes_, stream_);
  data_ = nullptr;
  bytes_ = 0;
}

void DeviceBuffer::reserve(const Device& device, size_t bytes, Stream stream) {
  if (bytes <= bytes_ && device.kind == device_.kind && device.ordinal == device_.ordinal) return;
  // The old memory goes first: what is asked for may only fit without it.
  release();
  std::shared_ptr<MemoryResource> resource = resource_of(device);
  void* const data = resource->allocate(bytes, stream);
  if (data == nullptr && bytes > 0) {
    std::string message =
        "memory of " + to_string(device) + ": " + std::to_string(bytes) + " bytes asked";
    if (device.kind == DeviceKind::kCuda) {
      message += ", " + std::to_string(memory_info(device).free_bytes) + " free";
    }
    throw Error(ErrorCode::kOutOfMemory, message);
  }
  device_ = device;
  stream_ = stream;
  resource_ = std::move(resource);
  data_ = data;
  bytes_ = bytes;
}

void copy_bytes(void* to, const Device& to_device, const void* from, const Device& from_device,
                size_t bytes, Stream stream) {
  if (bytes == 0) return;
  if (to_device.kind == DeviceKind::kCpu && from_device.kind == DeviceKind::kCpu) {
    std::memmove(to, from, bytes);
    return;
  }
  const Device& gpu = to_device.kind == DeviceKind::kCuda ? to_device : from_device;
  const internal::cuda::DeviceScope scope(gpu.ordinal);
  internal::cuda::copy(to, from, bytes, stream);
}

void fill_bytes(void* data, const Device& device, uint8_t value, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  if (device.kind == DeviceKind::kCpu) {
    std::memset(data, value, bytes);
    return;
  }
  const internal::cuda::DeviceScope scope(device.ordinal);
  internal::cuda::fill(data, value, bytes, stream);
}

}  // namespace fovea
