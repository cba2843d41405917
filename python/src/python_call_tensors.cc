#include "python/src/python_call_tensors.h"

#include <algorithm>
#include <utility>

#include "fovea/device_memory.h"
#include "fovea/error.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

std::string device_name(DeviceKind kind, int ordinal) {
  return kind == DeviceKind::kCpu ? "cpu" : "cuda:" + std::to_string(ordinal);
}

nb::object make_numpy(DType dtype, const nb::tuple& shape) {
  const nb::module_ numpy = nb::module_::import_("numpy");
  nb::object type;
  switch (dtype) {
    case DType::kBf16:
      type = nb::module_::import_("ml_dtypes").attr("bfloat16");
      break;
    case DType::kF32:
      type = nb::str("float32");
      break;
    case DType::kI32:
      type = nb::str("int32");
      break;
    case DType::kI64:
      type = nb::str("int64");
      break;
    default:
      type = nb::str("uint8");
  }
  return numpy.attr("zeros")(shape, type);
}

nb::object make_torch(DType dtype, const nb::tuple& shape, const std::string& device) {
  const nb::module_ torch = nb::module_::import_("torch");
  const char* type = dtype == DType::kBf16  ? "bfloat16"
                     : dtype == DType::kF32 ? "float32"
                     : dtype == DType::kI32 ? "int32"
                     : dtype == DType::kI64 ? "int64"
                                            : "uint8";
  return torch.attr("zeros")(shape, nb::arg("dtype") = torch.attr(type),
                             nb::arg("device") = nb::str(device.c_str()));
}

}  // namespace

PythonCallTensors::PythonCallTensors(std::string op, nb::dict inputs, nb::dict given,
                                     nb::sequence unwanted, nb::object stream)
    : op_(std::move(op)), stream_(std::move(stream)) {
  const auto import = [&](const nb::dict& source, std::map<std::string, ImportedTensor>& target) {
    for (const auto& [key, object] : source) {
      if (object.is_none()) continue;
      const auto name = nb::cast<std::string>(key);
      place(name, target.try_emplace(name, label(name), object).first->second);
    }
  };
  import(inputs, inputs_);
  import(given, given_);
  for (const auto& [name, tensor] : given_) {
    tensor.require_writable(label(name));
    results_[name.c_str()] = tensor.object();
  }
  for (const nb::handle name : unwanted) unwanted_.push_back(nb::cast<std::string>(name));
}

void PythonCallTensors::place(const std::string& name, const ImportedTensor& tensor) {
  uses_torch_ = uses_torch_ || is_torch(tensor.object());
  if (placed_by_.empty()) {
    device_kind_ = tensor.device_kind();
    ordinal_ = tensor.ordinal();
    placed_by_ = name;
  } else if (device_kind_ != tensor.device_kind() || ordinal_ != tensor.ordinal()) {
    throw Error(ErrorCode::kInvalidArgument,
                label(name) + " is on " + device_name(tensor.device_kind(), tensor.ordinal()) +
                    " and " + placed_by_ + " on " + device_name(device_kind_, ordinal_) +
                    ", expected one device");
  }
}

Device PythonCallTensors::device(int num_threads) const {
  if (device_kind_ == DeviceKind::kCpu) return Device::cpu(num_threads);
  try {
    return Device::cuda(ordinal_);
  } catch (const Error& error) {
    const std::string text = error.what();
    throw Error(error.code(), label(placed_by_) + " is on a GPU" +
                                  text.substr(std::min(text.find(": "), text.size())));
  }
}

void PythonCallTensors::require_device(const Device& expected) const {
  const bool is_there = expected.kind == device_kind_ &&
                        (device_kind_ == DeviceKind::kCpu || expected.ordinal == ordinal_);
  if (is_there || placed_by_.empty()) return;
  throw Error(ErrorCode::kInvalidArgument, label(placed_by_) + " is on " +
                                               device_name(device_kind_, ordinal_) + ", expected " +
                                               to_string(expected));
}

std::vector<std::string> PythonCallTensors::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : inputs_) names.push_back(name);
  return names;
}

ConstTensorView PythonCallTensors::find(const std::string& name) const {
  const auto found = inputs_.find(name);
  return found == inputs_.end() ? ConstTensorView{} : ConstTensorView(found->second.view());
}

const int32_t* PythonCallTensors::values(const std::string& name) {
  if (device_kind_ != DeviceKind::kCpu) {
    throw Error(ErrorCode::kUnsupported,
                label(name) + " is on " + device_name(device_kind_, ordinal_) +
                    ", but the shape of a result follows from its elements, and no call waits for "
                    "a GPU; pass it on the CPU with the other tensors");
  }
  return static_cast<const int32_t*>(inputs_.at(name).view().data);
}

std::vector<std::string> PythonCallTensors::given_outputs() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : given_) names.push_back(name);
  return names;
}

void PythonCallTensors::expect_outputs(std::initializer_list<std::string_view> names) const {
  for (const auto& [name, tensor] : given_) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    std::string known;
    for (const std::string_view entry : names) {
      known += (known.empty() ? "" : ", ") + std::string(entry);
    }
    throw Error(ErrorCode::kInvalidArgument,
                op_ + ": unknown output '" + name + "'; it has: " + known);
  }
}

TensorView PythonCallTensors::given_output(const std::string& name) const {
  const auto found = given_.find(name);
  return found == given_.end() ? TensorView{} : found->second.view();
}

bool PythonCallTensors::wants(const std::string& name) const {
  return std::find(unwanted_.begin(), unwanted_.end(), name) == unwanted_.end();
}

TensorView PythonCallTensors::output(const std::string& name, DType dtype,
                                     const std::vector<int64_t>& shape) {
  nb::list extents;
  for (const int64_t extent : shape) extents.append(extent);
  const nb::tuple as_tuple(extents);
  if (device_kind_ == DeviceKind::kCuda && !uses_torch_) {
    throw Error(ErrorCode::kInvalidArgument,
                label(name) +
                    " is not given, and no tensor of torch says how to make it on a GPU; "
                    "pass it as out");
  }
  const nb::object object = uses_torch_
                                ? make_torch(dtype, as_tuple, device_name(device_kind_, ordinal_))
                                : make_numpy(dtype, as_tuple);
  results_[name.c_str()] = object;
  return provided_.try_emplace(name, label(name), object).first->second.view();
}

TensorView PythonCallTensors::update(const std::string& name) {
  const ImportedTensor& tensor = inputs_.at(name);
  tensor.require_writable(label(name));
  return tensor.view();
}

void PythonCallTensors::run(size_t workspace_bytes,
                            const std::function<void(Workspace, Stream)>& work) {
  Stream stream;
  if (device_kind_ == DeviceKind::kCuda) {
    if (!stream_.is_none()) {
      stream.handle = reinterpret_cast<void*>(nb::cast<uintptr_t>(stream_));
    } else if (uses_torch_) {
      stream.handle = torch_stream(ordinal_);
    }
  }
  const Device where = device(1);
  const nb::gil_scoped_release release;
  DeviceBuffer workspace(where, workspace_bytes, stream);
  work(workspace.workspace(), stream);
}

}  // namespace fovea::python
