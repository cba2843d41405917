#include <algorithm>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/mla/mla_inputs_impl.h"

namespace fovea::internal {
namespace {

// Channel d of the rotated part. The arithmetic is fp32 by definition, each step rounded.
float roped(const bf16_t* x, int64_t d, RopeStyle style, const float* cos_sin) {
  const bool half_split = style == RopeStyle::kHalfSplit;
  const int64_t pair = half_split ? d % (kRopeDim / 2) : d / 2;
  const bool is_first = half_split ? d < kRopeDim / 2 : d % 2 == 0;
  const float a = bf16_to_float(x[half_split ? pair : 2 * pair]);
  const float b = bf16_to_float(x[half_split ? pair + kRopeDim / 2 : 2 * pair + 1]);
  const float cosine = cos_sin[pair];
  const float sine = cos_sin[kRopeDim / 2 + pair];
  if (is_first) {
    const float a_cos = a * cosine, b_sin = b * sine;
    return a_cos - b_sin;
  }
  const float b_cos = b * cosine, a_sin = a * sine;
  return b_cos + a_sin;
}

void quantize_row(const bf16_t* nope, const bf16_t* rope, RopeStyle style, const float* cos_sin,
                  float scale, uint8_t* codes) {
  for (int64_t d = 0; d < kNopeDim; ++d) codes[d] = e4m3_from_float(bf16_to_float(nope[d]) / scale);
  for (int64_t d = 0; d < kRopeDim; ++d)
    codes[kNopeDim + d] = e4m3_from_float(roped(rope, d, style, cos_sin) / scale);
}

}  // namespace

void mla_rope_quantize_ref(const MlaRopeQuantizeProblem& problem, const Device&,
                           const MlaRopeQuantizeTensors& tensors, Workspace) {
  const auto q_nope = access<const bf16_t, 3>(tensors.q_nope);
  const auto q_rope = access<const bf16_t, 3>(tensors.q_rope);
  const auto k_nope = access<const bf16_t, 2>(tensors.k_nope);
  const auto k_rope = access<const bf16_t, 2>(tensors.k_rope);
  const auto positions = access<const int32_t, 1>(tensors.positions);
  const auto cos_sin = access<const float, 2>(tensors.cos_sin);
  const auto q_fp8 = access<uint8_t, 3>(tensors.q_fp8);
  const auto k_fp8 = access<uint8_t, 2>(tensors.k_fp8);
  for (int64_t t = 0; t < positions.shape[0]; ++t) {
    const float* angles = cos_sin.row(std::clamp<int64_t>(positions(t), 0, cos_sin.shape[0] - 1));
    for (int64_t h = 0; q_fp8 && h < problem.num_heads; ++h) {
      quantize_row(q_nope.row(t, h), q_rope.row(t, h), problem.rope_style, angles, problem.q_scale,
                   q_fp8.row(t, h));
    }
    if (k_fp8) {
      quantize_row(k_nope.row(t), k_rope.row(t), problem.rope_style, angles, problem.k_scale,
                   k_fp8.row(t));
    }
  }
}

}  // namespace fovea::internal
