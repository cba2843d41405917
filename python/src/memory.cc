#include "python/src/memory.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "fovea/device_memory.h"
#include "python/src/serving.h"
#include "python/src/workspaces.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

// Memory that functions of Python give: allocate(bytes, stream) -> address, 0 or an exception where
// there is not enough; release(address, bytes, stream).
class PythonMemory : public MemoryResource {
 public:
  PythonMemory(nb::object allocate, nb::object release)
      : allocate_(std::move(allocate)), release_(std::move(release)) {}

  ~PythonMemory() override {
    if (Py_IsInitialized() != 0) {
      const nb::gil_scoped_acquire acquire;
      allocate_.reset();
      release_.reset();
    } else {
      allocate_.release();
      release_.release();
    }
  }
  PythonMemory(const PythonMemory&) = delete;
  PythonMemory& operator=(const PythonMemory&) = delete;

  void* allocate(size_t bytes, Stream stream) noexcept override {
    if (bytes == 0 || Py_IsInitialized() == 0) return nullptr;
    const nb::gil_scoped_acquire acquire;
    const nb::error_scope keep;
    try {
      const nb::object address = allocate_(bytes, number_of(stream));
      return reinterpret_cast<void*>(nb::cast<uintptr_t>(address));
    } catch (nb::python_error&) {
      return nullptr;  // the caller says how many bytes are missing
    } catch (nb::cast_error&) {
      return nullptr;
    }
  }

  void release(void* data, size_t bytes, Stream stream) noexcept override {
    if (Py_IsInitialized() == 0) return;  // the process ends
    const nb::gil_scoped_acquire acquire;
    const nb::error_scope keep;
    try {
      release_(reinterpret_cast<uintptr_t>(data), bytes, number_of(stream));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable(release_);
    }
  }

 private:
  static uintptr_t number_of(Stream stream) { return reinterpret_cast<uintptr_t>(stream.handle); }

  nb::object allocate_;
  nb::object release_;
};

void set_memory(const std::string& device, nb::object allocate, nb::object release) {
  const Device where = device_of(device);
  std::shared_ptr<MemoryResource> resource;
  if (!allocate.is_none()) {
    resource = std::make_shared<PythonMemory>(std::move(allocate), std::move(release));
  }
  {
    const nb::gil_scoped_release unlocked;
    set_memory_resource(where, std::move(resource));
    clear_workspaces();
  }
}

}  // namespace

void bind_memory(nb::module_& module) {
  module.def("set_memory_resource", &set_memory, nb::arg("device"), nb::arg("allocate").none(),
             nb::arg("release").none(),
             "Where the memory of a device comes from; None: the library's own.");
}

}  // namespace fovea::python
