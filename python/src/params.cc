#include "python/src/params.h"

#include <nanobind/stl/string.h>

#include <cmath>

#include "fovea/error.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

[[noreturn]] void refuse_param(const Label& label, nb::handle value) {
  throw Error(ErrorCode::kInvalidArgument, label.text() + " is of type " +
                                               Py_TYPE(value.ptr())->tp_name +
                                               ", expected a number, a flag or a word");
}

// The value as `read` takes it, or null where it is of another kind.
template <class Read>
bool reads(Read read) {
  try {
    read();
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

Json to_param(const Label& label, nb::handle value) {
  PyObject* object = value.ptr();
  if (PyBool_Check(object)) return Json(object == Py_True);
  if (PyUnicode_Check(object)) return Json(nb::cast<std::string>(value));
  if (PyIndex_Check(object) != 0) {
    const nb::object integer = nb::steal(PyNumber_Index(object));
    if (!integer.is_valid()) {
      PyErr_Clear();
      refuse_param(label, value);
    }
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
    if (overflow != 0) {
      throw Error(ErrorCode::kInvalidArgument, label.text() + " is beyond 64 bits");
    }
    return Json(static_cast<int64_t>(number));
  }
  const double number = PyFloat_AsDouble(object);
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse_param(label, value);
  }
  if (!(number - number == 0)) {
    throw Error(ErrorCode::kInvalidArgument, label.text() + " is not finite");
  }
  return Json(number);
}

Json to_params(const std::string& label, const nb::dict& params) {
  Json result = Json::object();
  for (const auto& [key, value] : params) {
    if (value.is_none()) continue;
    const auto name = nb::cast<std::string>(key);
    result.set(name, to_param({label, name}, value));
  }
  return result;
}

void Fields::refuse(const char* name, const Json& found, const std::string& expected) const {
  throw Error(ErrorCode::kInvalidArgument,
              label_ + ": " + name + " = " + found.dump() + ", expected " + expected);
}

void Fields::operator()(const char* name, int64_t* field) const {
  const Json* value = params_.find(name);
  if (value == nullptr) return;
  if (!reads([&] { *field = value->as_integer(); })) refuse(name, *value, "an integer");
}

void Fields::operator()(const char* name, int32_t* field) const {
  int64_t wide = *field;
  (*this)(name, &wide);
  *field = static_cast<int32_t>(wide);
  if (*field != wide) refuse(name, *params_.find(name), "an integer of 32 bits");
}

void Fields::operator()(const char* name, double* field) const {
  const Json* value = params_.find(name);
  if (value == nullptr) return;
  if (!reads([&] { *field = value->as_number(); })) refuse(name, *value, "a number");
}

void Fields::operator()(const char* name, float* field) const {
  double wide = *field;
  (*this)(name, &wide);
  *field = static_cast<float>(wide);
  if (!std::isfinite(*field)) refuse(name, *params_.find(name), "a finite fp32 number");
}

void Fields::operator()(const char* name, bool* field) const {
  const Json* value = params_.find(name);
  if (value == nullptr) return;
  if (!reads([&] { *field = value->as_bool(); })) refuse(name, *value, "True or False");
}

void Fields::operator()(const char* name, std::string* field) const {
  const Json* value = params_.find(name);
  if (value == nullptr) return;
  if (!reads([&] { *field = value->as_string(); })) refuse(name, *value, "a word");
}

}  // namespace fovea::python
