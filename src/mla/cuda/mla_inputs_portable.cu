#include <algorithm>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/cuda/fp8_encode.cuh"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/mla/mla_inputs_impl.h"

// A block takes four rows of one token, each thread eight neighbouring channels of one: 16 bytes of
// bf16 where addresses allow it. Both operators are bound by memory.
namespace fovea::internal {
namespace {

constexpr int kUnit = 8;  // channels of a thread
constexpr int kNopeUnits = static_cast<int>(kNopeDim) / kUnit;
constexpr int kUnits = static_cast<int>(kAbsorbedDim) / kUnit;
constexpr int kRowsPerBlock = 4;
constexpr int kThreads = kUnits * kRowsPerBlock;
constexpr int kPairs = static_cast<int>(kRopeDim) / 2;
constexpr int64_t kMaxGroups = 65535;  // blocks on y; further rows of a token are walked to

dim3 grid_of(int64_t tokens, int64_t rows_per_token) {
  const int64_t groups = (rows_per_token + kRowsPerBlock - 1) / kRowsPerBlock;
  return dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(std::min(groups, kMaxGroups)));
}

template <bool kAligned>
__device__ void load_unit(const bf16_t* from, bf16_t (&to)[kUnit]) {
  if constexpr (kAligned) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      to[i].bits = static_cast<uint16_t>(word[i / 2] >> (16 * (i % 2)));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) to[i] = from[i];
  }
}

struct ConcatParams {
  Accessor<const bf16_t, 3> q_nope, q_rope;
  Accessor<bf16_t, 3> q;
};

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) concat(const __grid_constant__ ConcatParams params) {
  const int unit = threadIdx.x % kUnits;
  const int64_t t = blockIdx.x;
  for (int64_t head = int64_t{blockIdx.y} * kRowsPerBlock + threadIdx.x / kUnits;
       head < params.q.shape[1]; head += int64_t{gridDim.y} * kRowsPerBlock) {
    const bf16_t* const from = unit < kNopeUnits
                                   ? params.q_nope.row(t, head) + unit * kUnit
                                   : params.q_rope.row(t, head) + (unit - kNopeUnits) * kUnit;
    bf16_t* const to = params.q.row(t, head) + unit * kUnit;
    if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      bf16_t x[kUnit];
      load_unit<false>(from, x);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) to[i] = x[i];
    }
  }
}

struct QuantizeParams {
  Accessor<const bf16_t, 3> q_nope, q_rope;
  Accessor<const bf16_t, 2> k_nope, k_rope;
  const int32_t* positions;
  Accessor<const float, 2> cos_sin;
  Accessor<uint8_t, 3> q_fp8;
  Accessor<uint8_t, 2> k_fp8;
  int64_t num_heads;  // 0 without q
  int64_t rows_per_token;
  bool half_split;
  float q_scale, k_scale;
};

// x <- channels 8 unit .. 8 unit + 7 of the rotated part: each product and sum is rounded.
template <bool kAligned>
__device__ void load_rope(const bf16_t* rope, int unit, bool half_split, const float* cos_sin,
                          float (&x)[kUnit]) {
  bf16_t own[kUnit];
  load_unit<kAligned>(rope + unit * kUnit, own);
  if (half_split) {
    constexpr int kHalfUnits = kPairs / kUnit;
    const bool first = unit < kHalfUnits;
    const int pair_unit = first ? unit : unit - kHalfUnits;
    bf16_t other[kUnit];
    load_unit<kAligned>(rope + (first ? unit + kHalfUnits : pair_unit) * kUnit, other);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const float cosine = cos_sin[pair_unit * kUnit + i];
      const float sine = cos_sin[kPairs + pair_unit * kUnit + i];
      const float own_cos = bf16_to_float(own[i]) * cosine;
      const float other_sin = bf16_to_float(other[i]) * sine;
      x[i] = first ? own_cos - other_sin : own_cos + other_sin;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; i += 2) {
      const int pair = (unit * kUnit + i) / 2;
      const float cosine = cos_sin[pair], sine = cos_sin[kPairs + pair];
      const float a = bf16_to_float(own[i]), b = bf16_to_float(own[i + 1]);
      x[i] = a * cosine - b * sine;
      x[i + 1] = b * cosine + a * sine;
    }
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    rope_quantize(const __grid_constant__ QuantizeParams params) {
  const int unit = threadIdx.x % kUnits;
  const int64_t t = blockIdx.x;
  for (int64_t row = int64_t{blockIdx.y} * kRowsPerBlock + threadIdx.x / kUnits;
       row < params.rows_per_token; row += int64_t{gridDim.y} * kRowsPerBlock) {
    const bool is_key = row == params.num_heads;
    float x[kUnit];
    if (unit < kNopeUnits) {
      bf16_t from[kUnit];
      load_unit<kAligned>(
          (is_key ? params.k_nope.row(t) : params.q_nope.row(t, row)) + unit * kUnit, from);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) x[i] = bf16_to_float(from[i]);
    } else {
      const int64_t position = params.positions[t];
      const int64_t last = params.cos_sin.shape[0] - 1;
      const float* const angles = params.cos_sin.row(position < 0      ? 0
                                                     : position > last ? last
                                                                       : position);
      load_rope<kAligned>(is_key ? params.k_rope.row(t) : params.q_rope.row(t, row),
                          unit - kNopeUnits, params.half_split, angles, x);
    }
    const float scale = is_key ? params.k_scale : params.q_scale;
    uint8_t* const to = (is_key ? params.k_fp8.row(t) : params.q_fp8.row(t, row)) + unit * kUnit;
    uint8_t low[4], high[4];
    cuda::e4m3_codes(x[0] / scale, x[1] / scale, x[2] / scale, x[3] / scale, low);
    cuda::e4m3_codes(x[4] / scale, x[5] / scale, x[6] / scale, x[7] / scale, high);
    cuda::store4<kAligned>(low, to);
    cuda::store4<kAligned>(high, to + 4);
  }
}

