#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/mla/mla_rope_quantize_cpu.cc"
#include "src/core/simd.h"
// After simd.h, once per instruction set.
#include "src/core/fp8_tile_simd.h"

#include <algorithm>

#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/mla/mla_inputs_impl.h"

// No fused multiply-adds: the codes are those of the reference.
HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

constexpr int64_t kLanes = HWY_LANES(float);
constexpr int64_t kPairs = kRopeDim / 2;
static_assert(kPairs % kLanes == 0);

// (a, b) <- (a cos - b sin, b cos + a sin) for 32 pairs. `x` is aligned to a vector.
void rotate(const bf16_t* rope, RopeStyle style, const float* cos_sin, float* x) {
  const F32 d;
  for (int64_t i = 0; i < kRopeDim; i += kLanes) hn::Store(load_bf16(d, rope + i), d, x + i);
  for (int64_t i = 0; i < kPairs; i += kLanes) {
    const auto cosine = hn::LoadU(d, cos_sin + i);
    const auto sine = hn::LoadU(d, cos_sin + kPairs + i);
    const bool half_split = style == RopeStyle::kHalfSplit;
    hn::Vec<F32> a, b;
    if (half_split) {
      a = hn::Load(d, x + i);
      b = hn::Load(d, x + kPairs + i);
    } else {
      hn::LoadInterleaved2(d, x + 2 * i, a, b);
    }
    const auto first = hn::Sub(hn::Mul(a, cosine), hn::Mul(b, sine));
    const auto second = hn::Add(hn::Mul(b, cosine), hn::Mul(a, sine));
    if (half_split) {
      hn::Store(first, d, x + i);
      hn::Store(second, d, x + kPairs + i);
    } else {
      hn::StoreInterleaved2(first, second, d, x + 2 * i);
    }
  }
}

void quantize_row(const bf16_t* nope, const bf16_t* rope, RopeStyle style, const float* cos_sin,
                  const TileScale& scale, uint8_t* codes) {
  const F32 d;
  encode_tile_simd(nope, kNopeDim, scale, codes);
  HWY_ALIGN float x[kRopeDim];
  rotate(rope, style, cos_sin, x);
  const auto divisor = hn::Set(d, scale.value);
  for (int64_t i = 0; i < kRopeDim; i += kLanes)
    store_e4m3(d, hn::Div(hn::Load(d, x + i), divisor), codes + kNopeDim + i);
}

void mla_rope_quantize(const MlaRopeQuantizeProblem& problem, const Device& device,
                       const MlaRopeQuantizeTensors& tensors) {
  const auto q_nope = access<const bf16_t, 3>(tensors.q_nope);
  const auto q_rope = access<const bf16_t, 3>(tensors.q_rope);
  const auto k_nope = access<const bf16_t, 2>(tensors.k_nope);
  const auto k_rope = access<const bf16_t, 2>(tensors.k_rope);
  const auto positions = access<const int32_t, 1>(tensors.positions);
  const auto cos_sin = access<const float, 2>(tensors.cos_sin);
  const auto q_fp8 = access<uint8_t, 3>(tensors.q_fp8);
  const auto k_fp8 = access<uint8_t, 2>(tensors.k_fp8);
  const TileScale q_scale(problem.q_scale);
  const TileScale k_scale(problem.k_scale);
  const int64_t heads = q_fp8 ? problem.num_heads : 0;
  const ThreadScope threads(device.num_threads);
  // Some 10 microseconds of work: 64 head rows.
  const int64_t grain = std::max<int64_t>(1, 64 / (heads + 1));
  ParallelFor(positions.shape[0], grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float* angles = cos_sin.row(std::clamp<int64_t>(positions(t), 0, cos_sin.shape[0] - 1));
      for (int64_t h = 0; h < heads; ++h) {
        quantize_row(q_nope.row(t, h), q_rope.row(t, h), problem.rope_style, angles, q_scale,
                     q_fp8.row(t, h));
      }
      if (k_fp8) {
        quantize_row(k_nope.row(t), k_rope.row(t), problem.rope_style, angles, k_scale,
                     k_fp8.row(t));
      }
    }
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(mla_rope_quantize);

void mla_rope_quantize_cpu(const MlaRopeQuantizeProblem& problem, const Device& device,
                           const MlaRopeQuantizeTensors& tensors, Workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(mla_rope_quantize)(problem, device, tensors);
}

}  // namespace fovea::internal
#endif
