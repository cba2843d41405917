#pragma once

#include "fovea/dsa_backend.h"
#include "src/serving/dsa_step.h"

/// A step of the rows that context parallelism gives to one rank.
namespace fovea::internal {

/// Throws Error naming what contradicts the batch: a split is host data.
void check_context_split(const DsaConfig& config, const ForwardBatch& batch);

/// Requests with a row on this rank, and the sum of their KV lengths.
int64_t selected_requests(const ContextSplit& split);
int64_t selected_kv_len(const ContextSplit& split);

/// Inputs of a refresh over those requests, in arrays of the step. Page tables and the fields of
/// requests come out right; the length of a row does not follow from its place among the rows of
/// the rank.
MetadataTensors select_requests(const ForwardBatch& batch, const StepArrays& arrays);

/// Writes the fields of rows after that refresh.
void fill_split_rows(const ForwardBatch& batch, bool fresh_kv, int64_t topk,
                     const MetadataFields& fields);

}  // namespace fovea::internal
