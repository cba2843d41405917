#pragma once

#include "fovea/topk_select.h"

namespace fovea::test::gpu {

/// Runs topk_select's cuda_sm90 on the model, with settings(), and returns the blocks of a row's
/// cluster; 0: the rows are cuda_portable's, nothing was run.
int64_t run_topk_select_sm90(const TopkSelectProblem& problem, const TopkSelectTensors& tensors);

}  // namespace fovea::test::gpu
