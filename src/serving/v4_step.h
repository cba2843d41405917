#pragma once

#include <cstdint>
#include <optional>

#include "fovea/device_memory.h"
#include "fovea/v4_backend.h"
#include "src/serving/row_step.h"
#include "src/serving/step_memory.h"
#include "src/serving/v4_plans.h"

/// What a step of a V4Backend is made of.
namespace fovea::internal {

/// The arrays of a step beside those of metadata_refresh, at fixed addresses.
class V4StepArrays {
 public:
  V4StepArrays() = default;
  /// Throws Error(kOutOfMemory).
  V4StepArrays(const V4BackendConfig& config, int64_t max_requests, int64_t max_rows,
               const StepHome& home);

  /// i32, of the first rows or requests.
  struct Views {
    TensorView window_indices;  ///< [T, W]
    TensorView window_len, window_slots, positions, csa_len, selected_len, hca_len, kept, emitted;
    TensorView own_slots;  ///< [R]
    TensorView selection;  ///< [T, topk], with csa
  };
  Views views(int64_t requests, int64_t rows) const;

 private:
  void cut(const V4BackendConfig& config, int64_t max_requests, int64_t max_rows, Workspace memory,
           size_t* bytes);

  DeviceBuffer memory_;
  Views all_;
};

/// A step between its begin and its last forward.
struct V4Step : RowStep {
  V4Step(const V4BackendConfig& config, const StepHome& home);
  V4Step(const V4BackendConfig& config, const StepHome& home, const StepBucket& bucket_in);

  V4StepArrays row_arrays;
  V4Batch batch;
  bool sees_all = false;  ///< No row has more than topk entries of ratio 4.
  V4StepArrays::Views v4;

  ConstTensorView out_slot() const {
    return batch.out_slot.defined() ? batch.out_slot : batch.in_slot;
  }
};

/// Throws Error naming the tensor. Nothing of the batch's device contents is looked at.
void check_v4_batch(const V4BackendConfig& config, const V4Batch& batch,
                    const std::optional<StepBucket>& bucket);

/// Throws Error naming the tensor, or why a layer of this ratio cannot run in the step.
void check_v4_tensors(const V4BackendConfig& config, const V4Step& step, int64_t ratio,
                      const V4ForwardTensors& tensors);

}  // namespace fovea::internal
