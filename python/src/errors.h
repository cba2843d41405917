#pragma once

#include <nanobind/nanobind.h>

#include <exception>

namespace fovea::python {

/// Makes an exception of C++ the error of Python: Error as the class of its code, what Python has
/// thrown as it was, any other as nanobind does.
void set_python_error(const std::exception_ptr& pointer) noexcept;

/// The exception classes, and the translation of Error in functions of the module.
void bind_errors(nanobind::module_& module);

}  // namespace fovea::python
