#pragma once

#include "fovea/kda_gate.h"
#include "src/core/implementation_list.h"

/// The implementations of kda_gate.
namespace fovea::internal {

void kda_gate_cpu(const KdaGateProblem& problem, const Device& device,
                  const KdaGateTensors& tensors, Workspace workspace);
void kda_gate_ref(const KdaGateProblem& problem, const Device& device,
                  const KdaGateTensors& tensors, Workspace workspace);

Refusal kda_gate_cuda_supports(const KdaGateProblem& problem);
void kda_gate_cuda_portable(const KdaGateProblem& problem, const Device& device,
                            const KdaGateTensors& tensors, Workspace workspace, Stream stream);

}  // namespace fovea::internal
