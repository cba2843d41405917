#include "fovea/device.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <thread>

#include "src/core/check.h"
#include "src/core/cuda_runtime.h"
#include "src/core/host_memory.h"

namespace fovea {

Device Device::cpu(int num_threads) {
  if (num_threads < 0) {
    internal::invalid("Device::cpu",
                      "num_threads = " + std::to_string(num_threads) + ", expected >= 0");
  }
  if (num_threads == 0)
    num_threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return Device{DeviceKind::kCpu, 0, num_threads};
}

Device Device::cuda(int ordinal) {
  internal::cuda::device_facts(ordinal);  // refuses what is not there
  return Device{DeviceKind::kCuda, ordinal, 1};
}

int cuda_device_count() { return internal::cuda::device_count(); }

std::string to_string(const Device& device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : "cuda:" + std::to_string(device.ordinal);
}

Device parse_device(std::string_view text, int num_threads) {
  if (text == "cpu") return Device::cpu(num_threads);
  if (text == "cuda" || text.starts_with("cuda:")) {
    int ordinal = 0;
    const std::string_view digits = text.size() > 5 ? text.substr(5) : std::string_view("0");
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), ordinal);
    if (parsed.ec == std::errc() && parsed.ptr == digits.data() + digits.size() && ordinal >= 0) {
      return Device::cuda(ordinal);
    }
  }
  internal::invalid("device", "'" + std::string(text) + "', expected cpu or cuda:N");
}

void HostBuffer::Release::operator()(void* data) const noexcept { internal::release_host(data); }

void HostBuffer::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  void* data = internal::allocate_host(bytes);
  if (data == nullptr) {
    throw Error(ErrorCode::kOutOfMemory,
                "HostBuffer: cannot allocate " + std::to_string(bytes) + " bytes");
  }
  data_.reset(data);
  bytes_ = bytes;
}

}  // namespace fovea
