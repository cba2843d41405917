#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "fovea/device_memory.h"
#include "fovea/tensor.h"

namespace fovea::internal {

/// A tensor that the host fills or reads, row by row, and the device computes with. On the CPU both
/// are one memory, and copies do nothing. Fixed addresses. Uninitialised, but for a GPU's memory,
/// which the default stream fills with zeros: rows of padding are computed with, never uploaded.
class StagedTensor {
 public:
  StagedTensor() = default;
  /// Throws Error(kOutOfMemory).
  StagedTensor(const Device& device, DType dtype, std::initializer_list<int64_t> shape);

  const Device& device() const { return device_; }

  /// Row `row` of the host's side.
  template <class T>
  std::span<T> row(int64_t row) {
    return {static_cast<T*>(host_) + row * row_elements_, static_cast<size_t>(row_elements_)};
  }

  /// Rows 0..rows-1 of either side.
  TensorView host(int64_t rows) const { return view(host_, rows); }
  TensorView on_device(int64_t rows) const { return view(device_data_, rows); }

  /// One row, without the first axis.
  TensorView row_on_device(int64_t row) const;

  /// Copies rows [begin, end) in the order of `stream`. The host may touch them again once the
  /// stream has passed the copy.
  void upload(int64_t begin, int64_t end, Stream stream);
  void download(int64_t begin, int64_t end, Stream stream);

 private:
  TensorView view(void* data, int64_t rows) const;

  Device device_;
  TensorShape shape_;
  int64_t row_elements_ = 0;
  int64_t row_bytes_ = 0;
  DeviceBuffer device_memory_;
  HostBuffer host_memory_;  // GPU
  void* device_data_ = nullptr;
  void* host_ = nullptr;
};

}  // namespace fovea::internal
