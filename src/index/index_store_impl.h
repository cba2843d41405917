#pragma once

#include "fovea/index_cache.h"

/// The implementations of index_store and index_gather.
namespace fovea::internal {

void index_store_ref(const IndexCacheProblem& problem, const Device& device,
                     const IndexStoreTensors& tensors, Workspace workspace);
void index_store_cpu(const IndexCacheProblem& problem, const Device& device,
                     const IndexStoreTensors& tensors, Workspace workspace);
void index_store_cuda_portable(const IndexCacheProblem& problem, const Device& device,
                               const IndexStoreTensors& tensors, Workspace workspace,
                               Stream stream);

void index_gather_ref(const IndexCacheProblem& problem, const Device& device,
                      const IndexGatherTensors& tensors, Workspace workspace);
void index_gather_cpu(const IndexCacheProblem& problem, const Device& device,
                      const IndexGatherTensors& tensors, Workspace workspace);
void index_gather_cuda_portable(const IndexCacheProblem& problem, const Device& device,
                                const IndexGatherTensors& tensors, Workspace workspace,
                                Stream stream);

}  // namespace fovea::internal
