#pragma once

#include <cstddef>

namespace fovea::internal {

/// Zero bytes, aligned to a memory page, that take physical memory only where they are touched.
/// Null for 0 bytes. Throws Error(kOutOfMemory), naming `owner` and the bytes asked and free, when
/// the system refuses.
void* map_zeroed(const char* owner, size_t bytes);

/// Gives memory of map_zeroed back; null is fine.
void unmap_zeroed(void* data, size_t bytes) noexcept;

}  // namespace fovea::internal
