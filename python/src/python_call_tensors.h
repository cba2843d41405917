#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
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

  /// Refuses tensors that are not on `device`.
  void require_device(const Device& device) const;

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
  /// The same where it may be absent.
  TensorView update_if_given(const std::string& name) {
    return inputs_.contains(name) ? update(name) : TensorView{};
  }
  /// Refuses results of other names.
  void expect_outputs(std::initializer_list<std::string_view> names) const;
  /// The caller's tensor for a result, or a new one.
  TensorView result(const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
    return given_.contains(name) ? given_output(name) : output(name, dtype, shape);
  }
  /// The same for a result that may be left out: absent when the caller does not want it.
  TensorView result_if_wanted(const std::string& name, DType dtype,
                              const std::vector<int64_t>& shape) {
    return given_.contains(name) || wants(name) ? result(name, dtype, shape) : TensorView{};
  }
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
