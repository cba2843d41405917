#include "python/src/imported_tensor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <vector>

#include "fovea/error.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

[[noreturn]] void refuse(const Label& label, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, label.text() + what);
}

[[noreturn]] void refuse_type(const Label& label, const std::string& type) {
  refuse(label, " has elements of type " + type +
                    ", expected bfloat16 (or its bits as uint16), float32, int32, int64 or uint8 "
                    "(or float8_e4m3fn, bool)");
}

std::string class_name(nb::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// "numpy.dtype(...)" and "torch.float8_e4m3fn" end in the name of the type.
std::string dtype_of(nb::handle object) {
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  const nb::object text = nb::steal(PyObject_Str(dtype.ptr()));
  const char* characters = text.is_valid() ? PyUnicode_AsUTF8(text.ptr()) : nullptr;
  if (characters == nullptr) PyErr_Clear();
  return characters == nullptr ? "" : characters;
}

// The class of torch's tensors; null while torch is not imported. Looked up until it is there: a
// module that is imported stays.
PyTypeObject* torch_tensor_type() {
  static PyTypeObject* known = nullptr;
  if (known != nullptr) return known;
  static PyObject* const name = PyUnicode_InternFromString("torch");
  PyObject* torch = PyDict_GetItemWithError(PyImport_GetModuleDict(), name);
  if (torch == nullptr) return nullptr;
  const nb::object type = nb::getattr(nb::handle(torch), "Tensor", nb::none());
  if (PyType_Check(type.ptr()) == 0) return nullptr;  // torch is being imported
  known = reinterpret_cast<PyTypeObject*>(nb::object(type).release().ptr());
  return known;
}

bool is_torch(nb::handle object) {
  PyTypeObject* type = torch_tensor_type();
  return type != nullptr && PyObject_TypeCheck(object.ptr(), type) != 0;
}

// Types that a buffer or an older DLPack cannot name, as the bits that it can: an object with the
// same memory, or none.
nb::object view_of_bits(nb::handle object) {
  const std::string dtype = dtype_of(object);
  const bool is_fp8 = dtype.ends_with("float8_e4m3fn");
  if (!is_fp8 && !dtype.ends_with("bfloat16")) return nb::none();
  if (is_torch(object)) {
    return is_fp8 ? object.attr("view")(nb::module_::import_("torch").attr("uint8")) : nb::none();
  }
  return object.attr("view")(is_fp8 ? "uint8" : "uint16");
}

// Type of a buffer with one of the struct module's codes; kNone: none that fovea has.
DType parse_format(std::string_view format, Py_ssize_t itemsize) {
  if (format.starts_with('@') || format.starts_with('=') || format.starts_with('<')) {
    format.remove_prefix(1);
  }
  if (format.size() != 1) return DType::kNone;
  switch (format[0]) {
    case 'B':
    case '?':
      return DType::kU8;
    case 'H':
      return DType::kBf16;
    case 'f':
      return DType::kF32;
    case 'i':
    case 'l':
    case 'q':
      return itemsize == 4 ? DType::kI32 : itemsize == 8 ? DType::kI64 : DType::kNone;
    default:
      return DType::kNone;
  }
}

DType dtype_of(const DlDataType& type) {
  if (type.lanes != 1) return DType::kNone;
  const int code = type.code;
  const int bits = type.bits;
  if (code == kDlInt && bits == 32) return DType::kI32;
  if (code == kDlInt && bits == 64) return DType::kI64;
  if (code == kDlFloat && bits == 32) return DType::kF32;
  if ((code == kDlBfloat || code == kDlUInt) && bits == 16) return DType::kBf16;
  if ((code == kDlUInt || code == kDlBool || code == kDlFloat8E4m3fn) && bits == 8) {
    return DType::kU8;
  }
  return DType::kNone;
}

// What torch offers for exchange without calls of Python; null for a release that has it not.
const DlExchangeApi* torch_exchange_api() {
  static const DlExchangeApi* known = nullptr;
  static bool is_known = false;
  PyTypeObject* type = torch_tensor_type();
  if (is_known || type == nullptr) return known;
  is_known = true;
  const nb::object capsule = nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)),
                                         "__dlpack_c_exchange_api__", nb::none());
  constexpr char kName[] = "dlpack_exchange_api";
  if (PyCapsule_IsValid(capsule.ptr(), kName) == 0) return nullptr;
  known = static_cast<const DlExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  while (known != nullptr && known->version.major > 1) known = known->previous;
  if (known != nullptr && known->version.major != 1) known = nullptr;
  return known;
}

}  // namespace

