#include "fovea/device_tensors.h"

#include <algorithm>

#include "fovea/stream.h"
#include "src/core/check.h"

namespace fovea {
namespace {

// From the first element to the end of the last one.
size_t spanned_bytes(const TensorShape& shape) {
  if (shape.num_elements() == 0) return 0;
  int64_t last = 0;
  for (int axis = 0; axis < shape.rank; ++axis) {
    const auto i = static_cast<size_t>(axis);
    if (shape.stride[i] < 0) {
      internal::invalid("device_tensors",
                        "tensor = " + to_string(shape) + ", expected strides >= 0");
    }
    last += (shape.shape[i] - 1) * shape.stride[i];
  }
  return static_cast<size_t>(last + 1) * size_of(shape.dtype);
}

}  // namespace

DeviceTensors::DeviceTensors(const Device& device, Stream stream)
    : device_(device), stream_(stream) {}

DeviceTensors::Copy& DeviceTensors::copy_of(const ConstTensorView& host) {
  const size_t bytes = spanned_bytes(host);
  Copy& copy = copies_[{host.data, bytes}];
  if (copy.memory.data() != nullptr) return copy;
  // An empty tensor gets an address too: operators tell it from an absent one.
  copy.memory = DeviceBuffer(device_, std::max<size_t>(bytes, 1), stream_);
  copy.bytes = bytes;
  copy_bytes(copy.memory.data(), device_, host.data, Device::cpu(1), bytes, stream_);
  return copy;
}

ConstTensorView DeviceTensors::input(const ConstTensorView& host) {
  if (device_.kind == DeviceKind::kCpu || !host.defined()) return host;
  return {host, copy_of(host).memory.data()};
}

TensorView DeviceTensors::output(const TensorView& host) {
  if (device_.kind == DeviceKind::kCpu || !host.defined()) return host;
  Copy& copy = copy_of(host);
  copy.fetch_to = host.data;
  TensorView there = host;
  there.data = copy.memory.data();
  return there;
}

void DeviceTensors::fetch() {
  if (device_.kind == DeviceKind::kCpu) return;
  for (auto& [key, copy] : copies_) {
    if (copy.fetch_to == nullptr) continue;
    copy_bytes(copy.fetch_to, Device::cpu(1), copy.memory.data(), device_, copy.bytes, stream_);
  }
  synchronize(device_, stream_);
}

}  // namespace fovea
