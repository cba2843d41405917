#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <string>
#include <vector>

#include "fovea/call_operator.h"

namespace fovea::python {

/// The tensors of a call that only asks what its results are: types and shapes without memory, and
/// an operator that is planned and not run.
class ShapeCallTensors final : public CallTensors {
 public:
  /// Inputs by name as (type, shape), None standing for absent; `unwanted` as in a call. Throws
  /// Error(kInvalidArgument) for a type or shape that no tensor has.
  ShapeCallTensors(std::string op, const nanobind::dict& inputs,
                   const nanobind::sequence& unwanted);

  std::vector<std::string> names() const override;
  ConstTensorView find(const std::string& name) const override;
  ConstTensorView input(const std::string& name) override { return find(name); }
  /// Refuses: the elements are not there.
  const int32_t* values(const std::string& name) override;
  bool sized_by_contents() const override { return false; }
  bool wants(const std::string& name) const override;
  void output_origins(const std::string& name, const std::vector<ExtentOrigin>& origins) override;
  TensorView output(const std::string& name, DType dtype,
                    const std::vector<int64_t>& shape) override;
  TensorView host_output(const std::string& name, DType dtype,
                         const std::vector<int64_t>& shape) override {
    return output(name, dtype, shape);
  }
  TensorView update(const std::string& name) override;
  void run(size_t /*workspace_bytes*/,
           const std::function<void(Workspace, Stream)>& /*work*/) override {}

  /// The results, as (name, type, shape, origins) in the order of the operator, and the names of
  /// the inputs that it changes. An origin is (input, axis, added), or a list of the (input, axis)
  /// that decide the extent beside the parameters.
  nanobind::tuple results() const { return nanobind::make_tuple(results_, updated_); }

 private:
  std::string op_;
  std::map<std::string, TensorView> inputs_;
  std::vector<std::string> unwanted_;
  nanobind::tuple origins_;  // of the next result
  nanobind::list results_;
  nanobind::list updated_;
};

}  // namespace fovea::python
