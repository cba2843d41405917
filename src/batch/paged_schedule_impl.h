#pragma once

#include <cstdint>

#include "fovea/metadata.h"

/// The implementations of paged_schedule.
namespace fovea::internal {

void paged_schedule_ref(const PagedScheduleProblem& problem, const Device& device,
                        const PagedScheduleTensors& tensors, Workspace workspace);
void paged_schedule_cpu(const PagedScheduleProblem& problem, const Device& device,
                        const PagedScheduleTensors& tensors, Workspace workspace);
size_t paged_schedule_cuda_workspace(const PagedScheduleProblem& problem, const Device& device);
void paged_schedule_cuda_portable(const PagedScheduleProblem& problem, const Device& device,
                                  const PagedScheduleTensors& tensors, Workspace workspace,
                                  Stream stream);

/// Segments of one group of `len` tokens.
FOVEA_HOST_DEVICE inline int64_t schedule_segments(int32_t len) {
  return len <= 0 ? 0 : (len + kScheduleTokens - 1) / kScheduleTokens;
}

}  // namespace fovea::internal
