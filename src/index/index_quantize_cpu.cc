#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/index/index_quantize_cpu.cc"
#include "src/core/simd.h"
// After simd.h, once per instruction set.
#include "src/core/fp8_tile_simd.h"

#include <algorithm>
#include <cmath>

#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "src/index/index_quantize_impl.h"

// No fused multiply-adds and one order of every sum, whatever the vector length: the results are
// equal on every instruction set.
HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

constexpr int64_t kLanes = HWY_LANES(float);

// Sums run over 16 columns, column j taking elements j, j + 16, ...; rows are padded to them.
constexpr int64_t kColumns = 16;
static_assert(kColumns % kLanes == 0);

// A row of Di channels in fp32, and what is behind the last one up to a multiple of kColumns.
struct Row {
  float* x;
  int64_t count;
  int64_t padded;
};

float rounded(float value) { return bf16_to_float(bf16_from_float(value)); }

void load_row(const bf16_t* from, const Row& row) {
  const F32 d;
  int64_t i = 0;
  for (; i + kLanes <= row.count; i += kLanes) hn::Store(load_bf16(d, from + i), d, row.x + i);
  for (; i < row.count; ++i) row.x[i] = bf16_to_float(from[i]);
}

void store_row(const Row& row, bf16_t* to) {
  const F32 d;
  int64_t i = 0;
  for (; i + kLanes <= row.count; i += kLanes) store_bf16(d, hn::Load(d, row.x + i), to + i);
  for (; i < row.count; ++i) to[i] = bf16_from_float(row.x[i]);
}

// Sum over the padded row of (x - shift)^2, or of x - shift.
template <bool kSquared>
float sum_row(const Row& row, float shift) {
  const F32 d;
  HWY_ALIGN float columns[kColumns] = {};
  for (int64_t i = 0; i < row.padded; i += kColumns) {
    for (int64_t j = 0; j < kColumns; j += kLanes) {
      const auto value = hn::Sub(hn::Load(d, row.x + i + j), hn::Set(d, shift));
      const auto term = kSquared ? hn::Mul(value, value) : value;
      hn::Store(hn::Add(hn::Load(d, columns + j), term), d, columns + j);
    }
  }
  for (int64_t half = kColumns / 2; half >= 1; half /= 2) {
    for (int64_t j = 0; j < half; ++j) columns[j] += columns[j + half];
  }
  return columns[0];
}

// x <- bf16((x - mean) / sqrt(variance + eps) * weight + bias)
void layer_norm(const Row& row, const float* weight, const float* bias) {
  const F32 d;
  const auto count = static_cast<float>(row.count);
  std::fill(row.x + row.count, row.x + row.padded, 0.0f);
  const float mean = sum_row<false>(row, 0.0f) / count;
  std::fill(row.x + row.count, row.x + row.padded, mean);
  const float variance = sum_row<true>(row, mean) / count;
  const float inverse = 1.0f / std::sqrt(variance + static_cast<float>(kIndexNormEps));
  int64_t i = 0;
  for (; i + kLanes <= row.count; i += kLanes) {
    const auto centred = hn::Sub(hn::Load(d, row.x + i), hn::Set(d, mean));
    const auto scaled = hn::Mul(hn::Mul(centred, hn::Set(d, inverse)), hn::LoadU(d, weight + i));
    hn::Store(round_to_bf16(d, hn::Add(scaled, hn::LoadU(d, bias + i))), d, row.x + i);
  }
  for (; i < row.count; ++i) {
    row.x[i] = rounded((row.x[i] - mean) * inverse * weight[i] + bias[i]);
  }
}

// (a, b) <- bf16(a cos - b sin, b cos + a sin) for the pairs of the first `rope` channels.
struct Rotation {
  hn::Vec<F32> cosine, sine;

  HWY_INLINE void turn(hn::Vec<F32>& a, hn::Vec<F32>& b) const {
    const F32 d;
    const auto first = hn::Sub(hn::Mul(a, cosine), hn::Mul(b, sine));
    const auto second = hn::Add(hn::Mul(b, cosine), hn::Mul(a, sine));
    a = round_to_bf16(d, first);
    b = round_to_bf16(d, second);
  }
};

void turn_pair(float cosine, float sine, float* a, float* b) {
  const float first = *a * cosine - *b * sine;
  const float second = *b * cosine + *a * sine;
  *a = rounded(first);
  *b = rounded(second);
}

