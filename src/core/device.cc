#include "fovea/device.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <new>
#include <thread>

#include "src/core/check.h"
#include "src/core/cuda_runtime.h"

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

namespace {

constexpr std::align_val_t kAlignment{64};

// Rows gathered from a large pool lie on a 4 KiB page each, and looking its address up takes longer
// than fetching the row. Huge pages of 2 MiB make that rare; the advice may be ignored.
void prefer_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  constexpr size_t kWorthwhile = size_t{8} << 20;
  if (bytes < kWorthwhile) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace

void HostBuffer::Release::operator()(void* data) const noexcept {
  ::operator delete(data, kAlignment);
}

void HostBuffer::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  void* data = ::operator new(bytes, kAlignment, std::nothrow);
  if (data == nullptr) {
    throw Error(ErrorCode::kOutOfMemory,
                "HostBuffer: cannot allocate " + std::to_string(bytes) + " bytes");
  }
  prefer_huge_pages(data, bytes);
  data_.reset(data);
  bytes_ = bytes;
}

}  // namespace fovea
