#include "src/replay/staged_tensor.h"

#include "src/core/check.h"

namespace fovea::internal {
namespace {

constexpr Device kHost = {};

std::byte* at(void* data, int64_t offset) { return static_cast<std::byte*>(data) + offset; }

}  // namespace

StagedTensor::StagedTensor(const Device& device, DType dtype, std::initializer_list<int64_t> shape)
    : device_(device), shape_(packed_shape(dtype, shape)) {
  row_elements_ = 1;
  for (int axis = 1; axis < shape_.rank; ++axis) row_elements_ *= shape_.shape[axis];
  row_bytes_ = row_elements_ * static_cast<int64_t>(size_of(dtype));
  const auto bytes = static_cast<size_t>(shape_.shape[0] * row_bytes_);
  device_memory_.reserve(device, bytes);
  device_data_ = device_memory_.data();
  if (device.kind == DeviceKind::kCpu) {
    host_ = device_data_;
  } else {
    fill_bytes(device_data_, device, 0, bytes);
    host_memory_.reserve(bytes);
    host_ = host_memory_.data();
  }
}

TensorView StagedTensor::view(void* data, int64_t rows) const {
  FOVEA_DCHECK(rows <= shape_.shape[0]);
  TensorView result;
  static_cast<TensorShape&>(result) = shape_;
  result.data = data;
  result.shape[0] = rows;
  return result;
}

TensorView StagedTensor::row_on_device(int64_t row) const {
  TensorView result = view(at(device_data_, row * row_bytes_), 1);
  for (int axis = 1; axis < result.rank; ++axis) {
    result.shape[axis - 1] = result.shape[axis];
    result.stride[axis - 1] = result.stride[axis];
  }
  --result.rank;
  return result;
}

void StagedTensor::upload(int64_t begin, int64_t end, Stream stream) {
  if (host_ == device_data_ || begin >= end) return;
  copy_bytes(at(device_data_, begin * row_bytes_), device_, at(host_, begin * row_bytes_), kHost,
             static_cast<size_t>((end - begin) * row_bytes_), stream);
}

void StagedTensor::download(int64_t begin, int64_t end, Stream stream) {
  if (host_ == device_data_ || begin >= end) return;
  copy_bytes(at(host_, begin * row_bytes_), kHost, at(device_data_, begin * row_bytes_), device_,
             static_cast<size_t>((end - begin) * row_bytes_), stream);
}

}  // namespace fovea::internal