void rotate(const Row& row, int64_t rope, RopeStyle style, const float* cos_sin) {
  const F32 d;
  const int64_t pairs = rope / 2;
  const bool half_split = style == RopeStyle::kHalfSplit;
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const Rotation rotation{hn::LoadU(d, cos_sin + i), hn::LoadU(d, cos_sin + pairs + i)};
    hn::Vec<F32> a, b;
    if (half_split) {
      a = hn::LoadU(d, row.x + i);
      b = hn::LoadU(d, row.x + pairs + i);
      rotation.turn(a, b);
      hn::StoreU(a, d, row.x + i);
      hn::StoreU(b, d, row.x + pairs + i);
    } else {
      hn::LoadInterleaved2(d, row.x + 2 * i, a, b);
      rotation.turn(a, b);
      hn::StoreInterleaved2(a, b, d, row.x + 2 * i);
    }
  }
  for (; i < pairs; ++i) {
    float* a = row.x + (half_split ? i : 2 * i);
    turn_pair(cos_sin[i], cos_sin[pairs + i], a, a + (half_split ? pairs : 1));
  }
}

#if HWY_TARGET != HWY_SCALAR

// Lane l of the result is lane l ^ kStride.
template <int kStride>
HWY_INLINE hn::Vec<F32> swap_lanes(hn::Vec<F32> v) {
  const F32 d;
  if constexpr (kStride == 1) return hn::Shuffle2301(v);
  if constexpr (kStride == 2) return hn::Shuffle1032(v);
  if constexpr (kStride == 4) return hn::SwapAdjacentBlocks(v);
  if constexpr (kStride == 8) return hn::ConcatLowerUpper(d, v, v);
}

// One stage of the transform inside vectors: lanes without bit kStride get the sum of the pair,
// lanes with it the difference.
template <int kStride>
HWY_INLINE hn::Vec<F32> butterfly(hn::Vec<F32> v) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const auto bit = hn::And(hn::Iota(du, 0), hn::Set(du, kStride));
  const auto sign = hn::IfThenElseZero(hn::Ne(bit, hn::Zero(du)), hn::Set(du, 0x80000000u));
  return hn::Add(swap_lanes<kStride>(v), hn::Xor(v, hn::BitCast(d, sign)));
}

#endif

// x <- bf16(Di^-1/2 H x), H the Sylvester-Hadamard matrix in natural order: stages of stride 1, 2,
// 4, ... turn each pair (a, b) into (a + b, a - b).
void hadamard(const Row& row) {
  const F32 d;
  int64_t stride = 1;
#if HWY_TARGET != HWY_SCALAR
  std::fill(row.x + row.count, row.x + row.padded, 0.0f);
  for (int64_t i = 0; i < row.count; i += kLanes) {
    auto v = hn::Load(d, row.x + i);
    if (row.count > 1) v = butterfly<1>(v);
    if (row.count > 2) v = butterfly<2>(v);
    if constexpr (kLanes > 4) {
      if (row.count > 4) v = butterfly<4>(v);
    }
    if constexpr (kLanes > 8) {
      if (row.count > 8) v = butterfly<8>(v);
    }
    hn::Store(v, d, row.x + i);
  }
  stride = kLanes;
#endif
  for (; stride < row.count; stride *= 2) {
    for (int64_t block = 0; block < row.count; block += 2 * stride) {
      for (int64_t i = block; i < block + stride; i += kLanes) {
        const auto a = hn::Load(d, row.x + i);
        const auto b = hn::Load(d, row.x + i + stride);
        hn::Store(hn::Add(a, b), d, row.x + i);
        hn::Store(hn::Sub(a, b), d, row.x + i + stride);
      }
    }
  }
  const auto scale = hn::Set(d, static_cast<float>(1 / std::sqrt(static_cast<double>(row.count))));
  for (int64_t i = 0; i < row.count; i += kLanes) {
    hn::Store(round_to_bf16(d, hn::Mul(hn::Load(d, row.x + i), scale)), d, row.x + i);
  }
}

// Scratch memory of one worker.
struct Scratch {
  int64_t padded;
  float* x = nullptr;
  bf16_t* narrow = nullptr;

  explicit Scratch(const IndexQuantizeProblem& problem)
      : padded((problem.head_dim + kColumns - 1) / kColumns * kColumns) {}

  void take(WorkspaceCutter& cutter) {
    x = cutter.take<float>(padded);
    narrow = cutter.take<bf16_t>(padded);
  }
};

