#pragma once

#include "fovea/merge_lse.h"

/// The implementations of merge_lse.
namespace fovea::internal {

void merge_lse_ref(const MergeLseProblem& problem, const Device& device,
                   const MergeLseTensors& tensors, Workspace workspace);
void merge_lse_cpu(const MergeLseProblem& problem, const Device& device,
                   const MergeLseTensors& tensors, Workspace workspace);
void merge_lse_cuda_portable(const MergeLseProblem& problem, const Device& device,
                             const MergeLseTensors& tensors, Workspace workspace, Stream stream);

/// Workspace of merge_lse_cpu: the weights of all parts, once per worker, each on cache lines of
/// its own.
inline int64_t merge_weights_stride(const MergeLseProblem& problem) {
  return (problem.num_parts + 15) / 16 * 16;
}
size_t merge_lse_cpu_workspace_bytes(const MergeLseProblem& problem, const Device& device);

}  // namespace fovea::internal
