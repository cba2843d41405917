#include "python/src/operator_function.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <bit>
#include <memory>
#include <string_view>
#include <tuple>
#include <utility>

#include "fovea/error.h"
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

// An argument of the function, None when it has no such one.
nb::handle find(const nb::dict& arguments, nb::handle key) {
  PyObject* value = PyDict_GetItemWithError(arguments.ptr(), key.ptr());
  if (value == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value == nullptr ? nb::handle(Py_None) : nb::handle(value);
}

[[noreturn]] void refuse(std::string_view op, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, std::string(op).append(": ").append(what));
}

std::string class_name(nb::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::string list(const nb::tuple& names) {
  std::string text;
  for (const nb::handle name : names) {
    text.append(text.empty() ? "" : ", ").append(text_view(name));
  }
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
void for_each_output(std::string_view op, const nb::tuple& results, nb::handle out, Add add) {
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
  const size_t count = nb::len(results);
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
      if (!tensor.is_none()) add(text_view(results[i]), tensor);
    }
    return;
  }
  if (count != 1) {
    refuse(op, "out is one tensor, expected a tuple of " + list(results) + " or a mapping by name");
  }
  add(text_view(results[0]), out);
}

nb::dict outputs(const std::string& op, const nb::tuple& results, const nb::object& out) {
  nb::dict by_name;
  for_each_output(op, results, out, [&](std::string_view name, nb::handle tensor) {
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

PyObject* impl_key() {
  static PyObject* const key = interned("impl");
  return key;
}

// The implementation that the caller names; empty: none.
std::string_view implementation_of(std::string_view op, const nb::dict& arguments) {
  const nb::handle impl = find(arguments, impl_key());
  if (impl.is_none()) return {};
  if (PyUnicode_Check(impl.ptr()) == 0) {
    refuse(op, "impl is of type " + class_name(impl) + ", expected the name of an implementation");
  }
  return text_view(impl);
}

nb::object stream_of(const nb::dict& arguments) {
  static PyObject* const key = interned("stream");
  return nb::borrow(find(arguments, key));
}

}  // namespace

OperatorFunction::OperatorFunction(std::string op, const nb::tuple& tensors,
                                   const nb::tuple& params)
    : op_(std::move(op)) {
  for (const auto& [names, arguments] : {std::pair(&tensors, &tensors_), {&params, &params_}}) {
    for (const nb::handle name : *names) {
      std::string text(text_view(name));
      arguments->push_back({nb::steal(interned(text.c_str())), std::move(text)});
    }
  }
}

void OperatorFunction::add_to_key(const nb::dict& arguments, const PythonCallTensors& bound,
                                  CallKey* key) const {
  key->add(op_);
  key->add(implementation_of(op_, arguments));
  const bool is_cpu = bound.device_kind() == DeviceKind::kCpu;
  key->add(static_cast<uint64_t>(bound.device_kind()) << 32 |
           static_cast<uint64_t>(is_cpu ? thread_limit() : bound.ordinal()));
  for (const auto* tensors : {&bound.inputs(), &bound.given()}) {
    key->add(tensors->size());
    for (const NamedTensor& entry : *tensors) {
      key->add(entry.name);
      key->add(entry.tensor.view(), entry.tensor.is_writable());
    }
  }
  key->add(bound.unwanted().size());
  for (const std::string& name : bound.unwanted()) key->add(name);
  for (size_t i = 0; i < params_.size(); ++i) {
    const nb::handle value = find(arguments, params_[i].key);
    if (!value.is_none()) add_param({op_, params_[i].name}, i, value, key);
  }
}

CallOutcome OperatorFunction::plan_and_run(const nb::dict& arguments, const CallKey& key,
                                           PythonCallTensors* bound) const {
  bound->require_writable_results();
  Json params = Json::object();
  for (const Argument& param : params_) {
    const nb::handle value = find(arguments, param.key);
    if (!value.is_none()) params.set(param.name, to_param({op_, param.name}, value));
  }
  auto record = std::make_shared<CallRecord>();
  CallOutcome outcome =
      call_operator(op_, *bound, params, bound->device(thread_limit()),
                    Options{std::string(implementation_of(op_, arguments))}, record.get());
  if (record->is_repeatable()) CallCache::instance().insert(key, std::move(record));
  return outcome;
}

nb::object OperatorFunction::call(const nb::dict& arguments, const nb::tuple& results,
                                  const nb::tuple& unwanted) const {
  static PyObject* const out_key = interned("out");
  PythonCallTensors bound(op_, stream_of(arguments));
  for (const Argument& tensor : tensors_) {
    const nb::handle object = find(arguments, tensor.key);
    if (!object.is_none()) bound.add_input(tensor.name, object);
  }
  for_each_output(op_, results, find(arguments, out_key),
                  [&](std::string_view name, nb::handle object) { bound.add_given(name, object); });
  for (const nb::handle name : unwanted) bound.add_unwanted(text_view(name));
  CallKey key;
  add_to_key(arguments, bound, &key);
  CallOutcome planned;
  const CallOutcome* outcome = &planned;
  const std::shared_ptr<const CallRecord> record = CallCache::instance().find(key);
  if (record != nullptr) {
    outcome = &record->repeat(bound);
  } else {
    planned = plan_and_run(arguments, key, &bound);
  }
  for (const std::string& note : outcome->notes) {
    // Of the caller of the function that called this.
    if (PyErr_WarnEx(PyExc_UserWarning, note.c_str(), 3) != 0) throw nb::python_error();
  }
  const size_t count = nb::len(results);
  if (count == 0) return bound.results();
  if (count == 1) return bound.result(text_view(results[0]));
  nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(count)));
  if (!tuple.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i),
                     bound.result(text_view(results[i])).release().ptr());
  }
  return tuple;
}

void bind_operator_functions(nb::module_& module) {
  nb::class_<OperatorFunction>(module, "OperatorFunction", "One function of the package.")
      .def(nb::init<std::string, const nb::tuple&, const nb::tuple&>(), nb::arg("op"),
           nb::arg("tensors"), nb::arg("params"))
      .def("call", &OperatorFunction::call, nb::arg("arguments"), nb::arg("results"),
           nb::arg("unwanted"),
           "Runs the operator on the locals() of the function: the results in their order.");
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
