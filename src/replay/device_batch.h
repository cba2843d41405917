#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "fovea/dsa_backend.h"
#include "src/replay/scheduler.h"
#include "src/replay/staged_tensor.h"

/// What a batch is made of, on the device, at fixed addresses.
namespace fovea::internal {

/// The arrays of one batch.
class DeviceBatch {
 public:
  DeviceBatch(const Device& device, int64_t max_requests, int64_t max_rows);

  /// Copies the arrays of `batch`, which lie on the host, and returns the batch with the copies in
  /// their place; host lengths and req_to_token stay as they are.
  ForwardBatch upload(const ForwardBatch& batch, Stream stream);

 private:
  StagedTensor seq_len_, pool_row_, ext_len_, positions_, out_cache_loc_;
};

/// The request table: the scheduler's own on the CPU, a copy of what requests use on a GPU.
class DeviceTable {
 public:
  explicit DeviceTable(const Device& device) : device_(device) {}

  /// Brings the rows of the step's requests up to date.
  void update(const Scheduler& scheduler, const StepBatch& batch, Stream stream);

  /// The next updates copy whole rows: entries have changed that an earlier step has used.
  void forget() { held_.assign(held_.size(), {}); }

  /// i32 [rows, W]; the same address always.
  ConstTensorView view() const { return view_; }

 private:
  struct Held {
    int64_t request = -1;
    int64_t columns = 0;  // that the device has
  };

  Device device_;
  DeviceBuffer memory_;     // GPU
  std::vector<Held> held_;  // per row; GPU
  ConstTensorView view_;
};

}  // namespace fovea::internal
