// The native part of the Python package: calls operators by name. What users see is python/fovea.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <string>

#include "fovea/call_operator.h"
#include "fovea/implementation.h"
#include "fovea/version.h"
#include "python/src/errors.h"
#include "python/src/exported_tensor.h"
#include "python/src/memory.h"
#include "python/src/operator_function.h"
#include "python/src/params.h"
#include "python/src/python_call_tensors.h"
#include "python/src/serving.h"
#include "python/src/shape_call_tensors.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

// Threads of calls on the CPU; 0: every hardware thread.
std::atomic<int> num_threads{0};

// What an operator returns for tensors of these types and shapes.
nb::tuple result_shapes(const std::string& op, const nb::dict& tensors, const nb::dict& params,
                        const nb::sequence& unwanted) {
  ShapeCallTensors shapes(op, tensors, unwanted);
  call_operator(op, shapes, to_params(op, params), Device::cpu(1), Options{"ref"});
  return shapes.results();
}

// One operator's implementations: name, device, whether it can run here, why not.
nb::list implementations(const std::string& op) {
  nb::list result;
  for (const OperatorInfo& info : operators()) {
    if (info.name != op) continue;
    for (const ImplementationInfo& entry : info.implementations) {
      result.append(nb::make_tuple(entry.name, entry.device == DeviceKind::kCpu ? "cpu" : "cuda",
                                   entry.available, entry.reason));
    }
  }
  return result;
}

}  // namespace

int thread_limit() { return num_threads; }

Device device_of(const std::string& name) { return parse_device(name, num_threads); }

namespace {

void set_num_threads(int threads) {
  Device::cpu(threads);  // refuses a negative number
  num_threads = threads;
}

// Whether a device exists; Error says why not.
void check_device(const std::string& device) { parse_device(device); }

}  // namespace
}  // namespace fovea::python

NB_MODULE(_native, module) {
  using namespace fovea::python;  // NOLINT: the module's functions
  // Error classes and the operators' results outlive the module in references of the user.
  nb::set_leak_warnings(false);
  module.doc() = "Native part of fovea: operators by name. Use the functions of the package.";
  module.def(
      "version", [] { return std::string(fovea::version()); }, "major.minor.patch");
  bind_errors(module);
  module.def(
      "result_shapes", &result_shapes, nb::arg("op"), nb::arg("tensors"), nb::arg("params"),
      nb::arg("unwanted"),
      "Results that an operator has for tensors given as (type, shape), None for absent: "
      "([(name, type, shape, origins)], names of the tensors that it updates). An origin says "
      "what decides an extent: (tensor, axis, added), or [(tensor, axis)] beside the "
      "parameters.");
  module.def("callable_operators", &fovea::callable_operators,
             "Names that OperatorFunction takes.");
  module.def("implementations", &implementations, nb::arg("op"),
             "Implementations of an operator, best first: (name, device, available, reason).");
  module.def("check_device", &check_device, nb::arg("device"),
             "Raises, saying why, for a device that this build or machine lacks.");
  module.def("set_num_threads", &set_num_threads, nb::arg("threads"),
             "Threads of calls on the CPU; 0: every hardware thread.");
  module.def(
      "num_threads", [] { return num_threads.load(); }, "What set_num_threads() was given.");
  bind_operator_functions(module);
  bind_memory(module);
  bind_exported_tensor(module);
  bind_pools(module);
  bind_dsa_backend(module);
  bind_kda_backend(module);
  bind_msa_backend(module);
  bind_v4_backend(module);
}
