#include "fovea/state_pool.h"

#include <limits>
#include <string>
#include <utility>

#include "src/core/check.h"
#include "src/core/zeroed_memory.h"

namespace fovea {
namespace {

constexpr char kName[] = "state_pool";
// Layers start where a GPU allocation would.
constexpr int64_t kLayerAlignment = 256;

// a * b, both >= 0. Throws Error(kOutOfMemory) when no address space holds that much.
int64_t bytes_product(int64_t a, int64_t b) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max() / 4;
  if (a == 0 || b <= kMax / a) return a * b;
  throw Error(ErrorCode::kOutOfMemory, std::string(kName) + ": " + std::to_string(a) + " times " +
                                           std::to_string(b) + " bytes exceed the address space");
}

int64_t aligned(int64_t bytes) {
  return (bytes + kLayerAlignment - 1) / kLayerAlignment * kLayerAlignment;
}

void check_config(const StatePoolConfig& config) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  internal::check_range(kName, "num_layers", config.num_layers, 1, kMax);
  internal::check_range(kName, "num_slots", config.num_slots, 1, kMax);
  internal::check_range(kName, "num_value_heads", config.num_value_heads, 1, kMax);
  internal::check_range(kName, "head_dim_k", config.head_dim_k, 1, 256);
  internal::check_range(kName, "head_dim_v", config.head_dim_v, 1, 256);
  for (const int64_t extent : config.window_shape) {
    internal::check_range(kName, "window_shape", extent, 0, kMax);
  }
  if (config.state_dtype != DType::kF32 && config.state_dtype != DType::kBf16) {
    internal::invalid(kName, "state_dtype is neither f32 nor bf16");
  }
}

int64_t state_bytes(const StatePoolConfig& config) {
  const int64_t elements = config.num_value_heads * config.head_dim_v * config.head_dim_k;
  return bytes_product(elements, config.state_dtype == DType::kF32 ? 4 : 2);
}

int64_t window_bytes(const StatePoolConfig& config) {
  return bytes_product(bytes_product(config.window_shape[0], config.window_shape[1]),
                       static_cast<int64_t>(sizeof(bf16_t)));
}

}  // namespace

int64_t StatePool::slot_bytes(const StatePoolConfig& config) {
  check_config(config);
  return bytes_product(config.num_layers, state_bytes(config) + window_bytes(config));
}

StatePool::StatePool(const StatePoolConfig& config, const Device& device)
    : config_((check_config(config), config)),
      device_(device),
      state_bytes_(state_bytes(config)),
      window_bytes_(window_bytes(config)) {
  state_layer_bytes_ = aligned(bytes_product(config.num_slots, state_bytes_));
  window_layer_bytes_ = aligned(bytes_product(config.num_slots, window_bytes_));
  bytes_ = bytes_product(config.num_layers, state_layer_bytes_ + window_layer_bytes_);
  const auto bytes = static_cast<size_t>(bytes_);
  if (device.kind == DeviceKind::kCpu) {
    memory_ = internal::map_zeroed(kName, bytes);
    return;
  }
  device_memory_.reserve(device, bytes);
  fill_bytes(device_memory_.data(), device, 0, bytes);
}

StatePool::~StatePool() { release(); }

StatePool::StatePool(StatePool&& other) noexcept { *this = std::move(other); }

StatePool& StatePool::operator=(StatePool&& other) noexcept {
  if (this == &other) return *this;
  release();
  config_ = other.config_;
  device_ = other.device_;
  state_bytes_ = other.state_bytes_;
  window_bytes_ = other.window_bytes_;
  state_layer_bytes_ = other.state_layer_bytes_;
  window_layer_bytes_ = other.window_layer_bytes_;
  bytes_ = other.bytes_;
  memory_ = std::exchange(other.memory_, nullptr);
  device_memory_ = std::move(other.device_memory_);
  return *this;
}

void StatePool::release() noexcept {
  internal::unmap_zeroed(memory_, static_cast<size_t>(bytes_));
  memory_ = nullptr;
}

char* StatePool::base() const {
  // The views are mutable, the object that hands them out is not changed by their use.
  return static_cast<char*>(memory_ != nullptr ? memory_
                                               : const_cast<DeviceBuffer&>(device_memory_).data());
}

char* StatePool::state_at(int64_t layer, int64_t slot) const {
  return base() + layer * state_layer_bytes_ + slot * state_bytes_;
}

char* StatePool::window_at(int64_t layer, int64_t slot) const {
  return base() + config_.num_layers * state_layer_bytes_ + layer * window_layer_bytes_ +
         slot * window_bytes_;
}

TensorView StatePool::states() const {
  TensorView view = make_tensor(static_cast<void*>(state_at(0, 0)), config_.state_dtype,
                                {config_.num_layers, config_.num_slots, config_.num_value_heads,
                                 config_.head_dim_v, config_.head_dim_k});
  view.stride[0] = state_layer_bytes_ / (config_.state_dtype == DType::kF32 ? 4 : 2);
  return view;
}

TensorView StatePool::windows() const {
  if (window_bytes_ == 0) return {};
  TensorView view = make_tensor(
      static_cast<void*>(window_at(0, 0)), DType::kBf16,
      {config_.num_layers, config_.num_slots, config_.window_shape[0], config_.window_shape[1]});
  view.stride[0] = window_layer_bytes_ / static_cast<int64_t>(sizeof(bf16_t));
  return view;
}

TensorView StatePool::state(int64_t layer) const {
  internal::check_range(kName, "layer", layer, 0, config_.num_layers - 1);
  return make_tensor(
      static_cast<void*>(state_at(layer, 0)), config_.state_dtype,
      {config_.num_slots, config_.num_value_heads, config_.head_dim_v, config_.head_dim_k});
}

TensorView StatePool::window(int64_t layer) const {
  internal::check_range(kName, "layer", layer, 0, config_.num_layers - 1);
  if (window_bytes_ == 0) return {};
  return make_tensor(static_cast<void*>(window_at(layer, 0)), DType::kBf16,
                     {config_.num_slots, config_.window_shape[0], config_.window_shape[1]});
}

void StatePool::copy(int64_t from, int64_t to, Stream stream) {
  internal::check_range(kName, "from", from, 0, config_.num_slots - 1);
  internal::check_range(kName, "to", to, 0, config_.num_slots - 1);
  if (from == to) return;
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    copy_bytes(state_at(layer, to), device_, state_at(layer, from), device_,
               static_cast<size_t>(state_bytes_), stream);
    copy_bytes(window_at(layer, to), device_, window_at(layer, from), device_,
               static_cast<size_t>(window_bytes_), stream);
  }
}

void StatePool::clear(int64_t slot, Stream stream) {
  internal::check_range(kName, "slot", slot, 0, config_.num_slots - 1);
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    fill_bytes(state_at(layer, slot), device_, 0, static_cast<size_t>(state_bytes_), stream);
    fill_bytes(window_at(layer, slot), device_, 0, static_cast<size_t>(window_bytes_), stream);
  }
}

}  // namespace fovea
