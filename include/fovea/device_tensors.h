#pragma once

#include <map>
#include <utility>

#include "fovea/device.h"
#include "fovea/device_memory.h"
#include "fovea/export.h"
#include "fovea/tensor.h"

namespace fovea {

/// Host tensors in the memory of a device: what runs an operator there on tensors that a file or a
/// generator made.
///
///   DeviceTensors there(device);
///   tensors.q = there.input(q);        // q, out: host tensors
///   tensors.out = there.output(out);
///   plan.run(tensors, workspace);
///   there.fetch();                     // out has the result
///
/// On the CPU input() and output() are the tensor itself and fetch() does nothing. On a GPU each
/// tensor gets one copy that lives as long as this object, and the same view gets the same copy
/// again. Strides are kept, and so are the bytes between rows; negative strides are refused.
/// Everything is submitted to `stream`; fetch() waits for it. Not thread-safe.
class FOVEA_API DeviceTensors {
 public:
  explicit DeviceTensors(const Device& device, Stream stream = {});

  /// The copy of `host`, uploaded when it is first asked for. An absent view stays absent. Throws
  /// Error(kInvalidArgument) for a negative stride, Error(kOutOfMemory) and Error(kDevice).
  ConstTensorView input(const ConstTensorView& host);
  /// The same for a tensor that is written: it starts with the content of `host`, and fetch()
  /// brings it back.
  TensorView output(const TensorView& host);

  /// Copies every output back into its host tensor and waits. Throws Error(kDevice), also for what
  /// the work before it has failed with.
  void fetch();

  const Device& device() const noexcept { return device_; }

 private:
  struct Copy {
    DeviceBuffer memory;
    void* fetch_to = nullptr;  // null: an input
    size_t bytes = 0;
  };
  Copy& copy_of(const ConstTensorView& host);

  Device device_;
  Stream stream_;
  std::map<std::pair<const void*, size_t>, Copy> copies_;  // by host address and length
};

}  // namespace fovea
