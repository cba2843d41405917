#pragma once

#include <vector>

#include "fovea/dsa_backend.h"
#include "src/serving/dsa_step.h"

/// A step of the rows that context parallelism gives to one rank.
namespace fovea::internal {

/// Throws Error naming what contradicts the batch: a split is host data.
void check_context_split(const DsaConfig& config, const ForwardBatch& batch);

/// Requests with a row on this rank, and the sum of their KV lengths.
int64_t selected_requests(const ContextSplit& split);
int64_t selected_kv_len(const ContextSplit& split);

/// Of the i-th of them.
int64_t selected_rows(const ContextSplit& split, int64_t i);
int64_t selected_kv_len(const ContextSplit& split, int64_t i);

/// What a batch has that its device arrays do not say is written from the host, through `entries`:
/// room for max_rows + 1 and for max_requests values.
struct SplitWriter {
  Device device;
  Stream stream;
  std::vector<int32_t>* entries;
};

/// Inputs of a refresh over those requests, in arrays of the step. Page tables and the fields of
/// requests come out right; the length of a row does not follow from its place among the rows of
/// the rank.
MetadataTensors select_requests(const ForwardBatch& batch, const StepArrays& arrays,
                                const SplitWriter& writer);

/// Writes the fields of rows after that refresh.
void fill_split_rows(const ForwardBatch& batch, bool fresh_kv, int64_t topk,
                     const MetadataFields& fields, const SplitWriter& writer);

}  // namespace fovea::internal
