#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "fovea/tensor.h"

namespace fovea::test {

/// An owned tensor for tests, packed, zero-filled.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<int64_t> shape);

  template <class T>
  static Tensor from(DType dtype, std::initializer_list<int64_t> shape,
                     const std::vector<T>& values) {
    Tensor tensor(dtype, shape);
    tensor.assign(values.data(), values.size() * sizeof(T));
    return tensor;
  }
  static Tensor i32(std::initializer_list<int64_t> shape, const std::vector<int32_t>& values) {
    return from(DType::kI32, shape, values);
  }
  static Tensor f32(std::initializer_list<int64_t> shape, const std::vector<float>& values) {
    return from(DType::kF32, shape, values);
  }
  static Tensor bf16(std::initializer_list<int64_t> shape, const std::vector<bf16_t>& values) {
    return from(DType::kBf16, shape, values);
  }

  TensorView view();
  ConstTensorView view() const;
  operator TensorView() { return view(); }             // NOLINT: tests read better
  operator ConstTensorView() const { return view(); }  // NOLINT

  template <class T>
  T* data() {
    return reinterpret_cast<T*>(bytes_.data());
  }
  template <class T>
  const T* data() const {
    return reinterpret_cast<const T*>(bytes_.data());
  }
  template <class T>
  std::vector<T> values() const {
    return std::vector<T>(data<T>(), data<T>() + bytes_.size() / sizeof(T));
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

  /// Sets every byte: 0xFF makes bf16, f32 and e4m3 elements NaN and integers -1.
  void fill_bytes(uint8_t byte);

 private:
  void assign(const void* data, size_t size);
  TensorShape shape_;
  std::vector<uint8_t> bytes_;
};

/// Memory that ends at an unreadable page (and starts after one): an access one byte outside kills
/// the process. The usable bytes end exactly at the rear page, so that the start may be misaligned
/// when `bytes` is not a multiple of the alignment.
class GuardedMemory {
 public:
  explicit GuardedMemory(size_t bytes);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  void* data() { return data_; }

 private:
  void* base_;
  size_t mapped_;
  void* data_;
  void* device_mapping_ = nullptr;
};

/// Address space without memory behind it until written: pools beyond 2^32 bytes of which few pages
/// are touched.
class SparseMapping {
 public:
  explicit SparseMapping(size_t bytes);
  ~SparseMapping();
  SparseMapping(const SparseMapping&) = delete;
  SparseMapping& operator=(const SparseMapping&) = delete;

  void* data() { return data_; }

 private:
  void* data_;
  size_t bytes_;
};

/// Number of allocations (operator new, malloc is not seen) of the process while the scope lives.
class AllocationCounter {
 public:
  AllocationCounter();
  ~AllocationCounter();
  int64_t count() const;
};

}  // namespace fovea::test
