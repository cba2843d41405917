#include "python/src/python_call_tensors.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <utility>

#include "fovea/error.h"
#include "python/src/workspaces.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

std::string device_name(DeviceKind kind, int ordinal) {
  return kind == DeviceKind::kCpu ? "cpu" : "cuda:" + std::to_string(ordinal);
}

constexpr std::array<DType, 5> kTypes = {DType::kU8, DType::kI32, DType::kI64, DType::kF32,
                                         DType::kBf16};

// How a package makes a tensor. Looked up once; modules that are imported stay.
class Maker {
 public:
  Maker(const char* module, const char* empty, const char* bf16_module, const char* bf16)
      : zeros_(nb::module_::import_(module).attr("zeros")),
        empty_(nb::module_::import_(module).attr(empty)),
        dtype_(nb::make_tuple("dtype")),
        dtype_and_device_(nb::make_tuple("dtype", "device")) {
    const nb::module_ types = nb::module_::import_(module);
    for (const DType dtype : kTypes) {
      const char* name = dtype == DType::kU8    ? "uint8"
                         : dtype == DType::kI32 ? "int32"
                         : dtype == DType::kI64 ? "int64"
                                                : "float32";
      types_.push_back(dtype == DType::kBf16 ? nb::module_::import_(bf16_module).attr(bf16)
                                             : nb::object(types.attr(name)));
    }
  }

  static const Maker& numpy() {
    static const auto* maker = new Maker("numpy", "empty", "ml_dtypes", "bfloat16");
    return *maker;
  }
  static const Maker& torch() {
    // With strides because empty() takes half as long again.
    static const auto* maker = new Maker("torch", "empty_strided", "torch", "bfloat16");
    return *maker;
  }

  /// numpy has no devices.
  nb::object operator()(DType dtype, const std::vector<int64_t>& shape, bool zeroed,
                        nb::handle device = {}) const {
    const nb::tuple extents = tuple_of(shape);
    nb::tuple strides;
    PyObject* arguments[4] = {extents.ptr()};
    size_t count = 1;
    if (!zeroed && device.is_valid()) {
      strides = tuple_of(packed_strides(shape));
      arguments[count++] = strides.ptr();
    }
    const size_t positional = count;
    arguments[count++] = type(dtype).ptr();
    if (device.is_valid()) arguments[count++] = device.ptr();
    const nb::tuple& keywords = device.is_valid() ? dtype_and_device_ : dtype_;
    nb::object tensor = nb::steal(PyObject_Vectorcall((zeroed ? zeros_ : empty_).ptr(), arguments,
                                                      positional, keywords.ptr()));
    if (!tensor.is_valid()) throw nb::python_error();
    return tensor;
  }

 private:
  static nb::tuple tuple_of(const std::vector<int64_t>& values) {
    nb::tuple tuple = nb::steal<nb::tuple>(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; i < values.size(); ++i) {
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(values[i]));
    }
    return tuple;
  }
  static std::vector<int64_t> packed_strides(const std::vector<int64_t>& shape) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t axis = shape.size(); axis-- > 1;) {
      strides[axis - 1] = strides[axis] * std::max<int64_t>(shape[axis], 1);
    }
    return strides;
  }

  const nb::object& type(DType dtype) const {
    return types_[static_cast<size_t>(std::find(kTypes.begin(), kTypes.end(), dtype) -
                                      kTypes.begin())];
  }

  nb::object zeros_, empty_;
  nb::tuple dtype_, dtype_and_device_;  // names of keywords
  std::vector<nb::object> types_;
};

// torch's device objects, the CPU first. The GIL is held.
nb::handle torch_device(DeviceKind kind, int ordinal) {
  static auto* const known = new std::vector<nb::object>;
  const auto number = kind == DeviceKind::kCpu ? size_t{0} : static_cast<size_t>(ordinal) + 1;
  while (known->size() <= number) {
    const int next = static_cast<int>(known->size()) - 1;
    const std::string name = device_name(next < 0 ? DeviceKind::kCpu : DeviceKind::kCuda, next);
    known->push_back(nb::module_::import_("torch").attr("device")(name.c_str()));
  }
  return (*known)[number];
}

