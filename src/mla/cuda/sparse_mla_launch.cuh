#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/mla/cuda/latent_tiles.cuh"
#include "src/mla/cuda/sparse_mla_fold.cuh"
#include "src/mla/sparse_mla_parts.h"

// What the kernels of sparse_mla for compute capability 9.0 are given, and what they do with it in
// the same way.
namespace fovea::internal::latent {

inline constexpr float kLog2E = 1.44269504f;

// The places of a cache that 32 bits name, in 8 bytes.
inline constexpr int64_t kMaxPlaces = 0xFFFFFFFF;

struct RowParams {
  Queries queries;
  SparseMlaSegment segments[2];
  RowLayout layouts[2];
  Scores scores;
  Outputs outputs;
  InverseRotations rotations;
  int rope_dim;
  unsigned head_groups;
  bool wide_out;  // every eighth channel of the output at a multiple of 16 bytes

  __device__ RowParts parts(int64_t t) const {
    return {segments[0].length(t), segments[1].length(t), outputs.num_parts};
  }
};

// The block's heads, one part of row t: its place in the results.
struct Target {
  const RowParams& params;
  int64_t t;
  int64_t part;
  int64_t first_head;
  bool is_result;  // the row has no other part

  __device__ int64_t head(int in_block) const { return first_head + in_block; }
  __device__ bool has(int in_block) const { return head(in_block) < params.outputs.num_heads; }
};

// From differences of logits to powers of two: of dots, or of capped logits.
__device__ inline float logit_unit(const Scores& scores) {
  return scores.logit_cap > 0 ? kLog2E : scores.logit_scale * kLog2E;
}

// cap * tanh(x), without a branch.
__device__ inline float capped_fast(float x, float cap) {
  const float size = fabsf(x);
  const float large = 1 - __fdividef(2, cuda::exp2_fast(2 * kLog2E * size) + 1);
  const float square = x * x;
  float p = fmaf(1.643758067e-2f, square, -5.267181328e-2f);
  p = fmaf(p, square, 1.332072505e-1f);
  p = fmaf(p, square, -3.333294664e-1f);
  const float small = fmaf(p * square, x, x);
  // NaN compares as small and stays.
  return cap * (size > 0.55f ? copysignf(large, x) : small);
}

// Leaves the state of a head behind, as a result or for the fold; `sum` is relative to `largest`.
// Returns what its values, relative to `largest` too, are multiplied with.
__device__ inline float leave_head(const Target& to, int in_block, float largest, float sum) {
  const Outputs& outputs = to.params.outputs;
  if (to.is_result) {
    const HeadResult result = finish_head(outputs, to.head(in_block), largest, sum);
    store_head(outputs, to.t, to.head(in_block), result);
    return result.factor;
  }
  outputs.part_state[outputs.part_index(to.t, to.part, to.head(in_block))] =
      make_float2(largest, sum);
  return 1;
}

// Eight channels of a result, times `factor`, at `to`; pair i is turned by turn_pair(i, pair).
template <class TurnPair>
__device__ __forceinline__ void leave_result(bf16_t* to, bool wide, const TurnPair& turn_pair,
                                             float factor, const float4& low, const float4& high) {
  const float2 pair[4] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 turned = turn_pair(i, make_float2(factor * pair[i].x, factor * pair[i].y));
    word[i] = factor == 0 ? 0 : cuda::bf16_pair(turned.x, turned.y);
  }
  if (wide) {
    *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i].bits = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
  }
}

// Leaves eight channels of a head behind, from `channel` on, times `factor`.
__device__ __forceinline__ void leave_channels(const Target& to, const RowTurn& turn, int in_block,
                                               int channel, float factor, const float4& low,
                                               const float4& high) {
  const Outputs& outputs = to.params.outputs;
  if (!to.is_result) {
    const int64_t at = outputs.part_index(to.t, to.part, to.head(in_block)) * kValueDim + channel;
    auto* const row = reinterpret_cast<float4*>(outputs.part_values + at);
    row[0] = make_float4(factor * low.x, factor * low.y, factor * low.z, factor * low.w);
    row[1] = make_float4(factor * high.x, factor * high.y, factor * high.z, factor * high.w);
    return;
  }
  const auto turn_pair = [&](int i, const float2& pair) {
    return turn.rotation != nullptr ? turn(channel + 2 * i, pair.x, pair.y) : pair;
  };
  leave_result(outputs.out.row(to.t, to.head(in_block)) + channel, to.params.wide_out, turn_pair,
               factor, low, high);
}

inline RowLayout row_layout(const SparseMlaSegment& segment) {
  RowLayout layout{};
  layout.row_bytes = segment.row_bytes;
  layout.format = segment.format;
  layout.aligned =
      rows_are_aligned(segment) && segment.num_pages * segment.page_stride_bytes / 8 <= kMaxPlaces;
  layout.bf16_scale = segment.inv_scale.is_bf16;
  return layout;
}

// For blocks of `block_heads` heads.
inline RowParams row_params(const SparseMlaProblem& problem, const SparseMlaTensors& tensors,
                            int64_t num_parts, int64_t block_heads, WorkspaceCutter& cutter) {
  RowParams params{};
  params.queries = device_queries(tensors.q);
  params.segments[0] = primary_segment(problem, tensors);
  params.segments[1] = extra_segment(problem, tensors);
  for (int i = 0; i < 2; ++i) params.layouts[i] = row_layout(params.segments[i]);
  params.scores = {static_cast<float>(logit_scale(problem)), problem.logit_cap};
  params.outputs = part_outputs(problem, tensors, num_parts, cutter);
  params.rotations = InverseRotations(tensors);
  params.rope_dim = static_cast<int>(problem.inverse_rope_dim);
  params.head_groups = static_cast<unsigned>((problem.num_heads + block_heads - 1) / block_heads);
  params.wide_out = cuda::is_aligned(params.outputs.out.data, 16) &&
                    params.outputs.out.stride[0] % 8 == 0 && params.outputs.out.stride[1] % 8 == 0;
  return params;
}

// Folds the parts of a launch with these; starts as early as that lets it.
inline void launch_fold(const RowParams& params, int64_t num_rows, Stream stream) {
  launch_fold({{params.segments[0], params.segments[1]},
               params.outputs,
               params.rotations,
               params.rope_dim,
               true},
              num_rows, stream);
}

}  // namespace fovea::internal::latent
