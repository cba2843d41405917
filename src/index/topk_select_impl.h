#pragma once

#include "fovea/topk_select.h"

/// The implementations of topk_select.
namespace fovea::internal {

size_t topk_select_ref_workspace(const TopkSelectProblem& problem, const Device& device);
void topk_select_ref(const TopkSelectProblem& problem, const Device& device,
                     const TopkSelectTensors& tensors, Workspace workspace);

size_t topk_select_cpu_workspace(const TopkSelectProblem& problem, const Device& device);
void topk_select_cpu(const TopkSelectProblem& problem, const Device& device,
                     const TopkSelectTensors& tensors, Workspace workspace);

size_t topk_select_cuda_workspace(const TopkSelectProblem& problem, const Device& device);
void topk_select_cuda_portable(const TopkSelectProblem& problem, const Device& device,
                               const TopkSelectTensors& tensors, Workspace workspace,
                               Stream stream);
/// Few rows, a cluster of blocks each; others as cuda_portable, whose workspace it takes.
void topk_select_cuda_sm90(const TopkSelectProblem& problem, const Device& device,
                           const TopkSelectTensors& tensors, Workspace workspace, Stream stream);

/// The checks of TopkSelect::run(), for operators that select through its implementations.
void check_topk_select_problem(const char* op, const TopkSelectProblem& problem);
void check_topk_transform_tensors(const char* op, const TopkSelectProblem& problem,
                                  const TopkSelectTensors& tensors, int64_t live_rows);

}  // namespace fovea::internal