const NamedTensor* find_in(const std::vector<NamedTensor>& tensors, std::string_view name) {
  for (const NamedTensor& entry : tensors) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

std::vector<std::string> names_of(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> names;
  for (const NamedTensor& entry : tensors) names.push_back(entry.name);
  return names;
}

// Whether an exception of Python says that there is not enough memory.
bool is_out_of_memory(const nb::python_error& error) {
  if (error.matches(PyExc_MemoryError)) return true;
  return std::string_view(Py_TYPE(error.value().ptr())->tp_name).ends_with("OutOfMemoryError");
}

}  // namespace

PythonCallTensors::PythonCallTensors(std::string op, nb::dict inputs, nb::dict given,
                                     nb::sequence unwanted, nb::object stream)
    : op_(std::move(op)), stream_(std::move(stream)) {
  const auto add_all = [&](const nb::dict& source, std::vector<NamedTensor>* target) {
    for (const auto& [key, object] : source) {
      if (!object.is_none()) add(nb::cast<std::string>(key), object, target);
    }
  };
  add_all(inputs, &inputs_);
  add_all(given, &given_);
  require_writable_results();
  for (const nb::handle name : unwanted) unwanted_.push_back(nb::cast<std::string>(name));
}

void PythonCallTensors::add(std::string_view name, nb::handle object,
                            std::vector<NamedTensor>* tensors) {
  place(name, tensors->emplace_back(label(name), object, lifetime_).tensor);
}

void PythonCallTensors::place(std::string_view name, const ImportedTensor& tensor) {
  uses_torch_ = uses_torch_ || tensor.is_from_torch();
  if (placed_by_.empty()) {
    device_kind_ = tensor.device_kind();
    ordinal_ = tensor.ordinal();
    placed_by_ = name;
  } else if (device_kind_ != tensor.device_kind() || ordinal_ != tensor.ordinal()) {
    throw Error(ErrorCode::kInvalidArgument,
                label(name).text() + " is on " +
                    device_name(tensor.device_kind(), tensor.ordinal()) + " and " + placed_by_ +
                    " on " + device_name(device_kind_, ordinal_) + ", expected one device");
  }
}

void PythonCallTensors::require_writable_results() const {
  for (const NamedTensor& entry : given_) entry.tensor.require_writable(label(entry.name));
}

Device PythonCallTensors::device(int num_threads) const {
  if (device_kind_ == DeviceKind::kCpu) return Device::cpu(num_threads);
  try {
    return Device::cuda(ordinal_);
  } catch (const Error& error) {
    const std::string text = error.what();
    throw Error(error.code(), label(placed_by_).text() + " is on a GPU" +
                                  text.substr(std::min(text.find(": "), text.size())));
  }
}

void PythonCallTensors::require_device(const Device& expected) const {
  const bool is_there = expected.kind == device_kind_ &&
                        (device_kind_ == DeviceKind::kCpu || expected.ordinal == ordinal_);
  if (is_there || placed_by_.empty()) return;
  throw Error(ErrorCode::kInvalidArgument, label(placed_by_).text() + " is on " +
                                               device_name(device_kind_, ordinal_) + ", expected " +
                                               to_string(expected));
}

std::vector<std::string> PythonCallTensors::names() const { return names_of(inputs_); }

ConstTensorView PythonCallTensors::find(const std::string& name) const {
  const NamedTensor* found = find_in(inputs_, name);
  return found == nullptr ? ConstTensorView{} : ConstTensorView(found->tensor.view());
}

const int32_t* PythonCallTensors::values(const std::string& name) {
  if (device_kind_ != DeviceKind::kCpu) {
    throw Error(ErrorCode::kUnsupported,
                label(name).text() + " is on " + device_name(device_kind_, ordinal_) +
                    ", but the shape of a result follows from its elements, and no call waits for "
                    "a GPU; pass it on the CPU with the other tensors");
  }
  return static_cast<const int32_t*>(find(name).data);
}

std::vector<std::string> PythonCallTensors::given_outputs() const { return names_of(given_); }

void PythonCallTensors::expect_outputs(std::initializer_list<std::string_view> names) const {
  for (const NamedTensor& entry : given_) {
    if (std::find(names.begin(), names.end(), entry.name) != names.end()) continue;
    std::string known;
    for (const std::string_view name : names) {
      known += (known.empty() ? "" : ", ") + std::string(name);
    }
    throw Error(ErrorCode::kInvalidArgument,
                op_ + ": unknown output '" + entry.name + "'; it has: " + known);
  }
}

