#pragma once

#include <nanobind/nanobind.h>

#include "fovea/device.h"
#include "fovea/tensor.h"

namespace fovea::python {

/// Memory of the library as a tensor that other packages use where it is: DLPack, and on the CPU
/// numpy's array interface. What owns the memory lives as long as any of them.
class ExportedTensor {
 public:
  ExportedTensor(const TensorView& view, const Device& device, nanobind::object owner)
      : view_(view), device_(device), owner_(std::move(owner)) {}

  const TensorView& view() const noexcept { return view_; }
  const Device& device() const noexcept { return device_; }

  nanobind::tuple shape() const;
  nanobind::tuple dlpack_device() const;
  /// A capsule of the form that `max_version` asks for: (1, 0) and up the versioned one.
  nanobind::object dlpack(nanobind::object max_version) const;
  /// bf16 as uint16. Raises AttributeError for memory of a GPU.
  nanobind::dict array_interface() const;

 private:
  TensorView view_;
  Device device_;
  nanobind::object owner_;
};

/// The class TensorView of the module.
void bind_exported_tensor(nanobind::module_& module);

}  // namespace fovea::python
