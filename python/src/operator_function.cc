#include "python/src/operator_function.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <memory>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "fovea/error.h"
#include "python/src/errors.h"
#include "python/src/params.h"
#include "python/src/workspaces.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

PyObject* interned(const char* text) {
  PyObject* string = PyUnicode_InternFromString(text);
  if (string == nullptr) throw nb::python_error();
  return string;
}

// A string of Python, seen in place; `object` outlives it.
std::string_view text_view(nb::handle object) {
  Py_ssize_t bytes = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &bytes);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<size_t>(bytes)};
}

[[noreturn]] void refuse(std::string_view op, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, std::string(op).append(": ").append(what));
}

std::string class_name(nb::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::string list(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

bool is_mapping(nb::handle object) {
  if (PyDict_Check(object.ptr())) return true;
  if (PyTuple_Check(object.ptr()) || PyList_Check(object.ptr()) || is_tensor(object)) return false;
  static const nb::object* const kind =
      new nb::object(nb::module_::import_("collections.abc").attr("Mapping"));
  const int answer = PyObject_IsInstance(object.ptr(), kind->ptr());
  if (answer < 0) throw nb::python_error();
  return answer == 1;
}

// Calls add(name, tensor) for every result that `out` brings.
template <class Add>
void for_each_output(std::string_view op, std::span<const std::string_view> results, nb::handle out,
                     Add add) {
  if (out.is_none()) return;
  if (is_mapping(out)) {
    nb::dict by_name;
    if (PyDict_Update(by_name.ptr(), out.ptr()) != 0) throw nb::python_error();
    for (const auto& [name, tensor] : by_name) {
      if (PyUnicode_Check(name.ptr()) == 0) {
        refuse(op, "out has a key of type " + class_name(name) + ", expected names of results");
      }
      if (!tensor.is_none()) add(text_view(name), tensor);
    }
    return;
  }
  const size_t count = results.size();
  if (count == 0) {
    refuse(op, "out is of type " + class_name(out) + ", expected a mapping of tensors by name");
  }
  if (PyTuple_Check(out.ptr()) || PyList_Check(out.ptr())) {
    const auto given = static_cast<size_t>(PySequence_Size(out.ptr()));
    if (given != count) {
      refuse(op, "out has " + std::to_string(given) + " entries, expected " +
                     std::to_string(count) + ": " + list(results));
    }
    for (size_t i = 0; i < count; ++i) {
      const nb::object tensor =
          nb::steal(PySequence_GetItem(out.ptr(), static_cast<Py_ssize_t>(i)));
      if (!tensor.is_valid()) throw nb::python_error();
      if (!tensor.is_none()) add(results[i], tensor);
    }
    return;
  }
  if (count != 1) {
    refuse(op, "out is one tensor, expected a tuple of " + list(results) + " or a mapping by name");
  }
  add(results[0], out);
}

nb::dict outputs(const std::string& op, const nb::tuple& results, const nb::object& out) {
  std::vector<std::string_view> names;
  for (const nb::handle name : results) names.push_back(text_view(name));
  nb::dict by_name;
  for_each_output(op, names, out, [&](std::string_view name, nb::handle tensor) {
    by_name[nb::str(name.data(), name.size())] = tensor;
  });
  return by_name;
}

enum class Tag : uint64_t { kFlag, kInteger, kNumber, kWord };

// A parameter as words; types that are told apart when a call is planned are told apart here.
void add_param(const Label& label, size_t number, nb::handle value, CallKey* key) {
  const auto add = [&](Tag tag) { key->add(number << 8 | static_cast<uint64_t>(tag)); };
  PyObject* object = value.ptr();
  if (PyFloat_CheckExact(object)) {
    add(Tag::kNumber);
    return key->add(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(object)));
  }
  if (PyUnicode_CheckExact(object)) {
    add(Tag::kWord);
    return key->add(text_view(value));
  }
  const Json param = to_param(label, value);
  switch (param.kind()) {
    case Json::Kind::kBool:
      add(Tag::kFlag);
      return key->add(static_cast<uint64_t>(param.as_bool()));
    case Json::Kind::kInteger:
      add(Tag::kInteger);
      return key->add(static_cast<uint64_t>(param.as_integer()));
    case Json::Kind::kNumber:
      add(Tag::kNumber);
      return key->add(std::bit_cast<uint64_t>(param.as_number()));
    default:
      add(Tag::kWord);
      return key->add(param.as_string());
  }
}

// The implementation that the caller names; empty: none.
std::string_view implementation_of(std::string_view op, nb::handle impl) {
  if (impl.is_none()) return {};
  if (PyUnicode_Check(impl.ptr()) == 0) {
    refuse(op, "impl is of type " + class_name(impl) + ", expected the name of an implementation");
  }
  return text_view(impl);
}

// The functions that are called directly. The GIL is held.
using DirectFunctions = std::unordered_map<const PyObject*, const OperatorFunction*>;
DirectFunctions& direct_functions() {
  static auto* const known = new DirectFunctions;
  return *known;
}

// The call of a function of Python as it was before.
vectorcallfunc call_body = nullptr;

}  // namespace

