#pragma once

#include <cstddef>
#include <string>

#include "fovea/device_memory.h"
#include "fovea/error.h"

/// Memory of a backend.
namespace fovea::internal {

/// buffer->reserve(), whose Error(kOutOfMemory) then says what the memory was for.
inline void reserve_memory(const char* what, const Device& device, size_t bytes, Stream stream,
                           DeviceBuffer* buffer) {
  try {
    buffer->reserve(device, bytes, stream);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    throw Error(ErrorCode::kOutOfMemory, "dsa_backend: " + std::string(what) + ": " + error.what());
  }
}

}  // namespace fovea::internal