std::string text_of(nb::python_error& error) {
  const nb::object text = nb::steal(PyObject_Str(error.value().ptr()));
  if (!text.is_valid()) {
    PyErr_Clear();
    return "an exception without a text";
  }
  const char* characters = PyUnicode_AsUTF8(text.ptr());
  if (characters == nullptr) PyErr_Clear();
  return characters == nullptr ? "an exception without a text" : characters;
}

bool is_tensor(nb::handle object) {
  return Py_TYPE(object.ptr()) == torch_tensor_type() || PyObject_CheckBuffer(object.ptr()) != 0;
}

void* torch_stream(int ordinal) {
  void* stream = nullptr;
  const DlExchangeApi* api = torch_exchange_api();
  if (api != nullptr) {
    if (api->current_work_stream(kDlCuda, ordinal, &stream) != 0) throw nb::python_error();
    return stream;
  }
  const nb::object current =
      nb::module_::import_("torch").attr("cuda").attr("current_stream")(ordinal);
  return reinterpret_cast<void*>(nb::cast<uintptr_t>(current.attr("cuda_stream")));
}

ImportedTensor::ImportedTensor(const Label& label, nb::handle object, Lifetime lifetime)
    : object_(nb::borrow(object)) {
  try {
    if (!import_exchanged(label, object, lifetime) && !import_buffer(label, object)) {
      is_from_torch_ = python::is_torch(object);
      if (!nb::hasattr(object, "__dlpack__")) {
        refuse(label, " is of type " + class_name(object) +
                          ", expected a tensor: an object with __dlpack__ or the buffer protocol");
      }
      import_dlpack(label, object);
    }
    finish(label);
  } catch (...) {
    release();
    throw;
  }
}

ImportedTensor& ImportedTensor::operator=(ImportedTensor&& other) noexcept {
  if (this == &other) return *this;
  release();
  object_ = std::move(other.object_);
  view_ = other.view_;
  device_kind_ = other.device_kind_;
  ordinal_ = other.ordinal_;
  is_writable_ = other.is_writable_;
  is_from_torch_ = other.is_from_torch_;
  buffer_ = other.buffer_;
  has_buffer_ = std::exchange(other.has_buffer_, false);
  managed_ = std::exchange(other.managed_, nullptr);
  versioned_ = std::exchange(other.versioned_, nullptr);
  return *this;
}

void ImportedTensor::release() noexcept {
  if (std::exchange(has_buffer_, false)) PyBuffer_Release(&buffer_);
  if (DlManagedTensor* managed = std::exchange(managed_, nullptr)) {
    if (managed->deleter != nullptr) managed->deleter(managed);
  }
  if (DlManagedTensorVersioned* versioned = std::exchange(versioned_, nullptr)) {
    if (versioned->deleter != nullptr) versioned->deleter(versioned);
  }
}

