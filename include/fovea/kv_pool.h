#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "fovea/device.h"
#include "fovea/device_memory.h"
#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/tensor.h"

namespace fovea {

struct KvPoolConfig {
  RowFormat row_format = RowFormat::kBf16;  ///< kI132 makes an index-key pool.
  int64_t width =
      576;  ///< Channels of a row: any for kBf16, 128 for kI132, 512 for kV4, otherwise 576.
  int64_t num_layers = 1;
  int64_t num_pages = 0;  ///< Including the dummy page 0.
  int64_t page_size = 0;  ///< Tokens per page, 1..256.
};

/// The paged cache of every layer of one kind, owned: u8 [num_pages, page_bytes] per layer, rows as
/// docs/formats.md says. All bytes are zero at first; on the CPU they take physical memory only
/// once touched. The object itself is immutable; who writes which slot when is the caller's
/// concern.
class FOVEA_API KvPool {
 public:
  /// Throws Error(kInvalidArgument) for a configuration outside the table above,
  /// and Error(kOutOfMemory), naming the bytes asked and free, when it does not fit. On a GPU the
  /// zeros are written in the order of its default stream.
  KvPool(const KvPoolConfig& config, const Device& device);

  /// u8 [num_pages, page_bytes] of one layer, pages packed; valid while the pool lives. Throws
  /// Error(kInvalidArgument) for a layer outside 0..num_layers - 1.
  TensorView layer(int64_t layer);

  const KvPoolConfig& config() const noexcept { return config_; }
  /// Bytes of all layers together.
  int64_t bytes() const noexcept { return bytes_; }

 private:
  struct Unmap {
    Unmap() noexcept : bytes(0) {}
    explicit Unmap(size_t mapped) noexcept : bytes(mapped) {}
    size_t bytes;
    void operator()(void* data) const noexcept;
  };
  KvPoolConfig config_;
  int64_t page_bytes_ = 0;
  int64_t layer_bytes_ = 0;
  int64_t bytes_ = 0;
  std::unique_ptr<void, Unmap> memory_;  // CPU
  DeviceBuffer device_memory_;           // GPU
};

}  // namespace fovea
