#pragma once

#include "fovea/move_rows.h"

/// The implementations of move_rows.
namespace fovea::internal {

void move_rows_ref(const MoveRowsProblem& problem, const Device& device,
                   const MoveRowsTensors& tensors, Workspace workspace);
void move_rows_cpu(const MoveRowsProblem& problem, const Device& device,
                   const MoveRowsTensors& tensors, Workspace workspace);
void move_rows_cuda_portable(const MoveRowsProblem& problem, const Device& device,
                             const MoveRowsTensors& tensors, Workspace workspace, Stream stream);

}  // namespace fovea::internal
