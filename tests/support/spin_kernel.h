#pragma once

#include <cstdint>

#include "fovea/device.h"

namespace fovea::test {

/// Memory that the device and the host see.
struct SpinFlags {
  volatile int32_t released = 0;
  volatile int32_t ended = 0;
};

/// Submits a kernel that ends 20 seconds after its start or when it sees `released`, and then sets
/// `ended`.
void start_spinning(const Device& device, Stream stream, SpinFlags* flags);

}  // namespace fovea::test
