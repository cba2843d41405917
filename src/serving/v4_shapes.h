#pragma once

#include <cstdint>

/// Widths of DeepSeek-V4 attention that its operators fix.
namespace fovea::internal {

inline constexpr int64_t kCsaRatio = 4;      ///< Tokens of an entry; groups overlap.
inline constexpr int64_t kHcaRatio = 128;    ///< Tokens of an entry.
inline constexpr int64_t kV4IndexDim = 128;  ///< Channels of an index key.

/// c * d: channels of a compressor's values, as many logits follow.
inline int64_t compressor_channels(int64_t ratio, int64_t head_dim) {
  return (ratio == kCsaRatio ? 2 : 1) * head_dim;
}

}  // namespace fovea::internal
