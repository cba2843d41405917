#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fovea/export.h"
#include "fovea/swa_decode.h"
#include "src/core/implementation_list.h"
#include "src/core/workspace.h"

/// swa_decode: every implementation narrows lists of 64 bits, then is the one of sparse_mla.
namespace fovea::internal {

size_t swa_decode_ref_workspace(const SwaDecodeProblem& problem, const Device& device);
void swa_decode_ref(const SwaDecodeProblem& problem, const Device& device,
                    const SwaDecodeTensors& tensors, Workspace workspace);
size_t swa_decode_cpu_workspace(const SwaDecodeProblem& problem, const Device& device);
void swa_decode_cpu(const SwaDecodeProblem& problem, const Device& device,
                    const SwaDecodeTensors& tensors, Workspace workspace);
size_t swa_decode_cpu_avx512bf16_workspace(const SwaDecodeProblem& problem, const Device& device);
void swa_decode_cpu_avx512bf16(const SwaDecodeProblem& problem, const Device& device,
                               const SwaDecodeTensors& tensors, Workspace workspace);
Refusal swa_decode_cuda_supports(const SwaDecodeProblem& problem);
size_t swa_decode_cuda_workspace(const SwaDecodeProblem& problem, const Device& device);
void swa_decode_cuda_portable(const SwaDecodeProblem& problem, const Device& device,
                              const SwaDecodeTensors& tensors, Workspace workspace, Stream stream);
Refusal swa_decode_cuda_sm90_preferred(const SwaDecodeProblem& problem);
size_t swa_decode_cuda_sm90_workspace(const SwaDecodeProblem& problem, const Device& device);
void swa_decode_cuda_sm90(const SwaDecodeProblem& problem, const Device& device,
                          const SwaDecodeTensors& tensors, Workspace workspace, Stream stream);

/// Columns of a list that any row may look at.
inline int64_t swa_columns(const SwaDecodeProblem& problem) {
  return std::min(problem.width, problem.window);
}

/// An index as 32 bits: what they do not hold is outside every cache.
FOVEA_HOST_DEVICE inline int32_t narrow_index(int64_t index) {
  return index < 0 || index > 0x7FFFFFFF ? -1 : static_cast<int32_t>(index);
}
/// A length as 32 bits, clamped.
FOVEA_HOST_DEVICE inline int32_t narrow_length(int64_t length) {
  return static_cast<int32_t>(length < 0 ? 0 : length > 0x7FFFFFFF ? 0x7FFFFFFF : length);
}

/// swa_indices as [>= T, Wi], whatever its rank.
ConstTensorView swa_index_rows(const SwaDecodeTensors& tensors);

/// The same attention as a problem of sparse_mla.
SparseMlaProblem swa_sparse_problem(const SwaDecodeProblem& problem);

/// What swa_decode keeps beside the workspace of sparse_mla.
struct SwaMemory {
  int32_t* indices;  // [max_rows, columns], of 64-bit lists
  int32_t* lens;     // [max_rows], likewise
  float* lse;        // [max_rows, H], when the caller wants none

  SwaMemory(const SwaDecodeProblem& problem, WorkspaceCutter& cutter);
};

/// The tensors of sparse_mla; 64-bit lists are those of `memory`.
SparseMlaTensors swa_sparse_tensors(const SwaDecodeProblem& problem,
                                    const SwaDecodeTensors& tensors, const SwaMemory& memory);

/// Bytes of SwaMemory, and what is behind them.
size_t swa_memory_bytes(const SwaDecodeProblem& problem);
inline Workspace behind_swa_memory(const SwaDecodeProblem& problem, Workspace workspace) {
  const size_t bytes = swa_memory_bytes(problem);
  if (workspace.data == nullptr) return {};
  return {static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes};
}

}  // namespace fovea::internal
