#pragma once

#include <cstdint>
#include <limits>

#include "fovea/mla_inputs.h"
#include "src/core/check.h"

/// The implementations of concat_absorbed_q and mla_rope_quantize.
namespace fovea::internal {

/// An absorbed row: 512 latent channels, then 64 of rope.
inline constexpr int64_t kNopeDim = 512;
inline constexpr int64_t kRopeDim = 64;
inline constexpr int64_t kAbsorbedDim = kNopeDim + kRopeDim;

/// The bounds that both problems have.
template <class Problem>
void check_input_bounds(const char* op, const Problem& problem) {
  check_range(op, "max_rows", problem.max_rows, 0, std::numeric_limits<int64_t>::max());
  check_range(op, "num_heads", problem.num_heads, 1, kMaxInt32);
}

void concat_absorbed_q_ref(const ConcatAbsorbedQProblem& problem, const Device& device,
                           const ConcatAbsorbedQTensors& tensors, Workspace workspace);
void concat_absorbed_q_cpu(const ConcatAbsorbedQProblem& problem, const Device& device,
                           const ConcatAbsorbedQTensors& tensors, Workspace workspace);
void concat_absorbed_q_cuda_portable(const ConcatAbsorbedQProblem& problem, const Device& device,
                                     const ConcatAbsorbedQTensors& tensors, Workspace workspace,
                                     Stream stream);

void mla_rope_quantize_ref(const MlaRopeQuantizeProblem& problem, const Device& device,
                           const MlaRopeQuantizeTensors& tensors, Workspace workspace);
void mla_rope_quantize_cpu(const MlaRopeQuantizeProblem& problem, const Device& device,
                           const MlaRopeQuantizeTensors& tensors, Workspace workspace);
void mla_rope_quantize_cuda_portable(const MlaRopeQuantizeProblem& problem, const Device& device,
                                     const MlaRopeQuantizeTensors& tensors, Workspace workspace,
                                     Stream stream);

}  // namespace fovea::internal