OperatorFunction::OperatorFunction(nb::object function, const nb::tuple& tensors,
                                   const nb::tuple& params, const nb::tuple& results,
                                   nb::object made, bool by_name)
    : function_(std::move(function)),
      code_(function_.attr("__code__")),
      defaults_(function_.attr("__defaults__")),
      keyword_defaults_(function_.attr("__kwdefaults__")),
      op_(nb::cast<std::string>(function_.attr("__name__"))),
      num_positional_(nb::cast<size_t>(code_.attr("co_argcount"))),
      made_(std::move(made)),
      by_name_(by_name) {
  const size_t count = num_positional_ + nb::cast<size_t>(code_.attr("co_kwonlyargcount"));
  const size_t num_defaults = defaults_.is_none() ? 0 : nb::len(defaults_);
  if (count > kMaxArguments || nb::len(results) > kMaxResults) {
    throw Error(ErrorCode::kInternal, op_ + ": too many arguments or results");
  }
  for (size_t i = 0; i < count; ++i) {
    Argument& argument = arguments_.emplace_back();
    argument.name = text_view(nb::object(code_.attr("co_varnames")[i]));
    argument.key = nb::steal(interned(argument.name.c_str()));
    if (i >= num_positional_) {
      if (keyword_defaults_.is_none()) continue;
      argument.otherwise =
          nb::borrow(PyDict_GetItemWithError(keyword_defaults_.ptr(), argument.key.ptr()));
    } else if (i + num_defaults >= num_positional_) {
      argument.otherwise = defaults_[i + num_defaults - num_positional_];
    }
  }
  for (const nb::handle name : tensors) tensors_.push_back(number_of(text_view(name)));
  for (const nb::handle name : params) params_.push_back(number_of(text_view(name)));
  impl_ = number_of("impl");
  out_ = number_of("out");
  stream_ = number_of("stream");
  for (const nb::handle entry : results) {
    Result& result = results_.emplace_back();
    if (PyUnicode_Check(entry.ptr()) != 0) {
      result.name = text_view(entry);
      continue;
    }
    result.name = text_view(nb::object(entry[0]));
    result.argument = number_of(text_view(nb::object(entry[1])));
    result.value = entry[2];
  }
#if PY_VERSION_HEX >= 0x030C0000
  if (PyFunction_Check(function_.ptr()) == 0) return;
  auto* const body = reinterpret_cast<PyFunctionObject*>(function_.ptr());
  if (call_body == nullptr) call_body = body->vectorcall;
  if (body->vectorcall != call_body) return;
  direct_functions()[function_.ptr()] = this;
  PyFunction_SetVectorcall(body, &OperatorFunction::call_directly);
#endif
}

OperatorFunction::~OperatorFunction() { direct_functions().erase(function_.ptr()); }

size_t OperatorFunction::number_of(std::string_view name) const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].name == name) return i;
  }
  return kMaxArguments;
}

bool OperatorFunction::describes(const PyObject* function) const {
  const auto* const body = reinterpret_cast<const PyFunctionObject*>(function);
  const auto is = [](const PyObject* now, const nb::object& was) {
    return now == was.ptr() || (now == nullptr && was.is_none());
  };
  return is(body->func_code, code_) && is(body->func_defaults, defaults_) &&
         is(body->func_kwdefaults, keyword_defaults_);
}

