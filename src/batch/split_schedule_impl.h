#pragma once

#include <algorithm>
#include <cstdint>

#include "fovea/metadata.h"

/// The implementations of split_schedule.
namespace fovea::internal {

void split_schedule_ref(const SplitScheduleProblem& problem, const Device& device,
                        const SplitScheduleTensors& tensors, Workspace workspace);
void split_schedule_cpu(const SplitScheduleProblem& problem, const Device& device,
                        const SplitScheduleTensors& tensors, Workspace workspace);
size_t split_schedule_cuda_workspace(const SplitScheduleProblem& problem, const Device& device);
void split_schedule_cuda_portable(const SplitScheduleProblem& problem, const Device& device,
                                  const SplitScheduleTensors& tensors, Workspace workspace,
                                  Stream stream);

/// Blocks of a row of `len` slots: an empty row has one, because somebody has to write its zeros.
inline int64_t split_blocks(int32_t len) {
  return std::max<int64_t>(1, (int64_t{len} + kSplitBlockSlots - 1) / kSplitBlockSlots);
}

}  // namespace fovea::internal
