#pragma once

#include <string>
#include <string_view>

namespace fovea::python {

/// What errors call an argument: "<operator>: <argument>", put together where one is thrown.
struct Label {
  std::string_view op;
  std::string_view name;

  std::string text() const { return std::string(op).append(": ").append(name); }
};

}  // namespace fovea::python
