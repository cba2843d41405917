#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/device.h"
#include "fovea/device_tensors.h"
#include "fovea/export.h"
#include "fovea/implementation.h"
#include "fovea/json.h"
#include "fovea/safetensors.h"
#include "fovea/tensor.h"

namespace fovea {

/// Named instead of an implementation where an operator is one function of host values.
inline constexpr char kHostFunction[] = "host";

/// What decides an extent of a result: an axis of an input, to which `added` is added, or, without
/// an input, the parameters and the axes `by` of inputs.
struct ExtentOrigin {
  struct Axis {
    std::string input;
    int number = 0;
  };

  Axis axis;
  int64_t added = 0;
  std::vector<Axis> by;
};

/// The tensors of one call by name and the memory of its results: what a caller that knows
/// operators by name only implements, such as a command line or the binding of another language.
/// A name is a field of the operator's tensors (docs/run.md). Functions may throw: the call then
/// ends with that exception.
class FOVEA_API CallTensors {
 public:
  virtual ~CallTensors() = default;

  /// The inputs that were given.
  virtual std::vector<std::string> names() const = 0;

  /// Type, shape and strides of an input; an undefined view when it was not given. The data may be
  /// anywhere.
  virtual ConstTensorView find(const std::string& name) const = 0;

  /// The input in the memory of the device.
  virtual ConstTensorView input(const std::string& name) = 0;

  /// The elements of an i32 input of one axis, readable by the host.
  virtual const int32_t* values(const std::string& name) = 0;

  /// Whether shapes that have a bound follow from the contents of lengths instead: the longest row
  /// instead of the longest possible one.
  virtual bool sized_by_contents() const = 0;

  /// The results whose memory the caller brings, whatever is in it.
  virtual std::vector<std::string> given_outputs() const { return {}; }

  /// One of them; an undefined view when the call is to provide the memory.
  virtual TensorView given_output(const std::string& /*name*/) const { return {}; }

  /// Whether the caller wants an optional result.
  virtual bool wants(const std::string& /*name*/) const { return true; }

  /// Told before output() what decides each extent of the result.
  virtual void output_origins(const std::string& /*name*/,
                              const std::vector<ExtentOrigin>& /*origins*/) {}

  /// Memory of the device for a result that was not given, packed and zero-filled.
  virtual TensorView output(const std::string& name, DType dtype,
                            const std::vector<int64_t>& shape) = 0;

  /// The same for a result of which the operator writes every element, whatever was in it.
  virtual TensorView written_output(const std::string& name, DType dtype,
                                    const std::vector<int64_t>& shape) {
    return output(name, dtype, shape);
  }

  /// As output() for a result that the host computes.
  virtual TensorView host_output(const std::string& name, DType dtype,
                                 const std::vector<int64_t>& shape) = 0;

  /// Memory of the device for an input that the operator changes.
  virtual TensorView update(const std::string& name) = 0;

  /// Provides a workspace and calls `work` once. Everything that can be refused has been.
  virtual void run(size_t workspace_bytes, const std::function<void(Workspace, Stream)>& work) = 0;
};

/// Tensors of a map on the host. Results, and what is updated, become tensors of a second map; on a
/// GPU inputs and results are copied there and back.
class FOVEA_API MapCallTensors final : public CallTensors {
 public:
  /// `inputs` must outlive the object.
  MapCallTensors(const TensorMap& inputs, const Device& device) : inputs_(inputs), there_(device) {}

  std::vector<std::string> names() const override { return inputs_.names(); }
  ConstTensorView find(const std::string& name) const override { return inputs_.find(name); }
  ConstTensorView input(const std::string& name) override;
  const int32_t* values(const std::string& name) override;
  bool sized_by_contents() const override { return true; }
  TensorView output(const std::string& name, DType dtype,
                    const std::vector<int64_t>& shape) override;
  TensorView host_output(const std::string& name, DType dtype,
                         const std::vector<int64_t>& shape) override;
  TensorView update(const std::string& name) override;
  void run(size_t workspace_bytes, const std::function<void(Workspace, Stream)>& work) override;

  /// The results, once.
  TensorMap take_outputs() { return std::move(outputs_); }

 private:
  const TensorMap& inputs_;
  TensorMap outputs_;
  DeviceTensors there_;
};

/// How a call was made.
struct CallOutcome {
  ImplementationChoice implementation;
  std::vector<std::string> notes;  ///< Tensors that were given and are not used.
};

namespace internal {
struct RecordedCall;
}

/// What a call leaves behind for later ones that differ in the addresses and contents of their
/// tensors only: its plan and everything that was worked out from names and parameters. Filled by
/// call_operator(). Thread-safe once it is filled.
class FOVEA_API CallRecord {
 public:
  CallRecord();
  ~CallRecord();
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  /// False before a call has filled it, and after one that read shapes of results from contents.
  bool is_repeatable() const noexcept;

  /// The call again on `tensors`, whose inputs, given and wanted results have the names, types,
  /// shapes, strides and device of the recorded call, which the caller has made sure of; needs
  /// is_repeatable(). Throws Error as OperatorPlan::run() does, before anything is written.
  const CallOutcome& repeat(CallTensors& tensors) const;

 private:
  friend CallOutcome call_operator(std::string_view op, CallTensors& tensors, const Json& params,
                                   const Device& device, const Options& options,
                                   CallRecord* record);
  std::unique_ptr<const internal::RecordedCall> call_;
};

/// Plans and runs one operator on tensors by name; `params` is a JSON object with the parameters of
/// its row in docs/run.md.
///
/// Throws Error(kInvalidArgument) for an operator that does not exist, a tensor or parameter that
/// is missing, unknown or does not fit, Error(kUnsupported) and Error(kOutOfMemory) as plan() of
/// the operator does; always before anything is written. Thread-safe for distinct `tensors`.
/// `record`, unless null, is filled by a call that succeeds.
FOVEA_API CallOutcome call_operator(std::string_view op, CallTensors& tensors, const Json& params,
                                    const Device& device, const Options& options = {},
                                    CallRecord* record = nullptr);

/// The operators that call_operator() knows, sorted.
FOVEA_API std::vector<std::string> callable_operators();

}  // namespace fovea