// One run of the operator.
class Quantizer {
 public:
  Quantizer(const IndexQuantizeProblem& problem, const IndexQuantizeTensors& tensors)
      : problem_(problem),
        q_(access<const bf16_t, 3>(tensors.q)),
        k_(access<const bf16_t, 2>(tensors.k)),
        norm_weight_(access<const float, 1>(tensors.norm_weight)),
        norm_bias_(access<const float, 1>(tensors.norm_bias)),
        head_gate_(access<const float, 2>(tensors.head_gate)),
        positions_(access<const int32_t, 1>(tensors.positions)),
        cos_sin_(access<const float, 2>(tensors.cos_sin)),
        q_fp8_(access<uint8_t, 3>(tensors.q_fp8)),
        q_scale_(access<float, 2>(tensors.q_scale)),
        k_fp8_(access<uint8_t, 2>(tensors.k_fp8)),
        k_scale_(access<float, 1>(tensors.k_scale)),
        head_weight_(access<float, 2>(tensors.head_weight)),
        per_head_(static_cast<float>(1 / std::sqrt(static_cast<double>(problem.num_heads) *
                                                   static_cast<double>(problem.head_dim)))) {}

  void quantize_token(int64_t t, const Scratch& scratch) const {
    const float* cos_sin = nullptr;
    if (problem_.rope_dim > 0) {
      const int64_t last = cos_sin_.shape[0] - 1;
      cos_sin = cos_sin_.row(std::clamp<int64_t>(positions_(t), 0, last));
    }
    if (k_) k_scale_(t) = quantize_row(k_.row(t), true, cos_sin, scratch, k_fp8_.row(t));
    if (!q_) return;
    for (int64_t h = 0; h < problem_.num_heads; ++h) {
      const float scale = quantize_row(q_.row(t, h), false, cos_sin, scratch, q_fp8_.row(t, h));
      q_scale_(t, h) = scale;
      head_weight_(t, h) = head_gate_(t, h) * per_head_ * scale;
    }
  }

 private:
  float quantize_row(const bf16_t* source, bool norm, const float* cos_sin, const Scratch& scratch,
                     uint8_t* codes) const {
    if (norm || cos_sin != nullptr || problem_.hadamard) {
      const Row row{scratch.x, problem_.head_dim, scratch.padded};
      load_row(source, row);
      if (norm) layer_norm(row, norm_weight_.data, norm_bias_.data);
      if (cos_sin != nullptr) rotate(row, problem_.rope_dim, problem_.rope_style, cos_sin);
      if (problem_.hadamard) hadamard(row);
      store_row(row, scratch.narrow);
      source = scratch.narrow;
    }
    return quantize_tile_simd(source, problem_.head_dim, index_tile_scale, problem_.scale_mode,
                              codes);
  }

  const IndexQuantizeProblem& problem_;
  Accessor<const bf16_t, 3> q_;
  Accessor<const bf16_t, 2> k_;
  Accessor<const float, 1> norm_weight_, norm_bias_;
  Accessor<const float, 2> head_gate_;
  Accessor<const int32_t, 1> positions_;
  Accessor<const float, 2> cos_sin_;
  Accessor<uint8_t, 3> q_fp8_;
  Accessor<float, 2> q_scale_;
  Accessor<uint8_t, 2> k_fp8_;
  Accessor<float, 1> k_scale_;
  Accessor<float, 2> head_weight_;
  float per_head_;
};

size_t index_quantize_bytes(const IndexQuantizeProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  for (int worker = 0; worker < device.num_threads; ++worker) Scratch(problem).take(cutter);
  return cutter.used_bytes();
}

void index_quantize(const IndexQuantizeProblem& problem, const Device& device,
                    const IndexQuantizeTensors& tensors, Workspace workspace) {
  const int64_t rows = tensors.q.defined() ? tensors.q.shape[0] : tensors.k.shape[0];
  const Quantizer quantizer(problem, tensors);
  const ThreadScope threads(device.num_threads);
  // About 10 microseconds of work: 128 head rows of 128 channels.
  const int64_t grain =
      std::max<int64_t>(1, 128 * 128 / ((problem.num_heads + 1) * problem.head_dim));
  ParallelFor(rows, grain, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter cutter(workspace);
    Scratch scratch(problem);
    for (int i = 0; i <= worker; ++i) scratch.take(cutter);
    for (int64_t t = begin; t < end; ++t) quantizer.quantize_token(t, scratch);
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(index_quantize);
HWY_EXPORT(index_quantize_bytes);

size_t index_quantize_cpu_bytes(const IndexQuantizeProblem& problem, const Device& device) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  return HWY_DYNAMIC_DISPATCH(index_quantize_bytes)(problem, device);
}

void index_quantize_cpu(const IndexQuantizeProblem& problem, const Device& device,
                        const IndexQuantizeTensors& tensors, Workspace workspace) {
  current_cpu_isa();
  HWY_DYNAMIC_DISPATCH(index_quantize)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
