#pragma once

#include <cstdint>

#include "fovea/device.h"
#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/tensor.h"

namespace fovea {

struct KvPoolConfig {
  RowFormat row_format = RowFormat::kBf16;  ///< kI132 makes an index-key pool.
  int64_t width = 576;                      ///< Channels of a row.
  int64_t num_layers = 1;
  int64_t num_pages = 0;  ///< Including the dummy page 0.
  int64_t page_size = 0;  ///< 1..256.
};

/// The paged cache of every layer of one kind: zero-initialised, u8 [num_pages, page_bytes] per
/// layer.
class FOVEA_API KvPool {
 public:
  /// Throws Error(kInvalidArgument) for a bad configuration and Error(kOutOfMemory), naming bytes,
  /// when it does not fit.
  KvPool(const KvPoolConfig& config, const Device& device);

  TensorView layer(int64_t layer);
  const KvPoolConfig& config() const noexcept { return config_; }
  int64_t bytes() const noexcept { return bytes_; }

 private:
  KvPoolConfig config_;
  int64_t page_bytes_ = 0;
  int64_t bytes_ = 0;
  HostBuffer memory_;
};

}  // namespace fovea
