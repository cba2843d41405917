#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/context_split.h"
#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "python/src/exported_tensor.h"
#include "python/src/params.h"
#include "python/src/python_call_tensors.h"

/// The serving backends as classes of the module: what they share. A class takes its tensors and
/// parameters as dictionaries; signatures and documentation are those of python/fovea/*_backend.py.
namespace fovea::python {

void bind_pools(nanobind::module_& module);
void bind_dsa_backend(nanobind::module_& module);
void bind_kda_backend(nanobind::module_& module);
void bind_msa_backend(nanobind::module_& module);
void bind_v4_backend(nanobind::module_& module);

/// Device of a name, with the threads that set_num_threads() allows.
Device device_of(const std::string& name);

/// What a batch refers to, for as long as its step lives.
struct Step {
  std::unique_ptr<PythonCallTensors> tensors;
  std::vector<int32_t> host_seq_len, host_ext_len;
  std::optional<ContextSplit> context_split;
};

/// The arguments of begin_step that are no tensors.
struct StepArguments {
  nanobind::dict params;
  std::vector<int32_t> host_seq_len, host_ext_len;
};

/// Lengths, rows and tensors of a batch, in `step`.
ForwardBatch read_forward_batch(const Fields& read, Step* step);

/// The words of a ForwardMode.
const Fields::Words<ForwardMode>& forward_modes();

/// Every array that a step has, by name.
nanobind::dict export_metadata(const MetadataFields& fields, const Device& device,
                               nanobind::object owner);

/// A profile as a list of (operator, implementation, milliseconds, flops, bytes).
nanobind::list export_profile(const std::vector<OperatorCall>& calls);

/// A step plan, and the tensors of the step that it holds. Outlived by its backend.
template <class Plan>
struct PlanObject {
  nanobind::object owner;
  Plan plan;
  std::unique_ptr<Step> step;
  /// Shared by the plans of a chain of drafts.
  std::shared_ptr<PythonCallTensors> chain;
};

/// A backend, and the tensors of its current step.
template <class BackendType, class PlanType>
struct BackendObject {
  using Backend = BackendType;
  using Plan = PlanObject<PlanType>;

  template <class Config>
  BackendObject(std::string class_name, const Config& config, const Device& where)
      : name(std::move(class_name)), device(where), backend(config, where) {}

  std::string name;
  Device device;
  std::vector<OperatorCall> calls;  // outlives the backend, which appends to it
  Backend backend;
  std::unique_ptr<Step> step;
  std::atomic<bool> in_use{false};

