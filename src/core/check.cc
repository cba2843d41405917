#include "src/core/check.h"

#include <cmath>

#include "fovea/plan.h"

namespace fovea::internal {

void invalid(const char* op, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, std::string(op) + ": " + what);
}

void unsupported(const char* op, const std::string& what) {
  throw Error(ErrorCode::kUnsupported, std::string(op) + ": " + what);
}

namespace {

std::string describe(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (const int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += extent == kAnyExtent ? "any" : std::to_string(extent);
  }
  return text + "]";
}

}  // namespace

void check_tensor(const char* op, const char* name, const ConstTensorView& tensor, DType dtype,
                  std::initializer_list<int64_t> shape) {
  // Built on failure only: run() checks its tensors and must not allocate.
  const auto expected = [&] { return std::string(to_string(dtype)) + " " + describe(shape); };
  if (!tensor.defined()) invalid(op, std::string(name) + " is missing, expected " + expected());
  bool matches = tensor.dtype == dtype && tensor.rank == static_cast<int>(shape.size());
  size_t axis = 0;
  for (const int64_t extent : shape) {
    if (!matches) break;
    if (extent != kAnyExtent && tensor.shape[axis] != extent) matches = false;
    if (tensor.shape[axis] < 0) matches = false;
    ++axis;
  }
  if (!matches)
    invalid(op, std::string(name) + " = " + to_string(tensor) + ", expected " + expected());
  const auto last = static_cast<size_t>(tensor.rank - 1);
  if (tensor.rank > 0 && tensor.shape[last] > 1 && tensor.stride[last] != 1) {
    invalid(op, std::string(name) + " = " + to_string(tensor) +
                    ", expected a contiguous last axis; copy the tensor first");
  }
  for (size_t i = 0; i < static_cast<size_t>(tensor.rank); ++i) {
    if (tensor.stride[i] < 0) {
      invalid(op, std::string(name) + " = " + to_string(tensor) + ", expected strides >= 0");
    }
  }
  if (tensor.data == nullptr && tensor.num_elements() > 0) {
    invalid(op, std::string(name) + ".data is null, expected " + expected());
  }
}

void check_optional(const char* op, const char* name, const ConstTensorView& tensor, DType dtype,
                    std::initializer_list<int64_t> shape) {
  if (tensor.defined()) check_tensor(op, name, tensor, dtype, shape);
}

void check_range(const char* op, const char* name, int64_t value, int64_t lowest, int64_t highest) {
  if (value >= lowest && value <= highest) return;
  std::string expected = std::to_string(lowest) + ".." + std::to_string(highest);
  if (highest == std::numeric_limits<int64_t>::max()) expected = ">= " + std::to_string(lowest);
  invalid(op, std::string(name) + " = " + std::to_string(value) + ", expected " + expected);
}

void check_positive_finite(const char* op, const char* name, double value) {
  if (std::isfinite(value) && value > 0) return;
  invalid(op, std::string(name) + " = " + std::to_string(value) + ", expected a finite value > 0");
}

void check_workspace(const char* op, size_t needed, const Workspace& workspace) {
  if (needed == 0) return;
  if (workspace.data == nullptr || workspace.bytes < needed) {
    invalid(op, "workspace = " + std::to_string(workspace.data == nullptr ? 0 : workspace.bytes) +
                    " bytes, expected at least plan.workspace_bytes() = " + std::to_string(needed));
  }
  if (reinterpret_cast<uintptr_t>(workspace.data) % 64 != 0) {
    invalid(op, "workspace.data is not 64-byte aligned");
  }
}

}  // namespace fovea::internal
