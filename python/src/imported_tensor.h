#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "fovea/device.h"
#include "fovea/tensor.h"
#include "python/src/dlpack.h"

namespace fovea::python {

/// A tensor of Python code, seen without a copy: an object with the buffer protocol or with
/// __dlpack__. Keeps the memory alive as long as it lives. Create, move and destroy it with the GIL
/// held.
class ImportedTensor {
 public:
  /// `label` is "<operator>: <argument>". Throws Error(kInvalidArgument) under it for an object
  /// that is no tensor, a type that fovea has not, more than five axes, a last axis that is not
  /// contiguous, a negative or uneven stride, or a misaligned address.
  ImportedTensor(const std::string& label, nanobind::handle object);
  ~ImportedTensor() { release(); }
  ImportedTensor(ImportedTensor&& other) noexcept { *this = std::move(other); }
  ImportedTensor& operator=(ImportedTensor&& other) noexcept;

  const TensorView& view() const noexcept { return view_; }
  const nanobind::object& object() const noexcept { return object_; }
  DeviceKind device_kind() const noexcept { return device_kind_; }
  int ordinal() const noexcept { return ordinal_; }

  /// Refuses, under the label, memory that may not be written or that two elements share.
  void require_writable(const std::string& label) const;

 private:
  bool import_buffer(const std::string& label, nanobind::handle object);
  bool import_exchanged(const std::string& label, nanobind::handle object);
  void import_dlpack(const std::string& label, nanobind::handle object);
  void hold(const std::string& label, DlManagedTensorVersioned* versioned);
  void take(const std::string& label, const DlTensor& tensor);
  void finish(const std::string& label);
  void release() noexcept;

  nanobind::object object_;
  TensorView view_;
  DeviceKind device_kind_ = DeviceKind::kCpu;
  int ordinal_ = 0;
  bool is_writable_ = true;
  // What keeps the memory: one of them.
  Py_buffer buffer_{};
  bool has_buffer_ = false;
  DlManagedTensor* managed_ = nullptr;
  DlManagedTensorVersioned* versioned_ = nullptr;
};

/// Whether `object` is a tensor of torch.
bool is_torch(nanobind::handle object);

/// The stream that torch uses now on a GPU; torch is imported.
void* torch_stream(int ordinal);

}  // namespace fovea::python
