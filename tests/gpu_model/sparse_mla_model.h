#pragma once

#include <cstring>

#include "fovea/sparse_mla.h"

namespace fovea::test::gpu {

/// Plans and runs sparse_mla on the model, with settings(): cuda_portable, cuda_sm90,
/// cuda_sm90_few_heads, cuda_sm90_rows and cuda_sm90_window.
void run_sparse_mla(SparseMlaProblem problem, const SparseMlaTensors& tensors);
void run_sparse_mla_sm90(SparseMlaProblem problem, const SparseMlaTensors& tensors);
void run_sparse_mla_few_heads(SparseMlaProblem problem, const SparseMlaTensors& tensors);
void run_sparse_mla_rows(SparseMlaProblem problem, const SparseMlaTensors& tensors);
void run_sparse_mla_window(SparseMlaProblem problem, const SparseMlaTensors& tensors);

/// Whether the device of run_sparse_mla() has clusters.
bool& sparse_mla_has_clusters();

/// What both do with an implementation's functions.
template <class WorkspaceBytes, class Run>
void run_with_workspace(WorkspaceBytes workspace_bytes, Run run, SparseMlaProblem problem,
                        const SparseMlaTensors& tensors) {
  if (!problem.extra_row_format) problem.extra_row_format = problem.row_format;
  if (!problem.extra_page_size) problem.extra_page_size = problem.page_size;
  const Device device{DeviceKind::kCuda, 0};
  HostBuffer scratch(workspace_bytes(problem, device));
  if (scratch.bytes() > 0) std::memset(scratch.data(), 0xFF, scratch.bytes());
  run(problem, device, tensors, scratch.workspace(), Stream{});
}

}  // namespace fovea::test::gpu
