#pragma once

#include <cstdint>
#include <vector>

#include "fovea/device_memory.h"
#include "fovea/kda_backend.h"
#include "src/serving/row_step.h"
#include "src/serving/window_copy.h"

/// What a step of a KdaBackend is made of.
namespace fovea::internal {

/// What a verify keeps of each layer until its commit, at fixed addresses.
class VerifyScratch {
 public:
  VerifyScratch() = default;
  /// Throws Error(kOutOfMemory).
  VerifyScratch(const KdaBackendConfig& config, int64_t requests, int64_t rows_per_request,
                int64_t num_layers, const StepHome& home);

  /// f32 [R, Td, HV, V, K] or [R, Td, HV, 2K + V] of a layer.
  TensorView layer(int64_t layer) const;
  /// f32 [L, R, Td, HV, V * K] or [L, R, Td, HV, 2K + V].
  TensorView layers() const;
  /// The same as `layer`, for R' <= R requests, as a commit of one layer takes it.
  TensorView first_requests(int64_t requests) const;
  /// bf16 [R, Td, 3, D] of a layer; absent without convolution.
  TensorView window(int64_t layer) const;
  /// bf16 [L, R, Td, 3, D].
  TensorView windows() const;

 private:
  KdaBackendConfig config_;
  int64_t requests_ = 0, rows_ = 0, layers_ = 0;
  int64_t entry_ = 0;  // elements of one row and head
  int64_t channels_ = 0;
  DeviceBuffer memory_, window_memory_;
};

/// The windows of a call's slots, so that a failed call can put them back. The slots are read where
/// they are, at save() and again at restore().
class WindowBackup {
 public:
  WindowBackup() = default;
  WindowBackup(const KdaBackendConfig& config, const StepHome& home);

  /// Copies the windows that the slots of both lists name; slots outside the pool are skipped.
  void save(const TensorView& window, const ConstTensorView& slots,
            const ConstTensorView& snapshot_slots, Stream stream);
  void restore(Stream stream) const { restore_windows(copy_, device_, stream); }

 private:
  Device device_;
  WindowCopy copy_;
  DeviceBuffer memory_;
};

/// A step between its begin and its last forward.
struct KdaStep : RowStep {
  KdaStep(const KdaBackendConfig& config, const StepHome& home);
  KdaStep(const KdaBackendConfig& config, const StepHome& home, const StepBucket& bucket);

  VerifyScratch scratch;       ///< Of a TARGET_VERIFY bucket.
  std::vector<bool> verified;  ///< Per layer: scratch holds the step's rows.
  KdaBatch batch;
};

}  // namespace fovea::internal
