#include "tests/support/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "tests/support/device_heap.h"

namespace {
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};

void* counted_allocation_or_null(size_t bytes, size_t alignment) noexcept {
  if (counting.load(std::memory_order_relaxed)) ++allocations;
  if (bytes > SIZE_MAX - alignment) return nullptr;  // rounding up would wrap around
  bytes = std::max<size_t>(bytes, 1);
  if (void* const data = fovea::test::device_heap_allocate(bytes, alignment)) return data;
  return alignment <= alignof(std::max_align_t)
             ? std::malloc(bytes)
             : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void* counted_allocation(size_t bytes, size_t alignment) {
  void* const data = counted_allocation_or_null(bytes, alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void release(void* data) noexcept {
  if (!fovea::test::device_heap_release(data)) std::free(data);
}
}  // namespace

// Replacements of the global allocation functions, so that AllocationCounter sees every one.
void* operator new(size_t bytes) { return counted_allocation(bytes, 1); }
void* operator new[](size_t bytes) { return counted_allocation(bytes, 1); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return counted_allocation(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return counted_allocation(bytes, static_cast<size_t>(alignment));
}
// Without these, memory of the nothrow forms would come from elsewhere, uncounted, and go to
// free().
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return counted_allocation_or_null(bytes, 1);
}
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return counted_allocation_or_null(bytes, 1);
}
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return counted_allocation_or_null(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return counted_allocation_or_null(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* data) noexcept { release(data); }
void operator delete[](void* data) noexcept { release(data); }
void operator delete(void* data, size_t) noexcept { release(data); }
void operator delete[](void* data, size_t) noexcept { release(data); }
void operator delete(void* data, std::align_val_t) noexcept { release(data); }
void operator delete[](void* data, std::align_val_t) noexcept { release(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { release(data); }
void operator delete[](void* data, size_t, std::align_val_t) noexcept { release(data); }

namespace fovea::test {

Tensor::Tensor(DType dtype, std::initializer_list<int64_t> shape)
    : shape_(packed_shape(dtype, shape)) {
  bytes_.resize(static_cast<size_t>(shape_.num_elements()) * size_of(dtype));
}

void Tensor::assign(const void* data, size_t size) {
  if (size != bytes_.size()) throw std::logic_error("test tensor: the values do not fit the shape");
  if (size > 0) std::memcpy(bytes_.data(), data, size);
}

TensorView Tensor::view() {
  TensorView view;
  static_cast<TensorShape&>(view) = shape_;
  view.data = bytes_.data();
  return view;
}

ConstTensorView Tensor::view() const { return {shape_, bytes_.data()}; }

void Tensor::fill_bytes(uint8_t byte) { std::fill(bytes_.begin(), bytes_.end(), byte); }

GuardedMemory::GuardedMemory(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t usable = (bytes + page - 1) / page * page;
  mapped_ = usable + 2 * page;
  base_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base_ == MAP_FAILED) throw std::bad_alloc();
  if (usable > 0 &&
      mprotect(static_cast<char*>(base_) + page, usable, PROT_READ | PROT_WRITE) != 0) {
    throw std::bad_alloc();
  }
  data_ = static_cast<char*>(base_) + page + usable - bytes;
  if (map_for_device(static_cast<char*>(base_) + page, usable)) {
    device_mapping_ = static_cast<char*>(base_) + page;
  }
}

GuardedMemory::~GuardedMemory() {
  if (device_mapping_ != nullptr) unmap_for_device(device_mapping_);
  munmap(base_, mapped_);
}

SparseMapping::SparseMapping(size_t bytes) : bytes_(bytes) {
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
               -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
}

SparseMapping::~SparseMapping() { munmap(data_, bytes_); }

AllocationCounter::AllocationCounter() {
  allocations = 0;
  counting = true;
}

AllocationCounter::~AllocationCounter() { counting = false; }

int64_t AllocationCounter::count() const { return allocations; }

}  // namespace fovea::test
