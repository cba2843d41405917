#pragma once

#include <string_view>

#include "fovea/export.h"

namespace fovea {

/// "major.minor.patch".
FOVEA_API std::string_view version() noexcept;

}  // namespace fovea