bool PythonCallTensors::is_given(std::string_view name) const {
  return find_in(given_, name) != nullptr;
}

TensorView PythonCallTensors::given_output(const std::string& name) const {
  const NamedTensor* found = find_in(given_, name);
  return found == nullptr ? TensorView{} : found->tensor.view();
}

bool PythonCallTensors::wants(const std::string& name) const {
  return std::find(unwanted_.begin(), unwanted_.end(), name) == unwanted_.end();
}

nb::object PythonCallTensors::make(DType dtype, const std::vector<int64_t>& shape,
                                   bool zeroed) const {
  if (!uses_torch_) return Maker::numpy()(dtype, shape, zeroed);
  const nb::handle device = torch_device(device_kind_, ordinal_);
  if (device_kind_ == DeviceKind::kCpu || stream_.is_none()) {
    return Maker::torch()(dtype, shape, zeroed, device);
  }
  // Made where it is used: the zeros come before the results, and torch gives the memory to nobody
  // before that stream is done with it.
  const nb::object cuda = nb::module_::import_("torch").attr("cuda");
  const nb::object place = cuda.attr("ExternalStream")(stream_, nb::arg("device") = device);
  const nb::object context = cuda.attr("stream")(place);
  context.attr("__enter__")();
  struct Leave {
    const nb::object& context;
    ~Leave() {
      nb::error_scope keep;
      try {
        context.attr("__exit__")(nb::none(), nb::none(), nb::none());
      } catch (nb::python_error&) {
        // The stream that was current could not be set again; the next call of torch says so.
      }
    }
  } leave{context};
  return Maker::torch()(dtype, shape, zeroed, device);
}

TensorView PythonCallTensors::output(const std::string& name, DType dtype,
                                     const std::vector<int64_t>& shape) {
  return provide(name, dtype, shape, true);
}

TensorView PythonCallTensors::written_output(const std::string& name, DType dtype,
                                             const std::vector<int64_t>& shape) {
  return provide(name, dtype, shape, false);
}

TensorView PythonCallTensors::provide(const std::string& name, DType dtype,
                                      const std::vector<int64_t>& shape, bool zeroed) {
  if (device_kind_ == DeviceKind::kCuda && !uses_torch_) {
    throw Error(ErrorCode::kInvalidArgument,
                label(name).text() +
                    " is not given, and no tensor of torch says how to make it on a GPU; "
                    "pass it as out");
  }
  nb::object object;
  try {
    object = make(dtype, shape, zeroed);
  } catch (nb::python_error& error) {
    if (!is_out_of_memory(error)) throw;
    throw Error(ErrorCode::kOutOfMemory,
                label(name).text() + " could not be made: " + text_of(error));
  }
  return provided_.emplace_back(label(name), object, lifetime_).tensor.view();
}

TensorView PythonCallTensors::update(const std::string& name) {
  const ImportedTensor& tensor = find_in(inputs_, name)->tensor;
  tensor.require_writable(label(name));
  return tensor.view();
}

nb::object PythonCallTensors::result(std::string_view name) const {
  const NamedTensor* found = find_in(given_, name);
  if (found == nullptr) found = find_in(provided_, name);
  return found == nullptr ? nb::none() : found->tensor.object();
}

nb::dict PythonCallTensors::results() const {
  nb::dict results;
  for (const auto* tensors : {&given_, &provided_}) {
    for (const NamedTensor& entry : *tensors) results[entry.name.c_str()] = entry.tensor.object();
  }
  return results;
}

Stream PythonCallTensors::stream() const {
  if (device_kind_ == DeviceKind::kCpu) return {};
  if (!stream_.is_none()) return {reinterpret_cast<void*>(nb::cast<uintptr_t>(stream_))};
  return {uses_torch_ ? torch_stream(ordinal_) : nullptr};
}

void PythonCallTensors::run(size_t workspace_bytes,
                            const std::function<void(Workspace, Stream)>& work) {
  const Stream on = stream();
  const nb::gil_scoped_release release;
  const WorkspaceLease lease({device_kind_, ordinal_, 1}, workspace_bytes, on);
  work(lease.workspace(), on);
}

}  // namespace fovea::python