bool OperatorFunction::bind(PyObject* const* given, size_t count, PyObject* keywords,
                            Values* values) const {
  if (count > num_positional_) return false;
  for (size_t i = 0; i < count; ++i) (*values)[i] = given[i];
  for (size_t i = count; i < arguments_.size(); ++i) (*values)[i] = nullptr;
  const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < num_keywords; ++k) {
    PyObject* const key = PyTuple_GET_ITEM(keywords, k);
    size_t number = 0;
    while (number < arguments_.size() && arguments_[number].key.ptr() != key) ++number;
    // A name that was put together is another object.
    if (number == arguments_.size()) number = number_of(text_view(key));
    if (number == kMaxArguments || (*values)[number] != nullptr) return false;
    (*values)[number] = given[count + static_cast<size_t>(k)];
  }
  for (size_t i = count; i < arguments_.size(); ++i) {
    if ((*values)[i] != nullptr) continue;
    (*values)[i] = arguments_[i].otherwise.ptr();
    if ((*values)[i] == nullptr) return false;
  }
  return true;
}

PyObject* OperatorFunction::call_directly(PyObject* function, PyObject* const* given, size_t flags,
                                          PyObject* keywords) noexcept {
  try {
    const auto found = direct_functions().find(function);
    Values values;
    if (found != direct_functions().end() && found->second->describes(function) &&
        found->second->bind(given, static_cast<size_t>(PyVectorcall_NARGS(flags)), keywords,
                            &values)) {
      return found->second->run(values, 1).release().ptr();
    }
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  return call_body(function, given, flags, keywords);
}

void OperatorFunction::add_to_key(const Values& values, const PythonCallTensors& bound,
                                  uint64_t wanted, CallKey* key) const {
  key->add(reinterpret_cast<uintptr_t>(this));
  key->add(implementation_of(op_, optional(values, impl_)));
  const bool is_cpu = bound.device_kind() == DeviceKind::kCpu;
  key->add(static_cast<uint64_t>(bound.device_kind()) << 32 |
           static_cast<uint64_t>(is_cpu ? thread_limit() : bound.ordinal()));
  uint64_t present = 0;
  for (const size_t tensor : tensors_) {
    if (values[tensor] != Py_None) present |= uint64_t{1} << tensor;
  }
  key->add(present);
  for (const NamedTensor& entry : bound.inputs()) {
    key->add(entry.tensor.view(), entry.tensor.is_writable());
  }
  key->add(wanted);
  key->add(bound.given().size());
  for (const NamedTensor& entry : bound.given()) {
    key->add(entry.name);
    key->add(entry.tensor.view(), entry.tensor.is_writable());
  }
  // A value that is the default itself is left out, as is an argument that is not given.
  for (const size_t param : params_) {
    const nb::handle value = values[param];
    if (value.is_none() || value.is(arguments_[param].otherwise)) continue;
    add_param({op_, arguments_[param].name}, param, value, key);
  }
}

CallOutcome OperatorFunction::plan_and_run(const Values& values, const CallKey& key,
                                           PythonCallTensors* bound) const {
  bound->require_writable_results();
  Json params = Json::object();
  for (const size_t param : params_) {
    const nb::handle value = values[param];
    if (value.is_none()) continue;
    const std::string& name = arguments_[param].name;
    params.set(name, to_param({op_, name}, value));
  }
  auto record = std::make_shared<CallRecord>();
  CallOutcome outcome = call_operator(
      op_, *bound, params, bound->device(thread_limit()),
      Options{std::string(implementation_of(op_, optional(values, impl_)))}, record.get());
  if (record->is_repeatable()) CallCache::instance().insert(key, std::move(record));
  return outcome;
}

OperatorFunction::Names OperatorFunction::names_of_results(const Values& values,
                                                           PythonCallTensors* bound,
                                                           uint64_t* wanted) const {
  Names names;
  *wanted = 0;
  for (size_t i = 0; i < results_.size(); ++i) {
    const Result& result = results_[i];
    if (result.argument < kMaxArguments && values[result.argument] != result.value.ptr()) {
      const int is_equal =
          PyObject_RichCompareBool(values[result.argument], result.value.ptr(), Py_EQ);
      if (is_equal < 0) throw nb::python_error();
      if (is_equal == 0) {
        bound->add_unwanted(result.name);
        continue;
      }
    }
    names.list[names.count++] = result.name;
    *wanted |= uint64_t{1} << i;
  }
  return names;
}

nb::object OperatorFunction::result_of(const PythonCallTensors& bound, const Names& names) const {
  if (by_name_) return bound.results();
  if (names.count == 0) return nb::none();
  if (names.count == 1) return bound.result(names.list[0]);
  nb::object results = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(names.count)));
  if (!results.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < names.count; ++i) {
    PyTuple_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i),
                     bound.result(names.list[i]).release().ptr());
  }
  if (made_.is_none()) return results;
  nb::object made = nb::steal(PyObject_CallObject(made_.ptr(), results.ptr()));
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

