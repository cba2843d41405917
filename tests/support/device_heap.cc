#include "tests/support/device_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#include "src/core/cuda_runtime.h"

namespace fovea::test {
namespace {

// Address space of the heap; all of it is pinned.
constexpr size_t kHeapBytes = size_t{4} << 30;
constexpr int kSpanShift = 16;
constexpr size_t kNumSpans = kHeapBytes >> kSpanShift;
constexpr int kNumClasses = 33;  // blocks of 2^class bytes, each aligned to its size up to a span

// Power-of-two blocks with a free list per size. Blocks of up to a span are cut from spans of their
// own size, hence a block's size follows from its address.
struct DeviceHeap {
  std::mutex mutex;
  char* base = nullptr;  // null: not in use
  size_t next_span = 0;
  std::array<void*, kNumClasses> free{};
  std::array<uint8_t, kNumSpans> span_class{};

  bool owns(const void* data) const {
    const auto* const at = static_cast<const char*>(data);
    return base != nullptr && at >= base && at < base + kHeapBytes;
  }

  void push(int size_class, void* block) {
    *static_cast<void**>(block) = free[static_cast<size_t>(size_class)];
    free[static_cast<size_t>(size_class)] = block;
  }

  bool refill(int size_class) {
    const size_t bytes = size_t{1} << size_class;
    const size_t spans = std::max<size_t>(1, bytes >> kSpanShift);
    if (next_span + spans > kNumSpans) return false;
    char* const begin = base + (next_span << kSpanShift);
    span_class[next_span] = static_cast<uint8_t>(size_class);
    next_span += spans;
    for (size_t at = 0; at < spans << kSpanShift; at += bytes) push(size_class, begin + at);
    return true;
  }
};

constinit DeviceHeap
    heap;  // zero-initialised: operator new may be called before its constructor would run

}  // namespace

void* device_heap_allocate(size_t bytes, size_t alignment) {
  if (heap.base == nullptr) return nullptr;
  const int size_class =
      std::max(4, static_cast<int>(std::bit_width(std::max(bytes, alignment) - 1)));
  if (size_class >= kNumClasses) return nullptr;
  const std::lock_guard<std::mutex> lock(heap.mutex);
  if (heap.free[static_cast<size_t>(size_class)] == nullptr && !heap.refill(size_class)) {
    return nullptr;
  }
  void* const block = heap.free[static_cast<size_t>(size_class)];
  heap.free[static_cast<size_t>(size_class)] = *static_cast<void**>(block);
  return block;
}

bool device_heap_release(void* data) {
  if (!heap.owns(data)) return false;
  const std::lock_guard<std::mutex> lock(heap.mutex);
  const size_t span = static_cast<size_t>(static_cast<char*>(data) - heap.base) >> kSpanShift;
  heap.push(heap.span_class[span], data);
  return true;
}

void use_device_heap() {
  // Before the first call of the runtime, which reads it: a launch returns when its kernel is done.
  setenv("CUDA_LAUNCH_BLOCKING", "1", /*overwrite=*/0);
  if (internal::cuda::device_count() == 0) return;
  void* const memory = mmap(nullptr, kHeapBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  if (!internal::cuda::register_host(memory, kHeapBytes)) std::abort();
  heap.base = static_cast<char*>(memory);
}

bool map_for_device(void* data, size_t bytes) {
  return bytes > 0 && internal::cuda::register_host(data, bytes);
}

void unmap_for_device(void* data) { internal::cuda::unregister_host(data); }

}  // namespace fovea::test
