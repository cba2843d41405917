#pragma once

#include <cstddef>

#include "fovea/mha_varlen.h"
#include "src/core/implementation_list.h"
#include "src/mla/request_ranges.h"

/// The implementations of mha_varlen.
namespace fovea::internal {

size_t mha_varlen_ref_workspace(const MhaVarlenProblem& problem, const Device& device);
void mha_varlen_ref(const MhaVarlenProblem& problem, const Device& device,
                    const MhaVarlenTensors& tensors, Workspace workspace);

size_t mha_varlen_cpu_workspace(const MhaVarlenProblem& problem, const Device& device);
void mha_varlen_cpu(const MhaVarlenProblem& problem, const Device& device,
                    const MhaVarlenTensors& tensors, Workspace workspace);

Refusal mha_varlen_cuda_supports(const MhaVarlenProblem& problem);
size_t mha_varlen_cuda_workspace(const MhaVarlenProblem& problem, const Device& device);
void mha_varlen_cuda_portable(const MhaVarlenProblem& problem, const Device& device,
                              const MhaVarlenTensors& tensors, Workspace workspace, Stream stream);

}  // namespace fovea::internal
