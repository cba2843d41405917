#pragma once

#include "fovea/index_logits.h"
#include "src/core/implementation_list.h"

/// The implementations of index_logits.
namespace fovea::internal {

void index_logits_ref(const IndexLogitsProblem& problem, const Device& device,
                      const IndexLogitsTensors& tensors, Workspace workspace);

size_t index_logits_cpu_bytes(const IndexLogitsProblem& problem, const Device& device);
void index_logits_cpu(const IndexLogitsProblem& problem, const Device& device,
                      const IndexLogitsTensors& tensors, Workspace workspace);

/// Needs AVX512-BF16; empty when the instruction sets in use have it.
Refusal index_logits_avx512bf16_available();
size_t index_logits_avx512bf16_bytes(const IndexLogitsProblem& problem, const Device& device);
void index_logits_avx512bf16(const IndexLogitsProblem& problem, const Device& device,
                             const IndexLogitsTensors& tensors, Workspace workspace);

/// Needs no workspace.
void index_logits_cuda_portable(const IndexLogitsProblem& problem, const Device& device,
                                const IndexLogitsTensors& tensors, Workspace workspace,
                                Stream stream);

/// Multiplies on the fp8 tensor cores of compute capability 9.0. Needs no workspace.
Refusal index_logits_cuda_sm90_supports(const IndexLogitsProblem& problem);
Refusal index_logits_cuda_sm90_preferred(const IndexLogitsProblem& problem);
void index_logits_cuda_sm90(const IndexLogitsProblem& problem, const Device& device,
                            const IndexLogitsTensors& tensors, Workspace workspace, Stream stream);

}  // namespace fovea::internal
