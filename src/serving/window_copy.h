#pragma once

#include <cstdint>

#include "fovea/device.h"
#include "fovea/tensor.h"

/// Windows of a convolution's pool, set aside and put back, in the order of `stream` on a GPU.
namespace fovea::internal {

/// Entry i of `slots`, and behind them of `more_slots`, belongs to window i of `saved`. A slot
/// outside the pool has no window: nothing is copied for it, and nothing of `saved` is read.
struct WindowCopy {
  TensorView window;           ///< bf16 [slots, A, B]
  ConstTensorView slots;       ///< i32 [N]
  ConstTensorView more_slots;  ///< optional i32 [M]
  TensorView saved;            ///< bf16 [>= N + M, A * B]

  int64_t num_entries() const {
    return slots.shape[0] + (more_slots.defined() ? more_slots.shape[0] : 0);
  }
};

/// Neither is announced to fault injection: what undoes a failure has to run after it, and saving
/// is a part of that. Both may be captured; neither allocates or waits.
void save_windows(const WindowCopy& copy, const Device& device, Stream stream);
void restore_windows(const WindowCopy& copy, const Device& device, Stream stream);

// On a GPU; `restores`: from `saved` to the pool.
void copy_windows_cuda_portable(const WindowCopy& copy, bool restores, const Device& device,
                                Stream stream);

}  // namespace fovea::internal
