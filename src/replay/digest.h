#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fovea/dtype.h"

/// Fingerprints of rows. A digest is the sum of the fingerprints of all rows modulo 2^64: it does
/// not depend on their order.
namespace fovea::internal {

struct DigestRow {
  int64_t request = 0;  ///< Row of the trace.
  int64_t position = 0;
  int64_t layer = 0;
};

/// Of the selected positions, in the order given.
uint64_t digest_selection(const DigestRow& row, std::span<const int32_t> positions);

/// Of the output bits.
uint64_t digest_output(const DigestRow& row, std::span<const bf16_t> output);

}  // namespace fovea::internal
