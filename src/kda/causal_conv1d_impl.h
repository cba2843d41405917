#pragma once

#include <algorithm>
#include <cstdint>

#include "fovea/causal_conv1d.h"
#include "src/core/access.h"
#include "src/core/implementation_list.h"
#include "src/core/workspace.h"
#include "src/kda/kda_checks.h"
#include "src/kda/kda_state.h"
#include "src/kda/kda_verify_impl.h"
#include "src/kda/window_pool.h"

/// The implementations of causal_conv1d.
namespace fovea::internal {

void causal_conv1d_ref(const CausalConv1dProblem& problem, const Device& device,
                       const CausalConv1dTensors& tensors, Workspace workspace);
void causal_conv1d_cpu(const CausalConv1dProblem& problem, const Device& device,
                       const CausalConv1dTensors& tensors, Workspace workspace);
Refusal causal_conv1d_cuda_supports(const CausalConv1dProblem& problem);
size_t causal_conv1d_cuda_workspace(const CausalConv1dProblem& problem, const Device& device);
void causal_conv1d_cuda_portable(const CausalConv1dProblem& problem, const Device& device,
                                 const CausalConv1dTensors& tensors, Workspace workspace,
                                 Stream stream);

/// Channels that the CPU works on at a time: the weights (as fp32), the bias and seven rows of
/// inputs of them fit the first-level cache.
inline constexpr int64_t kConvBlock = 512;

/// Workspace of the judgement of device contents: empty without `check`.
inline int64_t* cut_conv_check_scratch(const CausalConv1dProblem& problem,
                                       WorkspaceCutter* cutter) {
  if (!problem.check) return nullptr;
  const int64_t entries =
      problem.mode == ConvMode::kPrefill ? problem.max_sequences : problem.max_rows;
  return cutter->take<int64_t>(fault_scratch_elements(entries, problem.max_snapshots));
}

/// With `check`, reports what is wrong with the device contents and throws. CPU implementations
/// begin with it.
void check_conv_contents(const CausalConv1dProblem& problem, const CausalConv1dTensors& tensors,
                         int64_t* scratch);

/// Workspace of the CPU implementation.
struct ConvCpuScratch {
  int64_t* faults;
  int64_t* offsets;  // [max_sequences + 1]: q_indptr cut to the rows, never falling
  float* weights;    // per worker [kConvWidth + 1, kConvBlock]; the last row is the bias
  bf16_t* rows;      // per worker [kConvHistory, kConvBlock]

  static constexpr int64_t kWeightsPerWorker = (kConvWidth + 1) * kConvBlock;
  static constexpr int64_t kRowsPerWorker = kConvHistory * kConvBlock;
};

inline ConvCpuScratch cut_conv_scratch(const CausalConv1dProblem& problem, const Device& device,
                                       WorkspaceCutter* cutter) {
  ConvCpuScratch scratch{};
  scratch.faults = cut_conv_check_scratch(problem, cutter);
  scratch.offsets = cutter->take<int64_t>(problem.max_sequences + 1);
  scratch.weights = cutter->take<float>(device.num_threads * ConvCpuScratch::kWeightsPerWorker);
  scratch.rows = cutter->take<bf16_t>(device.num_threads * ConvCpuScratch::kRowsPerWorker);
  return scratch;
}

/// The pool entries of a call of any mode.
inline StateRoutes conv_routes(const CausalConv1dTensors& tensors) {
  const bool has_slot = tensors.slot.defined();
  return StateRoutes(tensors.window_state, has_slot ? tensors.slot : tensors.in_slot,
                     has_slot ? tensors.slot : tensors.out_slot, tensors.has_initial_state);
}

}  // namespace fovea::internal
