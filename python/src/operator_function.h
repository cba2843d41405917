#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "python/src/call_cache.h"
#include "python/src/python_call_tensors.h"

namespace fovea::python {

/// One function of the package: an operator, and which of the function's arguments are tensors and
/// which parameters. A call that differs from an earlier one in addresses and contents only is not
/// planned again (CallCache).
class OperatorFunction {
 public:
  OperatorFunction(std::string op, const nanobind::tuple& tensors, const nanobind::tuple& params);

  /// Runs the operator on `arguments`, the locals() of the function, `out`, `impl` and `stream`
  /// among them: the result, or a tuple in the order of `results`; without `results` a dictionary
  /// of all of them. What is not used becomes a warning.
  nanobind::object call(const nanobind::dict& arguments, const nanobind::tuple& results,
                        const nanobind::tuple& unwanted) const;

 private:
  struct Argument {
    nanobind::object key;  // interned
    std::string name;
  };

  void add_to_key(const nanobind::dict& arguments, const PythonCallTensors& bound,
                  CallKey* key) const;
  CallOutcome plan_and_run(const nanobind::dict& arguments, const CallKey& key,
                           PythonCallTensors* bound) const;

  std::string op_;
  std::vector<Argument> tensors_;
  std::vector<Argument> params_;
};

/// The class OperatorFunction of the module, and what clears the caches of calls.
void bind_operator_functions(nanobind::module_& module);

}  // namespace fovea::python
