#include "src/core/zeroed_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "fovea/error.h"

namespace fovea::internal {

void* map_zeroed(const char* owner, size_t bytes) {
  if (bytes == 0) return nullptr;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    const auto free_bytes =
        static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    throw Error(ErrorCode::kOutOfMemory, std::string(owner) + ": cannot map " +
                                             std::to_string(bytes) + " bytes, " +
                                             std::to_string(free_bytes) + " bytes are free");
  }
  return data;
}

void unmap_zeroed(void* data, size_t bytes) noexcept {
  if (data != nullptr) munmap(data, bytes);
}

}  // namespace fovea::internal
