#pragma once

#include <cstdint>
#include <optional>

#include "fovea/device_memory.h"
#include "fovea/dsa_backend.h"
#include "src/serving/step_lengths.h"
#include "src/serving/step_memory.h"

/// What a step of a backend is made of.
namespace fovea::internal {

/// The arrays that begin_step writes, at the bounds of one bucket, at fixed addresses.
class StepArrays {
 public:
  /// Throws Error(kOutOfMemory).
  StepArrays(const DsaConfig& config, int64_t max_requests, int64_t max_rows, const StepHome& home);

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

  DeviceBuffer memory_;
  MetadataFields fields_;
  TensorView store_slots_, error_word_;
  SelectedInputs selected_;
};

/// A step between its begin and its last forward.
struct DsaStep {
  /// A step of any batch within the configuration's bounds.
  DsaStep(const DsaConfig& config, const StepHome& home)
      : DsaStep(config, home, config.max_requests, config.max_rows) {}
  DsaStep(const DsaConfig& config, const StepHome& home, const StepBucket& bucket_in)
      : DsaStep(config, home, bucket_in.num_requests,
                bucket_in.num_requests * bucket_in.rows_per_request) {
    bucket = bucket_in;
  }

  Device device;
  std::optional<StepBucket> bucket;
  StepArrays arrays;
  StepLengths lengths;  ///< For the profile of a GPU.
  bool begun = false;
  ForwardMode mode = ForwardMode::kDecode;
  DsaDispatch dispatch;
  StepShape shape;
  Stream stream;          ///< Of the last begin_step.
  MetadataFields fields;  ///< Views of the live shapes.
  /// With `check`, what begin_step looked at; without error_word there was nothing to look at.
  MetadataCheckTensors checked;
  ConstTensorView positions;        ///< i32 [T], the caller's.
  ConstTensorView store_positions;  ///< i32 [padded_tokens], the caller's.
  ConstTensorView out_cache_loc;    ///< i32 [padded_tokens], the caller's, or store_slots.

  /// Metadata whose lengths the host may read: of the live rows, or what it knows of them.
  const MetadataFields& host_fields() const {
    return device.kind == DeviceKind::kCpu ? fields : lengths.fields();
  }

 private:
  DsaStep(const DsaConfig& config, const StepHome& home, int64_t max_requests, int64_t max_rows)
      : device(home.device),
        arrays(config, max_requests, max_rows, home),
        lengths(home.device.kind == DeviceKind::kCpu ? 0 : max_requests,
                home.device.kind == DeviceKind::kCpu ? 0 : max_rows) {}
};

/// Its error word; all zeros when nothing was checked. Waits for the stream of its last begin_step.
/// Throws Error(kInvalidArgument) while that stream is being captured.
MetadataReport report_of(const DsaStep& step);

}  // namespace fovea::internal
