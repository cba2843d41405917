#include "src/core/host_memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <new>

namespace fovea::internal {
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

void* allocate_host(size_t bytes) noexcept {
  void* const data = ::operator new(bytes, kAlignment, std::nothrow);
  if (data != nullptr) prefer_huge_pages(data, bytes);
  return data;
}

void release_host(void* data) noexcept { ::operator delete(data, kAlignment); }

}  // namespace fovea::internal
