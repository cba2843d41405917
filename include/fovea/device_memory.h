#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "fovea/device.h"
#include "fovea/export.h"

namespace fovea {

/// Where the memory of a device comes from. The default of a GPU is a stream-ordered pool of its
/// own, the default of the CPU is the heap. An engine that has its own pool injects it.
class FOVEA_API MemoryResource {
 public:
  virtual ~MemoryResource() = default;
  /// Memory that work submitted to `stream` from now on may use, aligned to 256 bytes (CPU: 64);
  /// null when there is not enough.
  virtual void* allocate(size_t bytes, Stream stream) noexcept = 0;
  /// Gives it back once the work submitted to `stream` so far is done.
  virtual void release(void* data, size_t bytes, Stream stream) noexcept = 0;
};

/// Replaces the source of all later allocations on `device`; null restores the default. Memory
/// that exists goes back to where it came from. Thread-safe.
FOVEA_API void set_memory_resource(const Device& device, std::shared_ptr<MemoryResource> resource);

/// Free and total bytes of a device now; 0 and 0 for the CPU, whose system overcommits.
struct MemoryInfo {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};
FOVEA_API MemoryInfo memory_info(const Device& device);

/// Memory of one device, owned; uninitialised. Move-only.
class FOVEA_API DeviceBuffer {
 public:
  DeviceBuffer() = default;
  /// Throws Error(kOutOfMemory), naming the bytes asked and free.
  DeviceBuffer(const Device& device, size_t bytes, Stream stream = {});
  ~DeviceBuffer() { release(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = static_cast<DeviceBuffer&&>(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  /// Makes the buffer at least `bytes` long; the old content is lost when it grows.
  void reserve(const Device& device, size_t bytes, Stream stream = {});

  void* data() noexcept { return data_; }
  const void* data() const noexcept { return data_; }
  size_t bytes() const noexcept { return bytes_; }
  const Device& device() const noexcept { return device_; }
  Workspace workspace() noexcept { return {data_, bytes_}; }

 private:
  void release() noexcept;

  Device device_;
  Stream stream_;
  std::shared_ptr<MemoryResource> resource_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Copies between host and device or within a device, in the order of `stream` (of whichever side
/// is a GPU). Host memory must live until the stream has passed the copy. Between two CPU addresses
/// it is memcpy. Throws Error(kDevice).
FOVEA_API void copy_bytes(void* to, const Device& to_device, const void* from,
                          const Device& from_device, size_t bytes, Stream stream = {});

/// Sets every byte, in the order of `stream`.
FOVEA_API void fill_bytes(void* data, const Device& device, uint8_t value, size_t bytes,
                          Stream stream = {});

}  // namespace fovea
