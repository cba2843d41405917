#include "src/serving/window_copy.h"

#include <algorithm>

#include "src/core/access.h"

namespace fovea::internal {
namespace {

void copy_windows(const WindowCopy& copy, bool restores, const Device& device, Stream stream) {
  if (device.kind == DeviceKind::kCuda) {
    return copy_windows_cuda_portable(copy, restores, device, stream);
  }
  const auto window = access<bf16_t, 3>(copy.window);
  const auto slots = access<const int32_t, 1>(copy.slots);
  const auto more = access<const int32_t, 1>(copy.more_slots);
  const auto saved = access<bf16_t, 2>(copy.saved);
  for (int64_t i = 0; i < copy.num_entries(); ++i) {
    const int64_t slot = i < slots.shape[0] ? slots(i) : more(i - slots.shape[0]);
    if (slot < 0 || slot >= window.shape[0]) continue;
    for (int64_t row = 0; row < window.shape[1]; ++row) {
      bf16_t* const in_pool = window.row(slot, row);
      bf16_t* const aside = saved.row(i) + row * window.shape[2];
      if (restores) {
        std::copy_n(aside, window.shape[2], in_pool);
      } else {
        std::copy_n(in_pool, window.shape[2], aside);
      }
    }
  }
}

}  // namespace

void save_windows(const WindowCopy& copy, const Device& device, Stream stream) {
  copy_windows(copy, false, device, stream);
}

void restore_windows(const WindowCopy& copy, const Device& device, Stream stream) {
  copy_windows(copy, true, device, stream);
}

}  // namespace fovea::internal
