#pragma once

#include <cstddef>

#include "fovea/sparse_mla.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"

/// The implementations of sparse_mla. Problems arrive with extra_row_format and extra_page_size
/// filled in.
namespace fovea::internal {

size_t sparse_mla_ref_workspace(const SparseMlaProblem& problem, const Device& device);
void sparse_mla_ref(const SparseMlaProblem& problem, const Device& device,
                    const SparseMlaTensors& tensors, Workspace workspace);
size_t sparse_mla_cpu_workspace(const SparseMlaProblem& problem, const Device& device);
void sparse_mla_cpu(const SparseMlaProblem& problem, const Device& device,
                    const SparseMlaTensors& tensors, Workspace workspace);
Refusal sparse_mla_cpu_avx512bf16_available();
size_t sparse_mla_cpu_avx512bf16_workspace(const SparseMlaProblem& problem, const Device& device);
void sparse_mla_cpu_avx512bf16(const SparseMlaProblem& problem, const Device& device,
                               const SparseMlaTensors& tensors, Workspace workspace);
Refusal sparse_mla_cuda_supports(const SparseMlaProblem& problem);
size_t sparse_mla_cuda_workspace(const SparseMlaProblem& problem, const Device& device);
void sparse_mla_cuda_portable(const SparseMlaProblem& problem, const Device& device,
                              const SparseMlaTensors& tensors, Workspace workspace, Stream stream);
/// For GPUs of compute capability 9.0; takes what cuda_portable takes.
Refusal sparse_mla_cuda_sm90_preferred(const SparseMlaProblem& problem);
size_t sparse_mla_cuda_sm90_workspace(const SparseMlaProblem& problem, const Device& device);
void sparse_mla_cuda_sm90(const SparseMlaProblem& problem, const Device& device,
                          const SparseMlaTensors& tensors, Workspace workspace, Stream stream);
/// The same with blocks of 16 heads; fast over v32 rows.
Refusal sparse_mla_cuda_sm90_few_heads_preferred(const SparseMlaProblem& problem);
size_t sparse_mla_cuda_sm90_few_heads_workspace(const SparseMlaProblem& problem,
                                                const Device& device);
void sparse_mla_cuda_sm90_few_heads(const SparseMlaProblem& problem, const Device& device,
                                    const SparseMlaTensors& tensors, Workspace workspace,
                                    Stream stream);
/// Whole rows of lists over bf16 rows, many at a time.
Refusal sparse_mla_cuda_sm90_rows_supports(const SparseMlaProblem& problem);
Refusal sparse_mla_cuda_sm90_rows_preferred(const SparseMlaProblem& problem);
size_t sparse_mla_cuda_sm90_rows_workspace(const SparseMlaProblem& problem, const Device& device);
void sparse_mla_cuda_sm90_rows(const SparseMlaProblem& problem, const Device& device,
                               const SparseMlaTensors& tensors, Workspace workspace, Stream stream);
/// Whole rows of short lists over v4 and r512 rows. `takes`: of what sparse_mla_cuda_supports().
bool sparse_mla_cuda_sm90_window_takes(const SparseMlaProblem& problem);
Refusal sparse_mla_cuda_sm90_window_supports(const SparseMlaProblem& problem);
void sparse_mla_cuda_sm90_window(const SparseMlaProblem& problem, const Device& device,
                                 const SparseMlaTensors& tensors, Workspace workspace,
                                 Stream stream);

}  // namespace fovea::internal
