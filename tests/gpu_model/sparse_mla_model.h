#pragma once

#include "fovea/sparse_mla.h"

namespace fovea::test::gpu {

/// Plans and runs sparse_mla on the model, with settings().
void run_sparse_mla(SparseMlaProblem problem, const SparseMlaTensors& tensors);

}  // namespace fovea::test::gpu
