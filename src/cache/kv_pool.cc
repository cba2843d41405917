#include "fovea/kv_pool.h"

#include <limits>
#include <string>

#include "fovea/row_codec.h"
#include "src/core/check.h"
#include "src/core/zeroed_memory.h"

namespace fovea {
namespace {

constexpr char kName[] = "kv_pool";
// Layers start where a GPU allocation would.
constexpr int64_t kLayerAlignment = 256;

// factor_a * factor_b, both >= 0. Throws Error(kOutOfMemory) when no address space holds that much.
int64_t bytes_product(int64_t factor_a, int64_t factor_b) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max() - kLayerAlignment;
  if (factor_a == 0 || factor_b <= kMax / factor_a) return factor_a * factor_b;
  throw Error(ErrorCode::kOutOfMemory, std::string(kName) + ": " + std::to_string(factor_a) +
                                           " times " + std::to_string(factor_b) +
                                           " bytes exceed the address space");
}

}  // namespace

KvPool::KvPool(const KvPoolConfig& config, const Device& device) : config_(config) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  internal::check_range(kName, "num_layers", config.num_layers, 1, kMax);
  internal::check_range(kName, "num_pages", config.num_pages, 1, kMax);
  page_bytes_ = page_bytes(config.row_format, config.page_size, config.width);
  const int64_t used = bytes_product(config.num_pages, page_bytes_);
  layer_bytes_ = (used + kLayerAlignment - 1) / kLayerAlignment * kLayerAlignment;
  bytes_ = bytes_product(config.num_layers, layer_bytes_);
  const auto bytes = static_cast<size_t>(bytes_);
  if (device.kind == DeviceKind::kCpu) {
    memory_ = {internal::map_zeroed(kName, bytes), Unmap{bytes}};
    return;
  }
  device_memory_.reserve(device, bytes);
  fill_bytes(device_memory_.data(), device, 0, bytes);
}

void KvPool::Unmap::operator()(void* data) const noexcept { internal::unmap_zeroed(data, bytes); }

TensorView KvPool::layer(int64_t layer) {
  internal::check_range(kName, "layer", layer, 0, config_.num_layers - 1);
  char* const base = static_cast<char*>(memory_ != nullptr ? memory_.get() : device_memory_.data());
  return make_tensor(base + layer * layer_bytes_, DType::kU8, {config_.num_pages, page_bytes_});
}

}  // namespace fovea