bool ImportedTensor::import_buffer(const Label& label, nb::handle object) {
  if (!PyObject_CheckBuffer(object.ptr())) return false;
  nb::object exporter = nb::borrow(object);
  if (PyObject_GetBuffer(exporter.ptr(), &buffer_, PyBUF_RECORDS_RO) != 0) {
    PyErr_Clear();
    exporter = view_of_bits(object);
    if (exporter.is_none()) refuse_type(label, dtype_of(object));
    if (PyObject_GetBuffer(exporter.ptr(), &buffer_, PyBUF_RECORDS_RO) != 0) {
      throw nb::python_error();
    }
  }
  has_buffer_ = true;
  const char* format = buffer_.format == nullptr ? "B" : buffer_.format;
  const DType dtype = parse_format(format, buffer_.itemsize);
  if (dtype == DType::kNone || buffer_.itemsize != static_cast<Py_ssize_t>(size_of(dtype))) {
    const std::string name = dtype_of(object);
    refuse_type(label, name == "None" ? std::string("'") + format + "'" : name);
  }
  if (buffer_.ndim > kMaxRank) {
    refuse(label, " has " + std::to_string(buffer_.ndim) + " axes, expected at most " +
                      std::to_string(kMaxRank));
  }
  view_.dtype = dtype;
  view_.rank = buffer_.ndim;
  view_.data = buffer_.buf;
  is_writable_ = buffer_.readonly == 0;
  for (size_t axis = 0; axis < static_cast<size_t>(buffer_.ndim); ++axis) {
    view_.shape[axis] = buffer_.shape[axis];
    // Of an axis with one element nothing is asked.
    if (buffer_.shape[axis] > 1 && buffer_.strides[axis] % buffer_.itemsize != 0) {
      refuse(label, " has a stride of " + std::to_string(buffer_.strides[axis]) +
                        " bytes, expected a multiple of its elements' " +
                        std::to_string(buffer_.itemsize));
    }
    view_.stride[axis] = buffer_.strides[axis] / buffer_.itemsize;
  }
  return true;
}

// A tensor of torch itself, not of a class derived from it, which may be no memory at all. One that
// needs a gradient goes the other way, where torch refuses it.
bool ImportedTensor::import_exchanged(const Label& label, nb::handle object, Lifetime lifetime) {
  PyTypeObject* type = torch_tensor_type();
  if (type == nullptr || Py_TYPE(object.ptr()) != type) return false;
  const DlExchangeApi* api = torch_exchange_api();
  static PyObject* const kNeedsGradient = PyUnicode_InternFromString("requires_grad");
  if (api == nullptr) return false;
  const nb::object needs_gradient = nb::steal(PyObject_GetAttr(object.ptr(), kNeedsGradient));
  if (needs_gradient.ptr() != Py_False) {
    PyErr_Clear();
    return false;
  }
  if (lifetime == Lifetime::kOfObject && api->tensor_from_object != nullptr) {
    DlTensor tensor;
    if (api->tensor_from_object(object.ptr(), &tensor) != 0) {
      PyErr_Clear();  // import_dlpack says why
      return false;
    }
    take(label, tensor);
  } else {
    DlManagedTensorVersioned* versioned = nullptr;
    if (api->managed_tensor_from_object(object.ptr(), &versioned) != 0) {
      PyErr_Clear();
      return false;
    }
    hold(label, versioned);
  }
  is_from_torch_ = true;
  return true;
}

void ImportedTensor::hold(const Label& label, DlManagedTensorVersioned* versioned) {
  versioned_ = versioned;
  if (versioned->version.major != 1) {
    refuse(label,
           " gives DLPack of version " + std::to_string(versioned->version.major) + ", expected 1");
  }
  is_writable_ = (versioned->flags & kDlReadOnly) == 0;
  take(label, versioned->tensor);
}

void ImportedTensor::import_dlpack(const Label& label, nb::handle object) {
  nb::object capsule;
  try {
    nb::object exporter = nb::borrow(object);
    if (is_torch(object)) {
      const nb::object bits = view_of_bits(object);
      if (!bits.is_none()) exporter = bits;
    }
    const nb::object device = exporter.attr("__dlpack_device__")();
    const nb::object code = nb::steal(PyNumber_Long(nb::object(device[0]).ptr()));
    if (!code.is_valid()) throw nb::python_error();
    const int type = nb::cast<int>(code);
    // -1: no stream of the exporter waits, because the call runs on the stream where the memory is
    // used. Where that is unknown, the default stream (1) waits.
    const bool is_cuda = type == kDlCuda || type == kDlCudaManaged;
    nb::object stream = nb::none();
    if (is_cuda) stream = nb::int_(is_torch(object) ? -1 : 1);
    try {
      capsule = exporter.attr("__dlpack__")(nb::arg("stream") = stream,
                                            nb::arg("max_version") = nb::make_tuple(1, 0));
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      // An exporter from before version 1.
      capsule = exporter.attr("__dlpack__")(nb::arg("stream") = stream);
    }
  } catch (nb::python_error& error) {
    refuse(label, " gives no DLPack tensor: " + text_of(error));
  } catch (nb::cast_error&) {
    refuse(label, " gives no DLPack device");
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    auto* versioned = static_cast<DlManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    hold(label, versioned);
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
    managed_ = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    take(label, managed_->tensor);
  } else {
    refuse(label, " gives no DLPack capsule");
  }
}

