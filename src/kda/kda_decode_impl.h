#pragma once

#include <cstdint>

#include "fovea/kda_decode.h"
#include "src/core/implementation_list.h"

/// The implementations of kda_decode.
namespace fovea::internal {

size_t kda_decode_ref_workspace(const KdaDecodeProblem& problem, const Device& device);
void kda_decode_ref(const KdaDecodeProblem& problem, const Device& device,
                    const KdaDecodeTensors& tensors, Workspace workspace);

Refusal kda_decode_cuda_supports(const KdaDecodeProblem& problem);
size_t kda_decode_cuda_workspace(const KdaDecodeProblem& problem, const Device& device);
void kda_decode_cuda_portable(const KdaDecodeProblem& problem, const Device& device,
                              const KdaDecodeTensors& tensors, Workspace workspace, Stream stream);
size_t kda_decode_cpu_workspace(const KdaDecodeProblem& problem, const Device& device);
void kda_decode_cpu(const KdaDecodeProblem& problem, const Device& device,
                    const KdaDecodeTensors& tensors, Workspace workspace);

/// Elements of int64_t that judge_kda_decode needs: 0 without `check`.
int64_t kda_decode_check_elements(const KdaDecodeProblem& problem);
/// What an implementation on the host does first: with `check` a fault of the contents throws.
void judge_kda_decode(const KdaDecodeProblem& problem, const KdaDecodeTensors& tensors,
                      int64_t* scratch);

}  // namespace fovea::internal
