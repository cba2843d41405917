#pragma once

#include "fovea/replay.h"
#include "src/replay/model_presets.h"

namespace fovea::internal {

/// replay() for a model given by its shapes instead of its name.
ReplayResult run_replay(const Trace& trace, const ReplayOptions& options, const ModelSpec& model,
                        const ReplayProgressCallback& progress = {});

/// Value at `share` (0..1) of a sorted list by nearest rank; 0 for an empty list.
double percentile(const std::vector<double>& sorted, double share);

}  // namespace fovea::internal
