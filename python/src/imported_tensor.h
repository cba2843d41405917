#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "fovea/device.h"
#include "fovea/tensor.h"
#include "python/src/dlpack.h"
#include "python/src/label.h"

namespace fovea::python {

/// The text of a Python exception, which is dropped.
std::string text_of(nanobind::python_error& error);

/// How long the memory of an imported tensor stays.
enum class Lifetime {
  kOfObject,  ///< As long as the object has it: enough for one call.
  kOwned,     ///< As long as the imported tensor, even when the object is given other memory.
};

/// A tensor of Python code, seen without a copy: an object with the buffer protocol or with
/// __dlpack__. Keeps the object alive as long as it lives. Create, move and destroy it with the GIL
/// held.
class ImportedTensor {
 public:
  /// Throws Error(kInvalidArgument) under the label for an object that is no tensor, a type that
  /// fovea has not, more than five axes, a last axis that is not contiguous, a negative or uneven
  /// stride, or a misaligned address.
  ImportedTensor(const Label& label, nanobind::handle object, Lifetime lifetime);
  ~ImportedTensor() { release(); }
  ImportedTensor(ImportedTensor&& other) noexcept { *this = std::move(other); }
  ImportedTensor& operator=(ImportedTensor&& other) noexcept;

  const TensorView& view() const noexcept { return view_; }
  const nanobind::object& object() const noexcept { return object_; }
  DeviceKind device_kind() const noexcept { return device_kind_; }
  int ordinal() const noexcept { return ordinal_; }
  bool is_writable() const noexcept { return is_writable_; }
  bool is_from_torch() const noexcept { return is_from_torch_; }

  /// Refuses, under the label, memory that may not be written or that two elements share.
  void require_writable(const Label& label) const;

 private:
  bool import_buffer(const Label& label, nanobind::handle object);
  bool import_exchanged(const Label& label, nanobind::handle object, Lifetime lifetime);
  void import_dlpack(const Label& label, nanobind::handle object);
  void hold(const Label& label, DlManagedTensorVersioned* versioned);
  void take(const Label& label, const DlTensor& tensor);
  void finish(const Label& label);
  void release() noexcept;

  nanobind::object object_;
  TensorView view_;
  DeviceKind device_kind_ = DeviceKind::kCpu;
  int ordinal_ = 0;
  bool is_writable_ = true;
  bool is_from_torch_ = false;
  // What keeps the memory: one of them.
  Py_buffer buffer_{};
  bool has_buffer_ = false;
  DlManagedTensor* managed_ = nullptr;
  DlManagedTensorVersioned* versioned_ = nullptr;
};

/// Whether `object` is surely a tensor, and nothing else.
bool is_tensor(nanobind::handle object);

/// The stream that torch uses now on a GPU; torch is imported.
void* torch_stream(int ordinal);

}  // namespace fovea::python
