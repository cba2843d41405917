#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "fovea/device.h"
#include "fovea/device_memory.h"
#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/stream.h"
#include "fovea/tensor.h"

namespace fovea {

struct StatePoolConfig {
  int64_t num_layers = 1;
  int64_t num_slots = 0;            ///< Every slot may be handed out: padding is -1, never a slot.
  int64_t num_value_heads = 0;      ///< HV
  int64_t head_dim_k = 128;         ///< K
  int64_t head_dim_v = 128;         ///< V
  DType state_dtype = DType::kF32;  ///< kF32 or kBf16.
  /// Of a window: {3, D} or {D, 3} as the convolution's layout says; no elements: no windows.
  std::array<int64_t, 2> window_shape = {0, 0};
};

/// The recurrent states of every linear-attention layer and, beside them, the windows of their
/// convolutions, owned. Slot s of a layer is its state [HV, V, K] and its window; a layer of states
/// starts at a multiple of 256 bytes. Snapshots of prefixes are slots like any other: by custom a
/// range at the end, one per page of the token cache.
///
/// All bytes are zero at first; on the CPU they take physical memory only once touched. A reused
/// slot keeps what it held: clear() it, or start with has_initial_state = 0. Who writes which slot
/// when is the caller's concern; the object itself is immutable.
class FOVEA_API StatePool {
 public:
  /// Throws Error(kInvalidArgument) for a configuration outside the table above, and
  /// Error(kOutOfMemory), naming the bytes asked and free, when it does not fit. On a GPU the zeros
  /// are written in the order of its default stream.
  StatePool(const StatePoolConfig& config, const Device& device);
  ~StatePool();
  StatePool(StatePool&& other) noexcept;
  StatePool& operator=(StatePool&& other) noexcept;

  /// f32 or bf16 [slots, HV, V, K]. Throws Error(kInvalidArgument) for a layer outside the pool.
  TensorView state(int64_t layer) const;
  /// bf16 [slots, window_shape]; absent without windows.
  TensorView window(int64_t layer) const;
  /// [layers, slots, HV, V, K] and [layers, slots, window_shape].
  TensorView states() const;
  TensorView windows() const;

  /// slot `to` of every layer becomes a copy of slot `from`. Throws Error(kInvalidArgument) for a
  /// slot outside the pool.
  void copy(int64_t from, int64_t to, Stream stream = {});
  /// The slot becomes zeros in every layer.
  void clear(int64_t slot, Stream stream = {});

  const StatePoolConfig& config() const noexcept { return config_; }
  /// Bytes of all layers together.
  int64_t bytes() const noexcept { return bytes_; }
  /// Bytes of one slot in all layers.
  static int64_t slot_bytes(const StatePoolConfig& config);

 private:
  char* base() const;
  char* state_at(int64_t layer, int64_t slot) const;
  char* window_at(int64_t layer, int64_t slot) const;
  void release() noexcept;

  StatePoolConfig config_;
  Device device_;
  int64_t state_bytes_ = 0;   // of one slot of one layer
  int64_t window_bytes_ = 0;  // of one slot of one layer
  int64_t state_layer_bytes_ = 0;
  int64_t window_layer_bytes_ = 0;
  int64_t bytes_ = 0;
  void* memory_ = nullptr;      // CPU
  DeviceBuffer device_memory_;  // GPU
};

}  // namespace fovea
