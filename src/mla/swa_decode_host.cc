#include "src/core/access.h"
#include "src/mla/sparse_mla_impl.h"
#include "src/mla/swa_decode_impl.h"

namespace fovea::internal {
namespace {

using SparseRun = void (*)(const SparseMlaProblem&, const Device&, const SparseMlaTensors&,
                           Workspace);

// Lists of 64 bits as lists of 32, as far as rows may look at them.
void narrow_lists(const SwaDecodeProblem& problem, const SwaDecodeTensors& tensors,
                  const SwaMemory& memory) {
  const int64_t rows = tensors.q.shape[0], columns = swa_columns(problem);
  if (tensors.swa_lens.dtype == DType::kI64) {
    const auto lens = access<const int64_t, 1>(tensors.swa_lens);
    for (int64_t t = 0; t < rows; ++t) memory.lens[t] = narrow_length(lens(t));
  }
  if (tensors.swa_indices.dtype != DType::kI64) return;
  const auto indices = access<const int64_t, 2>(swa_index_rows(tensors));
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t j = 0; j < columns; ++j)
      memory.indices[t * columns + j] = narrow_index(indices(t, j));
  }
}

void run_on_host(const SwaDecodeProblem& problem, const Device& device,
                 const SwaDecodeTensors& tensors, Workspace workspace, SparseRun attend) {
  WorkspaceCutter cutter(workspace);
  const SwaMemory memory(problem, cutter);
  narrow_lists(problem, tensors, memory);
  attend(swa_sparse_problem(problem), device, swa_sparse_tensors(problem, tensors, memory),
         behind_swa_memory(problem, workspace));
}

}  // namespace

size_t swa_decode_ref_workspace(const SwaDecodeProblem& problem, const Device& device) {
  return swa_memory_bytes(problem) + sparse_mla_ref_workspace(swa_sparse_problem(problem), device);
}
size_t swa_decode_cpu_workspace(const SwaDecodeProblem& problem, const Device& device) {
  return swa_memory_bytes(problem) + sparse_mla_cpu_workspace(swa_sparse_problem(problem), device);
}
size_t swa_decode_cpu_avx512bf16_workspace(const SwaDecodeProblem& problem, const Device& device) {
  return swa_memory_bytes(problem) +
         sparse_mla_cpu_avx512bf16_workspace(swa_sparse_problem(problem), device);
}

void swa_decode_ref(const SwaDecodeProblem& problem, const Device& device,
                    const SwaDecodeTensors& tensors, Workspace workspace) {
  run_on_host(problem, device, tensors, workspace, sparse_mla_ref);
}
void swa_decode_cpu(const SwaDecodeProblem& problem, const Device& device,
                    const SwaDecodeTensors& tensors, Workspace workspace) {
  run_on_host(problem, device, tensors, workspace, sparse_mla_cpu);
}
void swa_decode_cpu_avx512bf16(const SwaDecodeProblem& problem, const Device& device,
                               const SwaDecodeTensors& tensors, Workspace workspace) {
  run_on_host(problem, device, tensors, workspace, sparse_mla_cpu_avx512bf16);
}

}  // namespace fovea::internal
