#include "src/serving/kda_step.h"

#include "src/serving/kda_plans.h"
#include "src/serving/step_memory.h"

namespace fovea::internal {
namespace {

TensorView slice_first(TensorView view, int64_t requests) {
  view.shape[0] = requests;
  return view;
}

size_t window_bytes(const KdaBackendConfig& config) {
  return static_cast<size_t>(kConvHistory * kda_channels(config.layer)) * sizeof(bf16_t);
}

}  // namespace

VerifyScratch::VerifyScratch(const KdaBackendConfig& config, int64_t requests,
                             int64_t rows_per_request, int64_t num_layers, const StepHome& home)
    : config_(config),
      requests_(requests),
      rows_(rows_per_request),
      layers_(num_layers),
      channels_(config.convolution ? kda_channels(config.layer) : 0) {
  const KdaLayer& layer = config.layer;
  entry_ = config.verify_mode == VerifyMode::kStates ? layer.head_dim_v * layer.head_dim_k
                                                     : 2 * layer.head_dim_k + layer.head_dim_v;
  const int64_t rows = layers_ * requests_ * rows_;
  reserve_memory("the scratch of a verify", home,
                 static_cast<size_t>(rows * layer.num_value_heads * entry_) * sizeof(float),
                 &memory_);
  reserve_memory("the windows of a verify", home,
                 static_cast<size_t>(rows * kConvHistory * channels_) * sizeof(bf16_t),
                 &window_memory_);
}

TensorView VerifyScratch::layers() const {
  void* const data = const_cast<DeviceBuffer&>(memory_).data();
  return make_tensor(data, DType::kF32,
                     {layers_, requests_, rows_, config_.layer.num_value_heads, entry_});
}

TensorView VerifyScratch::layer(int64_t layer) const {
  const TensorView all = layers();
  void* const data = static_cast<float*>(all.data) + layer * all.stride[0];
  const int64_t heads = config_.layer.num_value_heads;
  if (config_.verify_mode == VerifyMode::kRecords) {
    return make_tensor(data, DType::kF32, {requests_, rows_, heads, entry_});
  }
  return make_tensor(data, DType::kF32,
                     {requests_, rows_, heads, config_.layer.head_dim_v, config_.layer.head_dim_k});
}

TensorView VerifyScratch::first_requests(int64_t requests) const {
  return slice_first(layer(0), requests);
}

TensorView VerifyScratch::windows() const {
  if (channels_ == 0) return {};
  void* const data = const_cast<DeviceBuffer&>(window_memory_).data();
  return make_tensor(data, DType::kBf16, {layers_, requests_, rows_, kConvHistory, channels_});
}

TensorView VerifyScratch::window(int64_t layer) const {
  if (channels_ == 0) return {};
  const TensorView all = windows();
  void* const data = static_cast<bf16_t*>(all.data) + layer * all.stride[0];
  return make_tensor(data, DType::kBf16, {requests_, rows_, kConvHistory, channels_});
}

WindowBackup::WindowBackup(const KdaBackendConfig& config, const StepHome& home)
    : device_(home.device) {
  if (!config.convolution) return;
  const int64_t most = config.max_requests + config.max_snapshots;
  reserve_memory("the backup of windows", home, static_cast<size_t>(most) * window_bytes(config),
                 &memory_);
  copy_.saved =
      make_tensor(memory_.data(), DType::kBf16, {most, kConvHistory * kda_channels(config.layer)});
}

void WindowBackup::save(const TensorView& window, const ConstTensorView& slots,
                        const ConstTensorView& snapshot_slots, Stream stream) {
  copy_.window = window;
  copy_.slots = slots;
  copy_.more_slots = snapshot_slots;
  save_windows(copy_, device_, stream);
}

KdaStep::KdaStep(const KdaBackendConfig& config, const StepHome& home)
    : RowStep(metadata_config(config), home) {}

KdaStep::KdaStep(const KdaBackendConfig& config, const StepHome& home, const StepBucket& bucket_in)
    : RowStep(metadata_config(config), home, bucket_in) {
  if (bucket_in.mode != ForwardMode::kTargetVerify) return;
  scratch = VerifyScratch(config, bucket_in.num_requests, bucket_in.rows_per_request,
                          config.num_layers, home);
  verified.assign(static_cast<size_t>(config.num_layers), false);
}

}  // namespace fovea::internal
