#pragma once

#include <cstdint>

#include "fovea/causal_conv1d.h"
#include "fovea/tensor.h"

/// Windows of the short convolution, in either layout.
namespace fovea::internal {

/// Input `row` (0: oldest) of channel `channel` in a slot. Strides count elements. T is const for
/// readers. The number of rows is a contract, not an extent: nothing is derived from a stride.
template <class T>
struct WindowPool {
  T* data = nullptr;
  int64_t num_slots = 0;
  int64_t slot_stride = 0;
  int64_t row_stride = 0;
  int64_t channel_stride = 0;

  FOVEA_HOST_DEVICE bool contains(int64_t slot) const { return slot >= 0 && slot < num_slots; }
  FOVEA_HOST_DEVICE T* at(int64_t slot, int64_t row, int64_t channel) const {
    return data + slot * slot_stride + row * row_stride + channel * channel_stride;
  }
};

/// Views bf16 [slots, 3, D] or [slots, D, 3]; no slots for an absent tensor.
template <class T, class View>
WindowPool<T> window_pool(const View& tensor, WindowLayout layout) {
  WindowPool<T> pool;
  if (!tensor.defined()) return pool;
  pool.data = static_cast<T*>(tensor.data);
  pool.num_slots = tensor.shape[0];
  pool.slot_stride = tensor.stride[0];
  const bool is_wd = layout == WindowLayout::kWd;
  pool.row_stride = is_wd ? tensor.stride[1] : 1;
  pool.channel_stride = is_wd ? 1 : tensor.stride[1];
  return pool;
}

}  // namespace fovea::internal
