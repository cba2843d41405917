#include "src/replay/model_family.h"

#include <limits>

namespace fovea::internal {

void ModelFamily::check_options(const ReplayOptions& /*options*/) const {}

int64_t ModelFamily::selecting_length(const RunSetup& /*setup*/) const {
  return std::numeric_limits<int64_t>::max();
}

std::optional<FaultCandidate> ModelFamily::find_fault(const RunSetup& /*setup*/,
                                                      const std::string& /*kind*/,
                                                      const StepEntry& /*entry*/) const {
  return std::nullopt;
}

}  // namespace fovea::internal
