#pragma once

#include <cstddef>
#include <string>

#include "fovea/device_memory.h"
#include "fovea/error.h"

/// Memory of a backend.
namespace fovea::internal {

/// Where the buffers of a step are, and the stream in whose order they are allocated and cleared.
struct StepHome {
  Device device;
  Stream stream;
  const char* backend = "dsa_backend";  ///< Whose they are, for messages.
};

/// buffer->reserve(), whose Error(kOutOfMemory) then says what the memory was for.
inline void reserve_memory(const char* what, const StepHome& home, size_t bytes,
                           DeviceBuffer* buffer) {
  try {
    buffer->reserve(home.device, bytes, home.stream);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    throw Error(ErrorCode::kOutOfMemory,
                std::string(home.backend) + ": " + what + ": " + error.what());
  }
}

}  // namespace fovea::internal
