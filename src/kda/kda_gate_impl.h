#pragma once

#include "fovea/kda_gate.h"
#include "src/core/implementation_list.h"

/// The implementations of kda_gate.
namespace fovea::internal {

void kda_gate_ref(const KdaGateProblem& problem, const Device& device,
                  const KdaGateTensors& tensors, Workspace workspace);

}  // namespace fovea::internal
