#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/implementation.h"
#include "src/core/check.h"

/// Which implementation each operator of a backend runs.
namespace fovea::internal {

/// The implementations of every operator, and options that force one name where it exists (empty:
/// none).
class OperatorOptions {
 public:
  /// Throws Error(kInvalidArgument) in the name of `backend` when no operator has `forced`.
  OperatorOptions(const char* backend, const std::string& forced)
      : backend_(backend), forced_(forced), operators_(operators()) {
    if (forced.empty() ||
        std::any_of(operators_.begin(), operators_.end(),
                    [&](const OperatorInfo& info) { return has(info, forced); })) {
      return;
    }
    invalid(backend, "implementation = '" + forced + "', which no operator of this build has");
  }

  const char* backend() const { return backend_; }

  Options operator()(const char* op) const {
    const OperatorInfo* const info = find(op);
    return Options{info != nullptr && has(*info, forced_) ? forced_ : std::string()};
  }

  /// The implementation for `device` ranked after `name`; null when that is the last.
  const std::string* next(const char* op, std::string_view name, DeviceKind device) const {
    bool after = false;
    const OperatorInfo* const info = find(op);
    if (info == nullptr) return nullptr;
    for (const ImplementationInfo& entry : info->implementations) {
      if (after && entry.available && entry.device == device) return &entry.name;
      after = after || entry.name == name;
    }
    return nullptr;
  }

 private:
  static bool has(const OperatorInfo& info, const std::string& name) {
    return std::any_of(info.implementations.begin(), info.implementations.end(),
                       [&](const ImplementationInfo& entry) { return entry.name == name; });
  }
  const OperatorInfo* find(const char* op) const {
    const auto found = std::find_if(operators_.begin(), operators_.end(),
                                    [&](const OperatorInfo& info) { return info.name == op; });
    return found == operators_.end() ? nullptr : &*found;
  }

  const char* backend_;
  std::string forced_;
  std::vector<OperatorInfo> operators_;
};

}  // namespace fovea::internal
