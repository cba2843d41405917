// Windows of the short convolution to and from rows of channels. Included after src/core/simd.h by
// *_cpu.cc files, once per instruction set.

#if defined(FOVEA_KDA_WINDOW_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_KDA_WINDOW_SIMD_H_
#undef FOVEA_KDA_WINDOW_SIMD_H_
#else
#define FOVEA_KDA_WINDOW_SIMD_H_
#endif

#include <array>
#include <cstring>

#include "src/kda/window_pool.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

/// The rows of a window, oldest first, each with its channels side by side.
using Window = std::array<const bf16_t*, kConvHistory>;

struct ChannelRange {
  int64_t first;
  int64_t count;
};

/// Channels of the window of a slot, zeros for -1. A wd pool is read in place, everything else
/// through `staging` [3][staging_stride].
HWY_INLINE Window load_window(const WindowPool<bf16_t>& pool, int64_t slot,
                              const ChannelRange& channels, bf16_t* staging,
                              int64_t staging_stride) {
  Window window{staging, staging + staging_stride, staging + 2 * staging_stride};
  if (slot < 0) {
    for (int64_t row = 0; row < kConvHistory; ++row) {
      std::memset(staging + row * staging_stride, 0,
                  static_cast<size_t>(channels.count) * sizeof(bf16_t));
    }
    return window;
  }
  if (pool.channel_stride == 1 && pool.row_stride != 1) {
    for (int64_t row = 0; row < kConvHistory; ++row) {
      window[static_cast<size_t>(row)] = pool.at(slot, row, channels.first);
    }
    return window;
  }
  const bf16_t* from = pool.at(slot, 0, channels.first);
  int64_t i = 0;
  if (pool.channel_stride == kConvHistory && pool.row_stride == 1) {
    const hn::ScalableTag<uint16_t> d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    const auto to = [&](int64_t row) {
      return reinterpret_cast<uint16_t*>(staging + row * staging_stride + i);
    };
    for (; i + lanes <= channels.count; i += lanes) {
      hn::Vec<decltype(d)> v0, v1, v2;
      hn::LoadInterleaved3(d, reinterpret_cast<const uint16_t*>(from + kConvHistory * i), v0, v1,
                           v2);
      hn::StoreU(v0, d, to(0));
      hn::StoreU(v1, d, to(1));
      hn::StoreU(v2, d, to(2));
    }
  }
  for (; i < channels.count; ++i) {
    for (int64_t row = 0; row < kConvHistory; ++row) {
      staging[row * staging_stride + i] = from[i * pool.channel_stride + row * pool.row_stride];
    }
  }
  return window;
}

/// Stores channels of a window. `window` may lie in the same slot of a wd pool, as long as row i
/// comes from a row above i: rows are written in order.
HWY_INLINE void store_window(const WindowPool<bf16_t>& pool, int64_t slot,
                             const ChannelRange& channels, const Window& window) {
  bf16_t* to = pool.at(slot, 0, channels.first);
  if (pool.channel_stride == 1 && pool.row_stride != 1) {
    for (int64_t row = 0; row < kConvHistory; ++row) {
      std::memcpy(to + row * pool.row_stride, window[static_cast<size_t>(row)],
                  static_cast<size_t>(channels.count) * sizeof(bf16_t));
    }
    return;
  }
  int64_t i = 0;
  if (pool.channel_stride == kConvHistory && pool.row_stride == 1) {
    const hn::ScalableTag<uint16_t> d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (; i + lanes <= channels.count; i += lanes) {
      const auto load = [&](size_t row) {
        return hn::LoadU(d, reinterpret_cast<const uint16_t*>(window[row] + i));
      };
      hn::StoreInterleaved3(load(0), load(1), load(2), d,
                            reinterpret_cast<uint16_t*>(to + kConvHistory * i));
    }
  }
  for (; i < channels.count; ++i) {
    for (int64_t row = 0; row < kConvHistory; ++row) {
      to[i * pool.channel_stride + row * pool.row_stride] = window[static_cast<size_t>(row)][i];
    }
  }
}

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
