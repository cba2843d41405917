#pragma once

#include "fovea/index_logits.h"

/// The implementations of index_logits.
namespace fovea::internal {

void index_logits_ref(const IndexLogitsProblem& problem, const Device& device,
                      const IndexLogitsTensors& tensors, Workspace workspace);

size_t index_logits_cpu_bytes(const IndexLogitsProblem& problem, const Device& device);
void index_logits_cpu(const IndexLogitsProblem& problem, const Device& device,
                      const IndexLogitsTensors& tensors, Workspace workspace);

}  // namespace fovea::internal
