#include "python/src/shape_call_tensors.h"

#include <nanobind/stl/string.h>

#include <algorithm>

#include "fovea/error.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

[[noreturn]] void refuse(const std::string& label, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, label + what);
}

// A packed tensor of the shape, without memory.
TensorView packed_view(const std::string& label, DType dtype, const std::vector<int64_t>& shape) {
  if (shape.size() > static_cast<size_t>(kMaxRank)) {
    refuse(label, " has " + std::to_string(shape.size()) + " axes, expected at most " +
                      std::to_string(kMaxRank));
  }
  TensorView view;
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  int64_t packed = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    if (shape[axis] < 0) refuse(label, " has a negative extent");
    view.shape[axis] = shape[axis];
    view.stride[axis] = packed;
    if (__builtin_mul_overflow(packed, std::max<int64_t>(shape[axis], 1), &packed)) {
      refuse(label, " has more than 2^63 elements");
    }
  }
  return view;
}

DType dtype_of(const std::string& label, const std::string& word) {
  for (const DType dtype : {DType::kU8, DType::kI32, DType::kI64, DType::kF32, DType::kBf16}) {
    if (to_string(dtype) == word) return dtype;
  }
  refuse(label, " has elements of type " + word + ", expected bf16, f32, i32, i64 or u8");
}

}  // namespace

ShapeCallTensors::ShapeCallTensors(std::string op, const nb::dict& inputs,
                                   const nb::sequence& unwanted)
    : op_(std::move(op)) {
  for (const auto& [key, value] : inputs) {
    if (value.is_none()) continue;
    const auto name = nb::cast<std::string>(key);
    const std::string label = op_ + ": " + name;
    std::vector<int64_t> shape;
    for (const nb::handle extent : nb::object(nb::borrow(value)[1])) {
      shape.push_back(nb::cast<int64_t>(extent));
    }
    const auto word = nb::cast<std::string>(nb::object(nb::borrow(value)[0]));
    inputs_.emplace(name, packed_view(label, dtype_of(label, word), shape));
  }
  for (const nb::handle name : unwanted) unwanted_.push_back(nb::cast<std::string>(name));
}

std::vector<std::string> ShapeCallTensors::names() const {
  std::vector<std::string> names;
  for (const auto& [name, view] : inputs_) names.push_back(name);
  return names;
}

ConstTensorView ShapeCallTensors::find(const std::string& name) const {
  const auto found = inputs_.find(name);
  return found == inputs_.end() ? ConstTensorView{} : ConstTensorView(found->second);
}

const int32_t* ShapeCallTensors::values(const std::string& name) {
  throw Error(ErrorCode::kUnsupported,
              op_ + ": the shape of a result follows from the elements of " + name);
}

bool ShapeCallTensors::wants(const std::string& name) const {
  return std::find(unwanted_.begin(), unwanted_.end(), name) == unwanted_.end();
}

void ShapeCallTensors::output_origins(const std::string& /*name*/,
                                      const std::vector<ExtentOrigin>& origins) {
  nb::list list;
  for (const ExtentOrigin& origin : origins) {
    if (!origin.axis.input.empty()) {
      list.append(nb::make_tuple(origin.axis.input, origin.axis.number, origin.added));
      continue;
    }
    nb::list by;
    for (const ExtentOrigin::Axis& axis : origin.by) {
      by.append(nb::make_tuple(axis.input, axis.number));
    }
    list.append(by);
  }
  origins_ = nb::tuple(list);
}

TensorView ShapeCallTensors::output(const std::string& name, DType dtype,
                                    const std::vector<int64_t>& shape) {
  nb::list extents;
  for (const int64_t extent : shape) extents.append(extent);
  results_.append(
      nb::make_tuple(name, std::string(to_string(dtype)), nb::tuple(extents), origins_));
  return packed_view(op_ + ": " + name, dtype, shape);
}

TensorView ShapeCallTensors::update(const std::string& name) {
  updated_.append(name);
  return inputs_.at(name);
}

}  // namespace fovea::python
