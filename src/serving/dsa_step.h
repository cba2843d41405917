#pragma once

#include <cstdint>
#include <optional>

#include "fovea/dsa_backend.h"

/// What a step of a backend is made of.
namespace fovea::internal {

struct StepShape {
  int64_t num_requests = 0;   ///< R; with a context split those that have a row here.
  int64_t num_rows = 0;       ///< E
  int64_t padded_rows = 0;    ///< T >= E
  int64_t num_tokens = 0;     ///< Stored by every layer: E; with a context split all of the batch.
  int64_t padded_tokens = 0;  ///< Rows of k and index_k: T, or num_tokens.
  int64_t sum_kv_len = 0;     ///< Of num_requests; with host lengths only.
};

/// The arrays that begin_step writes, at the bounds of one bucket, at fixed addresses.
class StepArrays {
 public:
  StepArrays(const DsaConfig& config, int64_t max_requests, int64_t max_rows);

  int64_t max_rows() const { return fields_.row_to_request.shape[0]; }

  /// Exactly the arrays and extents that `mode` has for R requests, E rows and T padded rows: a
  /// refresh writes all of an array of rows, so that what device lengths say beyond E is cut.
  MetadataFields views(ForwardMode mode, int64_t requests, int64_t num_rows,
                       int64_t padded_rows) const;

  /// Room for the inputs of a refresh over the requests that a context split selects: i32 [R].
  struct SelectedInputs {
    TensorView seq_len, pool_row, ext_len;
  };
  SelectedInputs selected_inputs(int64_t requests) const;

  /// i32 [max rows]: out_cache_loc without the rows of no request.
  const TensorView& store_slots() const { return store_slots_; }

  /// i32 [8]: a MetadataReport.
  const TensorView& error_word() const { return error_word_; }

 private:
  void cut(const DsaConfig& config, int64_t max_requests, int64_t max_rows, Workspace memory,
           size_t* bytes);

  HostBuffer memory_;
  MetadataFields fields_;
  TensorView store_slots_, error_word_;
  SelectedInputs selected_;
};

/// A step between its begin and its last forward.
struct DsaStep {
  /// A step of any batch within the configuration's bounds.
  explicit DsaStep(const DsaConfig& config)
      : arrays(config, config.max_requests, config.max_rows) {}
  DsaStep(const DsaConfig& config, const StepBucket& bucket_in)
      : bucket(bucket_in),
        arrays(config, bucket_in.num_requests,
               bucket_in.num_requests * bucket_in.rows_per_request) {}

  std::optional<StepBucket> bucket;
  StepArrays arrays;
  bool begun = false;
  ForwardMode mode = ForwardMode::kDecode;
  DsaDispatch dispatch;
  StepShape shape;
  MetadataFields fields;  ///< Views of the live shapes.
  /// With `check`, what begin_step looked at; without error_word there was nothing to look at.
  MetadataCheckTensors checked;
  ConstTensorView positions;        ///< i32 [T], the caller's.
  ConstTensorView store_positions;  ///< i32 [padded_tokens], the caller's.
  ConstTensorView out_cache_loc;    ///< i32 [padded_tokens], the caller's, or store_slots.
};

/// Its error word; all zeros when nothing was checked.
MetadataReport report_of(const DsaStep& step);

}  // namespace fovea::internal
