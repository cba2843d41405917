#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/metadata.h"
#include "src/serving/dsa_step.h"
#include "src/serving/operator_caller.h"
#include "src/serving/step_lengths.h"

/// A step of a backend whose layers need lengths, page table and slots, and no dispatch.
namespace fovea::internal {

/// What such a backend bounds.
struct RowBounds {
  int64_t page_size = 0;
  int64_t table_width = 0;
  int64_t max_requests = 0;
  int64_t max_rows = 0;
  int64_t rows_per_request = 1;
};

/// What StepArrays and the metadata operators need to know.
DsaConfig metadata_config(const RowBounds& bounds);

/// metadata_refresh of every mode, by mode.
std::vector<MetadataRefresh> refresh_plans(const DsaConfig& config, const Device& device,
                                           const OperatorOptions& options);

/// check_forward_batch in the name of backend `op`, which has no context split for the reason
/// `no_split`.
void check_row_batch(const char* op, const char* no_split, const DsaConfig& config,
                     const ForwardBatch& batch, const std::optional<StepBucket>& bucket,
                     int32_t kv_len_delta);

/// check_bucket in the name of backend `op`.
void check_row_bucket(const char* op, const DsaConfig& config, const StepBucket& bucket);

/// The first `rows` rows; absent stays absent.
inline ConstTensorView first_rows(const ConstTensorView& view, int64_t rows) {
  return view.defined() ? slice_rows(view, 0, rows) : view;
}

/// A step between its begin and its last forward.
struct RowStep {
  /// A step of any batch within the bounds.
  RowStep(const DsaConfig& config, const StepHome& home);
  RowStep(const DsaConfig& config, const StepHome& home, const StepBucket& bucket);

  Device device;
  std::optional<StepBucket> bucket;
  StepArrays arrays;
  StepLengths lengths;  ///< For the profile of a GPU.
  bool begun = false;
  ForwardMode mode = ForwardMode::kDecode;
  int64_t num_requests = 0, num_rows = 0, padded_rows = 0;
  MetadataFields fields;
  ConstTensorView store_slots;  ///< out_cache_loc without rows of no request.

  /// Metadata whose lengths the host may read: of the live rows, or what it knows of them.
  const MetadataFields& host_fields() const {
    return device.kind == DeviceKind::kCpu ? fields : lengths.fields();
  }

 private:
  RowStep(const DsaConfig& config, const StepHome& home, int64_t max_requests, int64_t max_rows);
};

/// Refreshes the arrays of `step` for a batch that has been checked.
void begin_rows(const DsaConfig& config, const std::vector<MetadataRefresh>& refresh,
                const ForwardBatch& batch, int32_t kv_len_delta, OperatorCaller& caller,
                RowStep* step);

}  // namespace fovea::internal
