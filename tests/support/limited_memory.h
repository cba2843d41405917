#pragma once

#include <new>

#include "tests/support/devices.h"

namespace fovea::test {

/// Gives away `left` bytes and no more.
class LimitedMemory : public MemoryResource {
 public:
  LimitedMemory(const Device& device, size_t limit) : left(limit), device_(device) {}
  void* allocate(size_t bytes, Stream) noexcept override {
    if (bytes > left) return nullptr;
    left -= bytes;
    return ::operator new (bytes, std::align_val_t{256}, std::nothrow);
  }
  void release(void* data, size_t bytes, Stream stream) noexcept override {
    test::wait_for(device_, stream);
    ::operator delete (data, std::align_val_t{256});
    left += bytes;
  }
  size_t left;

 private:
  Device device_;
};

}  // namespace fovea::test
