#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/call_operator.h"
#include "python/src/imported_tensor.h"

namespace fovea::python {

/// What set_num_threads() was given.
int thread_limit();

/// A tensor under the name of its argument.
struct NamedTensor {
  NamedTensor(const Label& label, nanobind::handle object, Lifetime lifetime)
      : name(label.name), tensor(label, object, lifetime) {}

  std::string name;
  ImportedTensor tensor;
};

/// The tensors of one call from Python, used where they are. Results that the caller does not bring
/// are arrays of numpy, or tensors of torch when any given tensor is one.
class PythonCallTensors final : public CallTensors {
 public:
  /// Of one call: tensors are added, in all likelihood so many.
  PythonCallTensors(std::string_view op, nanobind::object stream, size_t num_inputs,
                    size_t num_given)
      : op_(op), lifetime_(Lifetime::kOfObject), stream_(std::move(stream)) {
    inputs_.reserve(num_inputs);
    given_.reserve(num_given);
  }
  /// Of calls that keep them: dictionaries of tensors by name, None standing for absent; `unwanted`
  /// is a sequence of names.
  PythonCallTensors(std::string op, nanobind::dict inputs, nanobind::dict given,
                    nanobind::sequence unwanted, nanobind::object stream);

  /// Throw Error(kInvalidArgument) for what cannot be used and for a second device.
  void add_input(std::string_view name, nanobind::handle object) { add(name, object, &inputs_); }
  void add_given(std::string_view name, nanobind::handle object) { add(name, object, &given_); }
  void add_unwanted(std::string_view name) { unwanted_.emplace_back(name); }

  const std::vector<NamedTensor>& inputs() const noexcept { return inputs_; }
  const std::vector<NamedTensor>& given() const noexcept { return given_; }
  const std::vector<std::string>& unwanted() const noexcept { return unwanted_; }
  DeviceKind device_kind() const noexcept { return device_kind_; }
  int ordinal() const noexcept { return ordinal_; }
  bool uses_torch() const noexcept { return uses_torch_; }

  /// Where the tensors are. Throws Error(kUnsupported) for a GPU that this build cannot use.
  Device device(int num_threads) const;

  /// Refuses tensors that are not on `device`.
  void require_device(const Device& device) const;

  /// Refuses given results that cannot be written.
  void require_writable_results() const;

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
  TensorView written_output(const std::string& name, DType dtype,
                            const std::vector<int64_t>& shape) override;
  TensorView host_output(const std::string& name, DType dtype,
                         const std::vector<int64_t>& shape) override {
    return output(name, dtype, shape);
  }
  TensorView update(const std::string& name) override;
  /// The same where it may be absent.
  TensorView update_if_given(const std::string& name) {
    return find(name).defined() ? update(name) : TensorView{};
  }
  /// Refuses results of other names.
  void expect_outputs(std::initializer_list<std::string_view> names) const;
  /// The caller's tensor for a result, or a new one.
  TensorView result(const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
    return is_given(name) ? given_output(name) : output(name, dtype, shape);
  }
  /// The same for a result that may be left out: absent when the caller does not want it.
  TensorView result_if_wanted(const std::string& name, DType dtype,
                              const std::vector<int64_t>& shape) {
    return is_given(name) || wants(name) ? result(name, dtype, shape) : TensorView{};
  }
  /// Releases the GIL for the workspace and the work.
  void run(size_t workspace_bytes, const std::function<void(Workspace, Stream)>& work) override;

  /// A result, the caller's own object or a new one; None where there is none.
  nanobind::object result(std::string_view name) const;
  /// Every result by name.
  nanobind::dict results() const;

 private:
  void add(std::string_view name, nanobind::handle object, std::vector<NamedTensor>* tensors);
  void place(std::string_view name, const ImportedTensor& tensor);
  bool is_given(std::string_view name) const;
  TensorView provide(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                     bool zeroed);
  nanobind::object make(DType dtype, const std::vector<int64_t>& shape, bool zeroed) const;
  Stream stream() const;
  Label label(std::string_view name) const { return {op_, name}; }

  std::string op_;
  Lifetime lifetime_ = Lifetime::kOwned;
  std::vector<NamedTensor> inputs_;
  std::vector<NamedTensor> given_;
  std::vector<NamedTensor> provided_;
  std::vector<std::string> unwanted_;
  bool uses_torch_ = false;
  // The device, and the tensor that named it first.
  DeviceKind device_kind_ = DeviceKind::kCpu;
  int ordinal_ = 0;
  std::string placed_by_;
  nanobind::object stream_;
};

}  // namespace fovea::python
