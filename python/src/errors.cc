#include "python/src/errors.h"

#include <nanobind/stl/string.h>

#include <new>
#include <string>
#include <utility>
#include <vector>

#include "fovea/error.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

// Exception classes by the word of the error code, then the base class.
struct ErrorClasses {
  std::vector<std::pair<std::string, nb::object>> classes;
  nb::object base;
};

// Never destroyed: exceptions may be thrown while the interpreter ends.
ErrorClasses& error_classes() {
  static auto* classes = new ErrorClasses;
  return *classes;
}

void register_errors(nb::dict classes, nb::object base) {
  ErrorClasses& known = error_classes();
  known.classes.clear();
  for (const auto& [code, type] : classes) {
    known.classes.emplace_back(nb::cast<std::string>(code), nb::borrow(type));
  }
  known.base = std::move(base);
}

void set_error(const Error& error) {
  const ErrorClasses& known = error_classes();
  PyObject* type = known.base.is_valid() ? known.base.ptr() : PyExc_RuntimeError;
  for (const auto& [word, entry] : known.classes) {
    if (word == to_string(error.code())) type = entry.ptr();
  }
  PyErr_SetString(type, error.what());
}

void translate(const std::exception_ptr& pointer, void* /*unused*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    set_error(error);
  }
}

}  // namespace

void set_python_error(const std::exception_ptr& pointer) noexcept {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    set_error(error);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_SystemError, "an exception without a text");
  }
}

void bind_errors(nb::module_& module) {
  nb::register_exception_translator(translate);
  module.def("register_errors", &register_errors, nb::arg("classes"), nb::arg("base"),
             "Sets the exception classes by error code, and the class of every other code.");
}

}  // namespace fovea::python
