#pragma once

#include "fovea/row_codec.h"

/// The implementations of unpack_rows.
namespace fovea::internal {

void unpack_rows_ref(const RowCodecProblem& problem, const Device& device,
                     const UnpackRowsTensors& tensors, Workspace workspace);
void unpack_rows_cpu(const RowCodecProblem& problem, const Device& device,
                     const UnpackRowsTensors& tensors, Workspace workspace);
void unpack_rows_cuda_portable(const RowCodecProblem& problem, const Device& device,
                               const UnpackRowsTensors& tensors, Workspace workspace,
                               Stream stream);

}  // namespace fovea::internal