// Eight elements at one address; absent tensors are in nobody's way.
bool units_are_aligned(const ConstTensorView& rows, uintptr_t unit_bytes) {
  if (!rows.defined()) return true;
  bool aligned = cuda::is_aligned(rows.data, unit_bytes);
  for (int axis = 0; axis + 1 < rows.rank; ++axis) {
    aligned = aligned && rows.stride[static_cast<size_t>(axis)] % kUnit == 0;
  }
  return aligned;
}

}  // namespace

void concat_absorbed_q_cuda_portable(const ConcatAbsorbedQProblem& problem, const Device& device,
                                     const ConcatAbsorbedQTensors& tensors, Workspace,
                                     Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const ConcatParams params{access<const bf16_t, 3>(tensors.q_nope),
                            access<const bf16_t, 3>(tensors.q_rope), access<bf16_t, 3>(tensors.q)};
  const bool aligned = units_are_aligned(tensors.q_nope, 16) &&
                       units_are_aligned(tensors.q_rope, 16) && units_are_aligned(tensors.q, 16);
  cuda::launch("concat_absorbed_q", aligned ? concat<true> : concat<false>,
               {grid_of(params.q.shape[0], problem.num_heads), dim3(kThreads)}, stream, params);
}

void mla_rope_quantize_cuda_portable(const MlaRopeQuantizeProblem& problem, const Device& device,
                                     const MlaRopeQuantizeTensors& tensors, Workspace,
                                     Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  QuantizeParams params{};
  params.q_nope = access<const bf16_t, 3>(tensors.q_nope);
  params.q_rope = access<const bf16_t, 3>(tensors.q_rope);
  params.k_nope = access<const bf16_t, 2>(tensors.k_nope);
  params.k_rope = access<const bf16_t, 2>(tensors.k_rope);
  params.positions = static_cast<const int32_t*>(tensors.positions.data);
  params.cos_sin = access<const float, 2>(tensors.cos_sin);
  params.q_fp8 = access<uint8_t, 3>(tensors.q_fp8);
  params.k_fp8 = access<uint8_t, 2>(tensors.k_fp8);
  params.num_heads = tensors.q_fp8.defined() ? problem.num_heads : 0;
  params.rows_per_token = params.num_heads + (tensors.k_fp8.defined() ? 1 : 0);
  params.half_split = problem.rope_style == RopeStyle::kHalfSplit;
  params.q_scale = problem.q_scale;
  params.k_scale = problem.k_scale;
  const bool aligned =
      units_are_aligned(tensors.q_nope, 16) && units_are_aligned(tensors.q_rope, 16) &&
      units_are_aligned(tensors.k_nope, 16) && units_are_aligned(tensors.k_rope, 16) &&
      units_are_aligned(tensors.q_fp8, 4) && units_are_aligned(tensors.k_fp8, 4);
  cuda::launch("mla_rope_quantize", aligned ? rope_quantize<true> : rope_quantize<false>,
               {grid_of(tensors.positions.shape[0], params.rows_per_token), dim3(kThreads)}, stream,
               params);
}

}  // namespace fovea::internal
