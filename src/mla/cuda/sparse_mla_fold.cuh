#pragma once

#include <cstdint>

#include "fovea/device.h"
#include "src/mla/cuda/latent_tiles.cuh"
#include "src/mla/sparse_mla_cache.h"

// What the implementations of sparse_mla on GPUs do with the results of blocks.
namespace fovea::internal::latent {

inline Outputs part_outputs(const SparseMlaProblem& problem, const SparseMlaTensors& tensors,
                            int64_t num_parts, WorkspaceCutter& cutter) {
  Outputs outputs{};
  outputs.sink = static_cast<const float*>(tensors.sink.data);
  outputs.out = access<bf16_t, 3>(tensors.out);
  outputs.out_aligned = pairs_are_aligned(outputs.out);
  outputs.lse = access<float, 2>(tensors.lse);
  outputs.max_logits = access<float, 2>(tensors.max_logits);
  outputs.num_heads = problem.num_heads;
  outputs.num_parts = num_parts;
  outputs.value_scale = problem.k_scale;
  outputs.empty_lse = problem.empty_lse == EmptyLse::kPosInf ? -kNegInf : kNegInf;
  const PartMemory memory(problem.max_rows, problem.num_heads, num_parts, cutter);
  outputs.part_values = memory.values;
  outputs.part_state = memory.state;
  return outputs;
}

/// Whether every row starts at a multiple of 16 bytes.
inline bool rows_are_aligned(const SparseMlaSegment& segment) {
  return cuda::is_aligned(segment.base, 16) && segment.page_stride_bytes % 16 == 0 &&
         segment.row_bytes % 16 == 0;
}

/// Folds the parts of `num_rows` rows; nothing where the plan has one.
struct Fold {
  SparseMlaSegment segments[2];
  Outputs outputs;
  InverseRotations rotations;
  int rope_dim;
  bool starts_early;  // the launch before lets it
};
void launch_fold(const Fold& fold, int64_t num_rows, Stream stream);

}  // namespace fovea::internal::latent
