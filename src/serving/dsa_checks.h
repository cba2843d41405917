#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "fovea/dsa_backend.h"
#include "src/serving/dsa_step.h"

/// Host-side checks of the backend, each before anything is written.
namespace fovea::internal {

inline constexpr char kDsaOp[] = "dsa_backend";

/// Throws Error naming the field of the configuration.
void check_dsa_config(const DsaConfig& config);

/// Throws Error naming the field of the bucket.
void check_bucket(const DsaConfig& config, const StepBucket& bucket);

/// Throws Error naming the tensor, or request and field of the host lengths. With `bucket` the
/// batch must have its shape, and may hold padded requests.
void check_forward_batch(const DsaConfig& config, const ForwardBatch& batch,
                         const std::optional<StepBucket>& bucket, int32_t kv_len_delta);

/// Rows of every request of a mode; 0 where ext_len says.
int64_t fixed_rows(const DsaConfig& config, ForwardMode mode);

/// From seq_len to the KV length.
int64_t length_addend(const DsaConfig& config, ForwardMode mode, int32_t kv_len_delta);

/// What the batch and the plans of a chain of drafts must have besides.
void check_draft_steps(const ForwardBatch& batch, std::span<const DraftStep> steps);

/// Rows that every layer of the batch stores: E, or with a context split those of all ranks.
int64_t stored_tokens(const ForwardBatch& batch);

/// The facts of a batch that passed check_forward_batch.
DsaBatchFacts batch_facts(const DsaConfig& config, const ForwardBatch& batch, int32_t kv_len_delta);

/// Whether a forward scores keys: it selects, and neither skips nor was given the selection.
bool scores_rows(const DsaDispatch& dispatch, const DsaForwardTensors& tensors);

/// Throws Error naming the tensor.
void check_forward_tensors(const DsaConfig& config, const DsaDispatch& dispatch,
                           const StepShape& shape, const DsaLayer& layer,
                           const DsaForwardTensors& tensors);

}  // namespace fovea::internal
