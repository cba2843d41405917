#pragma once

#include "fovea/merge_lse.h"

/// The implementations of merge_lse.
namespace fovea::internal {

void merge_lse_ref(const MergeLseProblem& problem, const Device& device,
                   const MergeLseTensors& tensors, Workspace workspace);
void merge_lse_cpu(const MergeLseProblem& problem, const Device& device,
                   const MergeLseTensors& tensors, Workspace workspace);

}  // namespace fovea::internal
