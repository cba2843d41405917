#pragma once

#include "fovea/index_logits.h"

namespace fovea::test::gpu {

/// Runs index_logits on the model, with settings(): cuda_sm90.
void run_index_logits_sm90(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors);

}  // namespace fovea::test::gpu
