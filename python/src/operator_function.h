#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "python/src/call_cache.h"
#include "python/src/python_call_tensors.h"

namespace fovea::python {

/// One function of the package: an operator, and what the function's signature makes of its
/// arguments. A call that differs from an earlier one in addresses and contents only is not planned
/// again (CallCache).
///
/// The function's own body calls call(). Python 3.12 and up does not come that far: a call whose
/// arguments fit the signature goes from the caller to the operator, without a frame of Python.
/// Every other call, and every call of a function that was given another body or other defaults,
/// takes the body, where Python says what is wrong.
class OperatorFunction {
 public:
  /// `tensors` and `params` are names of arguments. `results` are the names of the results in their
  /// order; instead of a name (name, argument, value): there is that one when the argument is the
  /// value. No results: nothing is given; with `by_name` a dictionary of all of them. `made`,
  /// unless None, makes what is given of the results.
  OperatorFunction(nanobind::object function, const nanobind::tuple& tensors,
                   const nanobind::tuple& params, const nanobind::tuple& results,
                   nanobind::object made, bool by_name);
  ~OperatorFunction();
  OperatorFunction(const OperatorFunction&) = delete;
  OperatorFunction& operator=(const OperatorFunction&) = delete;

  /// Runs the operator on `arguments`, the locals() of the function. What is not used becomes a
  /// warning.
  nanobind::object call(const nanobind::dict& arguments) const;

 private:
  static constexpr size_t kMaxArguments = 64;
  static constexpr size_t kMaxResults = 8;

  struct Argument {
    nanobind::object key;        // interned
    nanobind::object otherwise;  // not valid: required
    std::string name;
  };
  struct Result {
    std::string name;
    size_t argument = kMaxArguments;  // that decides whether there is one
    nanobind::object value;
  };
  /// Of one call: an object for each argument, in the order of the signature; borrowed.
  using Values = std::array<PyObject*, kMaxArguments>;
  struct Names {
    std::array<std::string_view, kMaxResults> list;
    size_t count = 0;
    std::span<const std::string_view> span() const { return {list.data(), count}; }
  };

  static PyObject* call_directly(PyObject* function, PyObject* const* given, size_t flags,
                                 PyObject* keywords) noexcept;

  size_t number_of(std::string_view name) const;
  /// False for arguments that do not fit the signature.
  bool bind(PyObject* const* given, size_t count, PyObject* keywords, Values* values) const;
  /// Whether the function is what it was when this was made.
  bool describes(const PyObject* function) const;
  Names names_of_results(const Values& values, PythonCallTensors* bound, uint64_t* wanted) const;
  nanobind::object run(const Values& values, int caller_level) const;
  nanobind::handle optional(const Values& values, size_t argument) const {
    return argument < kMaxArguments ? values[argument] : Py_None;
  }
  void add_to_key(const Values& values, const PythonCallTensors& bound, uint64_t wanted,
                  CallKey* key) const;
  CallOutcome plan_and_run(const Values& values, const CallKey& key,
                           PythonCallTensors* bound) const;
  nanobind::object result_of(const PythonCallTensors& bound, const Names& names) const;

  nanobind::object function_;
  // Of the function, as they were.
  nanobind::object code_, defaults_, keyword_defaults_;
  std::string op_;
  std::vector<Argument> arguments_;
  size_t num_positional_ = 0;
  std::vector<size_t> tensors_, params_;
  size_t impl_ = kMaxArguments, out_ = kMaxArguments, stream_ = kMaxArguments;
  std::vector<Result> results_;
  nanobind::object made_;
  bool by_name_ = false;
  mutable CallCache::Latest latest_;  // under the GIL
};

/// The class OperatorFunction of the module, and what clears the caches of calls.
void bind_operator_functions(nanobind::module_& module);

}  // namespace fovea::python