  const MetadataFields& metadata(const Plan* plan) const {
    return plan == nullptr ? backend.metadata() : plan->plan.metadata();
  }
  /// T of the step; 0 before the first one.
  int64_t rows(const Plan* plan) const {
    const TensorView& rows = metadata(plan).row_to_request;
    return rows.defined() ? rows.shape[0] : 0;
  }
};

/// A call of a backend: one at a time, because a backend serves one stream of steps.
class InUse {
 public:
  InUse(const std::string& name, std::atomic<bool>* flag) : flag_(flag) {
    if (flag->exchange(true)) {
      throw Error(ErrorCode::kInvalidArgument,
                  name +
                      ": another thread is in a call of this backend, which serves one stream "
                      "of steps; let the calls follow one another or make a backend each");
    }
  }
  ~InUse() { *flag_ = false; }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  std::atomic<bool>* flag_;
};

/// Imports the tensors of a call on the backend's device.
template <class Object>
std::unique_ptr<PythonCallTensors> bind_tensors(const Object& self, const std::string& call,
                                                nanobind::dict tensors, nanobind::dict out,
                                                nanobind::tuple unwanted, nanobind::object stream) {
  auto bound = std::make_unique<PythonCallTensors>(
      self.name + "." + call, std::move(tensors), std::move(out),
      nanobind::borrow<nanobind::sequence>(unwanted), std::move(stream));
  bound->require_device(self.device);
  return bound;
}

/// Begins the step of a batch, which `make_batch(read, step)` puts together. Its tensors are kept
/// until the next step begins.
template <class Object, class MakeBatch>
void begin_step(Object& self, typename Object::Plan* plan, StepArguments arguments,
                nanobind::dict tensors, nanobind::object stream, MakeBatch make_batch) {
  auto step = std::make_unique<Step>();
  step->tensors = bind_tensors(self, "begin_step", std::move(tensors), nanobind::dict(),
                               nanobind::tuple(), std::move(stream));
  step->host_seq_len = std::move(arguments.host_seq_len);
  step->host_ext_len = std::move(arguments.host_ext_len);
  const std::string label = self.name + ".begin_step";
  const Json params = to_params(label, arguments.params);
  const auto batch = make_batch(Fields(label, params), step.get());
  const InUse in_use(self.name, &self.in_use);
  step->tensors->run(0, [&](Workspace, Stream on) {
    if (plan == nullptr) {
      self.backend.begin_step(batch, on);
    } else {
      self.backend.begin_step(batch, &plan->plan, on);
    }
  });
  (plan == nullptr ? self.step : plan->step).swap(step);
}

/// What every backend class has. `read_batch(self, read, step)` puts a batch together.
template <class Object, class Config, class ReadBatch>
nanobind::class_<Object> bind_backend(nanobind::module_& module, const char* name,
                                      void (*read_config)(const Fields&, Config*),
                                      ReadBatch read_batch) {
  namespace nb = nanobind;
  using Plan = typename Object::Plan;
  const std::string plan_name = std::string(name) + "Plan";
  nb::class_<Plan>(module, plan_name.c_str(), "The arrays of one step, at fixed addresses.")
      .def(
          "metadata",
          [](nb::object self) {
            const Plan& plan = nb::cast<const Plan&>(self);
            const auto& owner = nb::cast<const Object&>(plan.owner);
            return export_metadata(plan.plan.metadata(), owner.device, self);
          },
          "Arrays of the step by name.");
  nb::class_<Object> type(module, name, "See the class of the package.");
  type.def(
          "__init__",
          [name, read_config](Object* self, const nb::dict& config, const std::string& device) {
            const Json params = to_params(name, config);
            Config parsed;
            read_config(Fields(name, params), &parsed);
            const Device where = device_of(device);
            const nb::gil_scoped_release release;
            new (self) Object(name, parsed, where);
          },
          nb::arg("config"), nb::arg("device"))
      .def(
          "make_step_plan",
          [](nb::object self, const nb::dict& bucket) {
            auto& object = nb::cast<Object&>(self);
            const std::string label = object.name + ".make_step_plan";
            const Json params = to_params(label, bucket);
            const Fields read(label, params);
            StepBucket parsed;
            read("mode", &parsed.mode, forward_modes());
            read("num_requests", &parsed.num_requests);
            read("rows_per_request", &parsed.rows_per_request);
            const InUse in_use(object.name, &object.in_use);
            auto plan = [&] {
              const nb::gil_scoped_release release;
              return object.backend.make_step_plan(parsed);
            }();
            return Plan{self, std::move(plan), nullptr, nullptr};
          },
          nb::arg("bucket"), "Buffers for the steps of one bucket.")
      .def(
          "begin_step",
          [read_batch](Object& self, nb::dict params, nb::dict tensors,
                       std::vector<int32_t> host_seq_len, std::vector<int32_t> host_ext_len,
                       Plan* plan, nb::object stream) {
            begin_step(
                self, plan, {std::move(params), std::move(host_seq_len), std::move(host_ext_len)},
                std::move(tensors), std::move(stream),
                [&](const Fields& read, Step* step) { return read_batch(self, read, step); });
          },
          nb::arg("params"), nb::arg("tensors"), nb::arg("host_seq_len"), nb::arg("host_ext_len"),
          nb::arg("plan").none(), nb::arg("stream").none(), "Begins a step.")
      .def(
          "metadata",
          [](nb::object self) {
            const auto& object = nb::cast<const Object&>(self);
            return export_metadata(object.backend.metadata(), object.device, self);
          },
          "Arrays of the current step by name.")
      .def(
          "start_profile",
          [](Object& self) {
            const InUse in_use(self.name, &self.in_use);
            self.backend.set_profile(nullptr);
            self.calls.clear();
            self.backend.set_profile(&self.calls);
          },
          "Records every operator call from now on.")
      .def(
          "stop_profile",
          [](Object& self) {
            const InUse in_use(self.name, &self.in_use);
            {
              const nb::gil_scoped_release release;
              self.backend.set_profile(nullptr);
            }
            return export_profile(std::exchange(self.calls, {}));
          },
          "The calls: (operator, implementation, milliseconds, flops, bytes).");
  return type;
}

}  // namespace fovea::python
