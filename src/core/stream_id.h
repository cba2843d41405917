#pragma once

#include <cstdint>

#include "fovea/device.h"

namespace fovea::internal::cuda {

/// Differs from that of every other stream, also of one that was destroyed. The current device is
/// the stream's.
uint64_t stream_id(Stream stream);

}  // namespace fovea::internal::cuda