void ImportedTensor::take(const Label& label, const DlTensor& tensor) {
  switch (tensor.device.type) {
    case kDlCpu:
    case kDlCudaHost:
      device_kind_ = DeviceKind::kCpu;
      break;
    case kDlCuda:
    case kDlCudaManaged:
      device_kind_ = DeviceKind::kCuda;
      ordinal_ = tensor.device.id;
      break;
    default:
      refuse(label, " is on a device of DLPack type " + std::to_string(tensor.device.type) +
                        ", expected the CPU or CUDA");
  }
  view_.dtype = dtype_of(tensor.dtype);
  if (view_.dtype == DType::kNone) refuse_type(label, dtype_of(object_));
  if (tensor.ndim < 0 || tensor.ndim > kMaxRank) {
    refuse(label, " has " + std::to_string(tensor.ndim) + " axes, expected at most " +
                      std::to_string(kMaxRank));
  }
  view_.rank = tensor.ndim;
  view_.data =
      tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  int64_t packed = 1;
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    const auto i = static_cast<size_t>(axis);
    view_.shape[i] = tensor.shape[axis];
    view_.stride[i] = tensor.strides == nullptr ? packed : tensor.strides[axis];
    packed *= std::max<int64_t>(tensor.shape[axis], 1);
  }
}

void ImportedTensor::finish(const Label& label) {
  // Where an axis has at most one element its stride says nothing and may be anything.
  int64_t packed = 1;
  const bool is_empty = view_.num_elements() == 0;
  for (int axis = view_.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<size_t>(axis);
    if (view_.shape[i] <= 1 || is_empty) view_.stride[i] = packed;
    packed *= std::max<int64_t>(view_.shape[i], 1);
  }
  if (is_empty) return;
  const auto address = reinterpret_cast<uintptr_t>(view_.data);
  if (address % size_of(view_.dtype) != 0) {
    refuse(label, " is not aligned to its elements; copy the tensor first");
  }
  for (size_t axis = 0; axis < static_cast<size_t>(view_.rank); ++axis) {
    if (view_.stride[axis] < 0) {
      refuse(label, " = " + to_string(view_) + ", expected strides >= 0; copy the tensor first");
    }
  }
  if (view_.rank > 0 && view_.stride[static_cast<size_t>(view_.rank - 1)] != 1) {
    refuse(label,
           " = " + to_string(view_) + ", expected a contiguous last axis; copy the tensor first");
  }
}

void ImportedTensor::require_writable(const Label& label) const {
  if (!is_writable_) refuse(label, " is read-only, expected a tensor that can be written");
  if (view_.num_elements() == 0) return;
  std::array<std::pair<int64_t, int64_t>, kMaxRank> axes;  // stride, extent
  size_t num_axes = 0;
  for (size_t axis = 0; axis < static_cast<size_t>(view_.rank); ++axis) {
    if (view_.shape[axis] > 1) axes[num_axes++] = {view_.stride[axis], view_.shape[axis]};
  }
  std::sort(axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(num_axes));
  int64_t reach = 1;  // elements from the first to the last of the axes so far
  for (size_t axis = 0; axis < num_axes; ++axis) {
    const auto& [stride, extent] = axes[axis];
    if (stride < reach) {
      refuse(label, " = " + to_string(view_) + " has elements that may share memory");
    }
    reach += stride * (extent - 1);
  }
}

}  // namespace fovea::python
