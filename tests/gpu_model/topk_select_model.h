#pragma once

#include <vector>

#include "fovea/topk_select.h"

namespace fovea::test::gpu {

/// Runs topk_select's cuda_sm90 on the model, with settings(), and returns the blocks of a row's
/// cluster; 0: one block has whole rows, one after another; -1: the rows are cuda_portable's,
/// nothing was run.
int64_t run_topk_select_sm90(const TopkSelectProblem& problem, const TopkSelectTensors& tensors);

/// The positions of a row's sample where one block has the row.
std::vector<size_t> topk_select_sm90_sample(const float* row, int64_t length);

}  // namespace fovea::test::gpu
