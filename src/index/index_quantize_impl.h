#pragma once

#include "fovea/index_quantize.h"

/// The implementations of index_quantize.
namespace fovea::internal {

/// Added to the variance of the LayerNorm of k.
inline constexpr double kIndexNormEps = 1e-6;

size_t index_quantize_ref_bytes(const IndexQuantizeProblem& problem, const Device& device);
void index_quantize_ref(const IndexQuantizeProblem& problem, const Device& device,
                        const IndexQuantizeTensors& tensors, Workspace workspace);

size_t index_quantize_cpu_bytes(const IndexQuantizeProblem& problem, const Device& device);
void index_quantize_cpu(const IndexQuantizeProblem& problem, const Device& device,
                        const IndexQuantizeTensors& tensors, Workspace workspace);

void index_quantize_cuda_portable(const IndexQuantizeProblem& problem, const Device& device,
                                  const IndexQuantizeTensors& tensors, Workspace workspace,
                                  Stream stream);

}  // namespace fovea::internal
