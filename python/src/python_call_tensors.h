#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fovea/call_operator.h"
#include "python/src/imported_tensor.h"

namespace fovea::python {

/// The tensors of one call from Python, used where they are. Results that the caller does not bring
/// are arrays of numpy, or tensors of torch when any given tensor is one.
class PythonCallTensors final : public CallTensors {
 public:
  /// Dictionaries of tensors by name, None standing for absent; `unwanted` is a sequence of names.
  /// Throws Error(kInvalidArgument) for what cannot be used and for tensors on several devices.
  PythonCallTensors(std::string op, nanobind::dict inputs, nanobind::dict given,
                    nanobind::sequence unwanted, nanobind::object stream);

  /// Where the tensors are. Throws Error(kUnsupported) for a GPU that this build cannot use.
  Device device(int num_threads) const;

  std::vector<std::string> names() const override;
  ConstTensorView find(const std::string& name) const override;
  ConstTensorView input(const std::string& name) override { return find(name); }
  const int32_t* values(const std::string& name) override;
  bool sized_by_contents() const override { return false; }
  std::vector<std::string> given_outputs() const override;
  TensorView given_output(const std::string& name) const override;
  bool wants(const std::string& name) const override;
  TensorView output(const std::string& name, DType dtype,
                    const std::vector<int64_t>& shape) override;
  TensorView host_output(const std::string& name, DType dtype,
                         const std::vector<int64_t>& shape) override {
    return output(name, dtype, shape);
  }
  TensorView update(const std::string& name) override;
  /// Releases the GIL for the workspace and the work.
  void run(size_t workspace_bytes, const std::function<void(Workspace, Stream)>& work) override;

  /// The results by name: the caller's own objects, then the new ones.
  nanobind::dict results() const { return results_; }

 private:
  void place(const std::string& name, const ImportedTensor& tensor);
  std::string label(const std::string& name) const { return op_ + ": " + name; }

  std::string op_;
  std::map<std::string, ImportedTensor> inputs_;
  std::map<std::string, ImportedTensor> given_;
  std::map<std::string, ImportedTensor> provided_;
  std::vector<std::string> unwanted_;
  nanobind::dict results_;
  bool uses_torch_ = false;
  // The device, and the tensor that named it first.
  DeviceKind device_kind_ = DeviceKind::kCpu;
  int ordinal_ = 0;
  std::string placed_by_;
  nanobind::object stream_;
};

}  // namespace fovea::python
