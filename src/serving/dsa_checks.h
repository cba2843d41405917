#pragma once

#include <cstdint>

#include "fovea/dsa_backend.h"

/// Host-side checks of the backend, each before anything is written.
namespace fovea::internal {

inline constexpr char kDsaOp[] = "dsa_backend";

/// Throws Error naming the field of the configuration.
void check_dsa_config(const DsaConfig& config, const Device& device);

/// Throws Error naming the tensor, or request and field of the host lengths.
void check_forward_batch(const DsaConfig& config, const ForwardBatch& batch);

/// The facts of a batch that passed check_forward_batch.
DsaBatchFacts batch_facts(const DsaConfig& config, const ForwardBatch& batch);

/// What forward needs to know of the current step.
struct StepShape {
  int64_t num_rows = 0;     ///< E
  int64_t padded_rows = 0;  ///< T >= E
  int64_t sum_kv_len = 0;   ///< With host lengths only.
};

/// Throws Error naming the tensor.
void check_forward_tensors(const DsaConfig& config, const DsaDispatch& dispatch,
                           const StepShape& shape, const DsaLayer& layer,
                           const DsaForwardTensors& tensors);

}  // namespace fovea::internal
