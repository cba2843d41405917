#include "fovea/version.h"

namespace fovea {

std::string_view version() noexcept { return FOVEA_VERSION; }

}  // namespace fovea
