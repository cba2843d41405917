#pragma once

#include <nanobind/nanobind.h>

namespace fovea::python {

/// set_memory_resource of the module.
void bind_memory(nanobind::module_& module);

}  // namespace fovea::python
