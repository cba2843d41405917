#pragma once

#include <cstdint>

#include "fovea/row_codec.h"
#include "fovea/sparse_mla.h"

/// Widths of DeepSeek-V3.2 attention that its operators fix.
namespace fovea::internal {

inline constexpr int64_t kLatentWidth = 576;  ///< latent 512 | rope 64
inline constexpr int64_t kRopeWidth = kLatentWidth - kLatentDim;
inline constexpr int64_t kMhaWidthQk = 192;  ///< 128 without rope | rope 64, per head
inline constexpr int64_t kMhaWidthV = 128;

}  // namespace fovea::internal
