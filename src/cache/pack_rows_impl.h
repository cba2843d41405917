#pragma once

#include "fovea/row_codec.h"

/// The implementations of pack_rows.
namespace fovea::internal {

void pack_rows_ref(const RowCodecProblem& problem, const Device& device,
                   const PackRowsTensors& tensors, Workspace workspace);
void pack_rows_cpu(const RowCodecProblem& problem, const Device& device,
                   const PackRowsTensors& tensors, Workspace workspace);
void pack_rows_cuda_portable(const RowCodecProblem& problem, const Device& device,
                             const PackRowsTensors& tensors, Workspace workspace, Stream stream);

}  // namespace fovea::internal