// `caller_level`: frames of Python from the innermost to the caller of the function.
nb::object OperatorFunction::run(const Values& values, int caller_level) const {
  const auto num_inputs = static_cast<size_t>(std::count_if(
      tensors_.begin(), tensors_.end(), [&](size_t tensor) { return values[tensor] != Py_None; }));
  const size_t num_given = optional(values, out_).is_none() ? 0 : results_.size();
  PythonCallTensors bound(op_, nb::borrow(optional(values, stream_)), num_inputs, num_given);
  for (const size_t tensor : tensors_) {
    if (values[tensor] != Py_None) bound.add_input(arguments_[tensor].name, values[tensor]);
  }
  uint64_t wanted = 0;
  const Names names = names_of_results(values, &bound, &wanted);
  for_each_output(op_, names.span(), optional(values, out_),
                  [&](std::string_view name, nb::handle object) { bound.add_given(name, object); });
  CallKey key;
  add_to_key(values, bound, wanted, &key);
  CallOutcome planned;
  const CallOutcome* outcome = &planned;
  const std::shared_ptr<const CallRecord> record = CallCache::instance().find(key, &latest_);
  if (record != nullptr) {
    outcome = &record->repeat(bound);
  } else {
    planned = plan_and_run(values, key, &bound);
  }
  for (const std::string& note : outcome->notes) {
    if (PyErr_WarnEx(PyExc_UserWarning, note.c_str(), caller_level) != 0) throw nb::python_error();
  }
  return result_of(bound, names);
}

nb::object OperatorFunction::call(const nb::dict& arguments) const {
  Values values;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    values[i] = PyDict_GetItemWithError(arguments.ptr(), arguments_[i].key.ptr());
    if (values[i] != nullptr) continue;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    refuse(op_, "the argument " + arguments_[i].name + " is missing");
  }
  return run(values, 3);
}

void bind_operator_functions(nb::module_& module) {
  nb::class_<OperatorFunction>(module, "OperatorFunction", "One function of the package.")
      .def(nb::init<nb::object, const nb::tuple&, const nb::tuple&, const nb::tuple&, nb::object,
                    bool>(),
           nb::arg("function"), nb::arg("tensors"), nb::arg("params"), nb::arg("results"),
           nb::arg("made").none(), nb::arg("by_name"))
      .def("call", &OperatorFunction::call, nb::arg("arguments"),
           "Runs the operator on the locals() of the function.");
  module.def("outputs", &outputs, nb::arg("op"), nb::arg("results"), nb::arg("out").none(),
             "Where results go, by name. Without `results` only a mapping says which is meant.");
  module.def(
      "clear_caches",
      [] {
        CallCache::instance().clear();
        clear_workspaces();
      },
      "Forgets the plans of earlier calls and gives back their workspaces.");
  module.def(
      "cache_info",
      [] {
        const CallCacheInfo info = CallCache::instance().info();
        return std::tuple(info.hits, info.misses, info.entries);
      },
      "Plans of calls: (hits, misses, entries).");
}

}  // namespace fovea::python
