#include "python/src/exported_tensor.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <string>

#include "python/src/dlpack.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

DlDataType dl_type(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::kU8:
      return {kDlUInt, bits, 1};
    case DType::kBf16:
      return {kDlBfloat, bits, 1};
    case DType::kF32:
      return {kDlFloat, bits, 1};
    default:
      return {kDlInt, bits, 1};
  }
}

DlDevice dl_device(const Device& device) {
  return device.kind == DeviceKind::kCpu ? DlDevice{kDlCpu, 0} : DlDevice{kDlCuda, device.ordinal};
}

// What a consumer holds: the struct, its axes and a reference to the owner of the memory.
template <class Managed>
struct Handed {
  Managed managed{};
  TensorView view;
  PyObject* owner = nullptr;

  static void release(Managed* managed) {
    auto* self = static_cast<Handed*>(managed->manager_context);
    if (Py_IsInitialized() != 0) {
      const nb::gil_scoped_acquire acquire;
      Py_DECREF(self->owner);
    }
    delete self;
  }
};

constexpr char kVersionedName[] = "dltensor_versioned";
constexpr char kName[] = "dltensor";

template <class Managed>
nb::object hand_out(const TensorView& view, const Device& device, nb::handle owner,
                    const char* name) {
  auto handed = std::make_unique<Handed<Managed>>();
  handed->view = view;
  Managed& managed = handed->managed;
  managed.manager_context = handed.get();
  managed.deleter = Handed<Managed>::release;
  DlTensor* tensor = nullptr;
  if constexpr (requires { managed.version; }) {
    managed.version = {1, 0};
  }
  tensor = &managed.tensor;
  *tensor = {view.data,
             dl_device(device),
             view.rank,
             dl_type(view.dtype),
             handed->view.shape.data(),
             handed->view.stride.data(),
             0};
  // An unused capsule takes its tensor along; a used one has another name.
  const auto destroy = [](PyObject* capsule) {
    const char* expected = requires { Managed{}.version; }
    ? kVersionedName : kName;
    if (PyCapsule_IsValid(capsule, expected) == 0) return;
    auto* unused = static_cast<Managed*>(PyCapsule_GetPointer(capsule, expected));
    unused->deleter(unused);
  };
  nb::object capsule = nb::steal(PyCapsule_New(&managed, name, destroy));
  if (!capsule.is_valid()) throw nb::python_error();
  handed->owner = owner.inc_ref().ptr();
  handed.release();  // NOLINT: the capsule owns it
  return capsule;
}

[[noreturn]] void raise(PyObject* type, const char* text) {
  PyErr_SetString(type, text);
  throw nb::python_error();
}

}  // namespace

nb::tuple ExportedTensor::shape() const {
  nb::list extents;
  for (int axis = 0; axis < view_.rank; ++axis)
    extents.append(view_.shape[static_cast<size_t>(axis)]);
  return nb::tuple(extents);
}

nb::tuple ExportedTensor::dlpack_device() const {
  const DlDevice device = dl_device(device_);
  return nb::make_tuple(static_cast<int>(device.type), device.id);
}

nb::object ExportedTensor::dlpack(nb::object max_version) const {
  if (!max_version.is_none() && nb::cast<int>(max_version[0]) >= 1) {
    return hand_out<DlManagedTensorVersioned>(view_, device_, owner_, kVersionedName);
  }
  return hand_out<DlManagedTensor>(view_, device_, owner_, kName);
}

nb::dict ExportedTensor::array_interface() const {
  if (device_.kind != DeviceKind::kCpu) {
    raise(PyExc_AttributeError, "memory of a GPU has no __array_interface__; use __dlpack__");
  }
  const char* type = "|u1";
  if (view_.dtype == DType::kBf16) type = "<u2";
  if (view_.dtype == DType::kF32) type = "<f4";
  if (view_.dtype == DType::kI32) type = "<i4";
  if (view_.dtype == DType::kI64) type = "<i8";
  nb::list strides;
  for (int axis = 0; axis < view_.rank; ++axis) {
    strides.append(view_.stride[static_cast<size_t>(axis)] *
                   static_cast<int64_t>(size_of(view_.dtype)));
  }
  nb::dict result;
  result["shape"] = shape();
  result["typestr"] = type;
  result["data"] = nb::make_tuple(reinterpret_cast<uintptr_t>(view_.data), false);
  result["strides"] = nb::tuple(strides);
  result["version"] = 3;
  return result;
}

void bind_exported_tensor(nb::module_& module) {
  nb::class_<ExportedTensor>(module, "TensorView",
                             "Memory of the library, used where it is: torch.from_dlpack(view), "
                             "view.numpy(), or as an argument. Keeps its owner alive.")
      .def_prop_ro("shape", &ExportedTensor::shape, nb::sig("def shape(self) -> tuple[int, ...]"),
                   "Extents of the axes.")
      .def_prop_ro(
          "dtype",
          [](const ExportedTensor& self) { return std::string(to_string(self.view().dtype)); },
          "\"u8\", \"i32\", \"i64\", \"f32\" or \"bf16\".")
      .def_prop_ro(
          "device", [](const ExportedTensor& self) { return to_string(self.device()); },
          "\"cpu\" or \"cuda:N\".")
      .def(
          "numpy",
          [](nb::object self) {
            const auto& tensor = nb::cast<const ExportedTensor&>(self);
            if (tensor.device().kind != DeviceKind::kCpu) {
              raise(PyExc_BufferError, "memory of a GPU cannot be an array of numpy");
            }
            nb::object array = nb::module_::import_("numpy").attr("asarray")(self);
            if (tensor.view().dtype != DType::kBf16) return array;
            return nb::object(
                array.attr("view")(nb::module_::import_("ml_dtypes").attr("bfloat16")));
          },
          "The same memory as an array of numpy; bf16 as ml_dtypes.bfloat16.")
      .def(
          "__dlpack__",
          [](const ExportedTensor& self, nb::object /*stream*/, nb::object max_version,
             nb::object device, nb::object copy) {
            if (!copy.is_none() && nb::cast<bool>(copy)) {
              raise(PyExc_BufferError, "the memory is handed out as it is, not as a copy");
            }
            if (!device.is_none() && !device.equal(self.dlpack_device())) {
              raise(PyExc_BufferError, "the memory is on another device");
            }
            return self.dlpack(std::move(max_version));
          },
          nb::kw_only(), nb::arg("stream") = nb::none(), nb::arg("max_version") = nb::none(),
          nb::arg("dl_device") = nb::none(), nb::arg("copy") = nb::none())
      .def("__dlpack_device__", &ExportedTensor::dlpack_device)
      .def_prop_ro("__array_interface__", &ExportedTensor::array_interface);
}

}  // namespace fovea::python
