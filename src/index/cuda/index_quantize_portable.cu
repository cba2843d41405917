#include <algorithm>
#include <bit>
#include <cmath>

#include "src/core/access.h"
#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/fp8_encode.cuh"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/core/fp8_tile.h"
#include "src/index/index_quantize_impl.h"

// A warp takes a row of q or k. 128 channels stay in registers, four a lane; other widths go
// through shared memory, and wide rows take a whole block. No fused multiply-adds and one order of
// every sum, that of the vector implementation on the host, whose bits these are.
namespace fovea::internal {
namespace {

using cuda::kWarpThreads;

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarpThreads;
constexpr int kFastDim = 4 * kWarpThreads;
constexpr int kWarpMaxDim = 1024;  // fp32 in shared memory: 32 KiB for the rows of a block
constexpr int kColumns = 16;       // column j of a sum takes elements j, j + 16, ...

struct Params {
  Accessor<const bf16_t, 3> q;
  Accessor<const bf16_t, 2> k;
  const float* norm_weight;
  const float* norm_bias;
  Accessor<const float, 2> head_gate;
  const int32_t* positions;
  Accessor<const float, 2> cos_sin;
  Accessor<uint8_t, 3> q_fp8;
  Accessor<float, 2> q_scale;
  Accessor<uint8_t, 2> k_fp8;
  float* k_scale;
  Accessor<float, 2> head_weight;
  int64_t num_rows;  // of q and k together
  int rows_per_token;
  int num_heads;  // 0 without q
  int head_dim;
  int pairs;  // that rope turns
  bool half_split;
  bool hadamard;
  ScaleMode mode;
  float per_head;   // Hi^-1/2 * Di^-1/2
  float per_width;  // Di^-1/2
};

// Row `index` of a launch: the heads of a token, then its key.
struct Row {
  int64_t t;
  int64_t head;
  bool is_key;

  __device__ Row(const Params& params, int64_t index) {
    const auto [token, rest] = cuda::divide_small(index, params.rows_per_token);
    t = token;
    head = rest;
    is_key = rest == params.num_heads;
  }
  __device__ const bf16_t* source(const Params& params) const {
    return is_key ? params.k.row(t) : params.q.row(t, head);
  }
  __device__ uint8_t* codes(const Params& params) const {
    return is_key ? params.k_fp8.row(t) : params.q_fp8.row(t, head);
  }
  __device__ const float* angles(const Params& params) const {
    const int64_t position = params.positions[t];
    const int64_t last = params.cos_sin.shape[0] - 1;
    return params.cos_sin.row(position < 0 ? 0 : position > last ? last : position);
  }
  __device__ void store_scale(const Params& params, float scale) const {
    if (is_key) {
      params.k_scale[t] = scale;
    } else {
      params.q_scale(t, head) = scale;
      params.head_weight(t, head) = params.head_gate(t, head) * params.per_head * scale;
    }
  }
};

__device__ float rounded(float value) { return bf16_to_float(bf16_from_float(value)); }

__device__ float finite_magnitude(float x) {
  const float magnitude = fabsf(x);
  return isfinite(magnitude) ? magnitude : 0.0f;
}

__device__ float inverse_deviation(float variance) {
  return 1.0f / sqrtf(variance + static_cast<float>(kIndexNormEps));
}

// (a, b) <- (a cos - b sin, b cos + a sin), one of the two.
__device__ float turned_first(float a, float b, float cosine, float sine) {
  return rounded(a * cosine - b * sine);
}
__device__ float turned_second(float a, float b, float cosine, float sine) {
  return rounded(b * cosine + a * sine);
}

// Of 128 channels: x[e] of lane l is channel 4 l + e.
struct Quad {
  float x[4];

  // The sum of the row's (x - shift)^2, or x - shift, in every lane.
  template <bool kSquared>
  __device__ float sum(float shift) const {
    const int lane = threadIdx.x % kWarpThreads;
    float columns[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      columns[e] = 0;
#pragma unroll
      for (int step = 0; step < kFastDim / kColumns; ++step) {
        const float value =
            __shfl_sync(0xFFFFFFFF, x[e], step * (kColumns / 4) + lane % (kColumns / 4)) - shift;
        columns[e] += kSquared ? value * value : value;
      }
      columns[e] += __shfl_xor_sync(0xFFFFFFFF, columns[e], 2);
      columns[e] += __shfl_xor_sync(0xFFFFFFFF, columns[e], 1);
    }
    return (columns[0] + columns[2]) + (columns[1] + columns[3]);
  }

  __device__ void layer_norm(const Params& params) {
    const float mean = sum<false>(0) / kFastDim;
    const float inverse = inverse_deviation(sum<true>(mean) / kFastDim);
    const int first = 4 * (threadIdx.x % kWarpThreads);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = rounded((x[e] - mean) * inverse * params.norm_weight[first + e] +
                     params.norm_bias[first + e]);
    }
  }

  // Half-split pairs are a multiple of four: quads turn with quads.
  __device__ void rotate(const Params& params, const float* angles) {
    const int lane = threadIdx.x % kWarpThreads;
    const float* const cosines = angles;
    const float* const sines = angles + params.pairs;
    if (params.half_split) {
      const int lanes = params.pairs / 4;
      const bool first = lane < lanes;
      const bool second = !first && lane < 2 * lanes;
      const int partner = first ? lane + lanes : second ? lane - lanes : lane;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float other = __shfl_sync(0xFFFFFFFF, x[e], partner);
        const int pair = 4 * (first ? lane : partner) + e;
        if (first) x[e] = turned_first(x[e], other, cosines[pair], sines[pair]);
        if (second) x[e] = turned_second(other, x[e], cosines[pair], sines[pair]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int pair = 2 * lane + e / 2;
        if (pair >= params.pairs) continue;
        const float a = x[e], b = x[e + 1];
        x[e] = turned_first(a, b, cosines[pair], sines[pair]);
        x[e + 1] = turned_second(a, b, cosines[pair], sines[pair]);
      }
    }
  }

  __device__ void hadamard(const Params& params) {
#pragma unroll
    for (int stride = 1; stride < 4; stride *= 2) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((e & stride) != 0) continue;
        const float a = x[e], b = x[e + stride];
        x[e] = a + b;
        x[e + stride] = a - b;
      }
    }
#pragma unroll
    for (int step = 1; step < kWarpThreads; step *= 2) {
      const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float other = __shfl_xor_sync(0xFFFFFFFF, x[e], step);
        x[e] = upper ? other - x[e] : x[e] + other;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = rounded(x[e] * params.per_width);
  }
};

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) quantize_128(const __grid_constant__ Params params) {
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t step = int64_t{gridDim.x} * kRowsPerBlock;
  for (int64_t index = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpThreads;
       index < params.num_rows; index += step) {
    const Row row(params, index);
    bf16_t from[4];
    cuda::load4<kAligned>(row.source(params) + 4 * lane, from);
    Quad quad;
#pragma unroll
    for (int e = 0; e < 4; ++e) quad.x[e] = bf16_to_float(from[e]);
    if (row.is_key) quad.layer_norm(params);
    if (params.pairs > 0) quad.rotate(params, row.angles(params));
    if (params.hadamard) quad.hadamard(params);
    float amax = 0;
#pragma unroll
    for (const float x : quad.x) amax = fmaxf(amax, finite_magnitude(x));
    const float scale = index_tile_scale(cuda::warp_max(amax), params.mode);
    uint8_t code[4];
    cuda::e4m3_codes(quad.x[0] / scale, quad.x[1] / scale, quad.x[2] / scale, quad.x[3] / scale,
                     code);
    cuda::store4<kAligned>(code, row.codes(params) + 4 * lane);
    if (lane == 0) row.store_scale(params, scale);
  }
}

// A row of any width in shared memory, for a warp or a block.
template <int kGroup>
struct SharedRow {
  float* x;
  int count;

  __device__ static int rank() { return static_cast<int>(threadIdx.x) % kGroup; }
  __device__ static void sync() {
    if constexpr (kGroup == kWarpThreads) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Every warp of the group computes it: the lanes are the columns, twice.
  template <bool kSquared>
  __device__ float sum(float shift) const {
    float column = 0;
    for (int i = threadIdx.x % kColumns; i < count; i += kColumns) {
      const float value = x[i] - shift;
      column += kSquared ? value * value : value;
    }
    for (int half = kColumns / 2; half > 0; half /= 2) {
      column += __shfl_xor_sync(0xFFFFFFFF, column, half);
    }
    return column;
  }

  __device__ void layer_norm(const Params& params) const {
    const auto width = static_cast<float>(count);
    const float mean = sum<false>(0) / width;
    const float inverse = inverse_deviation(sum<true>(mean) / width);
    sync();
    for (int i = rank(); i < count; i += kGroup) {
      x[i] = rounded((x[i] - mean) * inverse * params.norm_weight[i] + params.norm_bias[i]);
    }
    sync();
  }

  __device__ void rotate(const Params& params, const float* angles) const {
    for (int i = rank(); i < params.pairs; i += kGroup) {
      float* const first = x + (params.half_split ? i : 2 * i);
      float* const second = first + (params.half_split ? params.pairs : 1);
      const float a = *first, b = *second;
      const float cosine = angles[i], sine = angles[params.pairs + i];
      *first = turned_first(a, b, cosine, sine);
      *second = turned_second(a, b, cosine, sine);
    }
    sync();
  }

  __device__ void hadamard(const Params& params) const {
    for (int stride = 1; stride < count; stride *= 2) {
      for (int i = rank(); i < count / 2; i += kGroup) {
        float* const at = x + ((i & ~(stride - 1)) << 1 | (i & (stride - 1)));
        const float a = at[0], b = at[stride];
        at[0] = a + b;
        at[stride] = a - b;
      }
      sync();
    }
    for (int i = rank(); i < count; i += kGroup) x[i] = rounded(x[i] * params.per_width);
    sync();
  }

  // Largest finite magnitude, in every thread of the group.
  __device__ float amax() const {
    float largest = 0;
    for (int i = rank(); i < count; i += kGroup) largest = fmaxf(largest, finite_magnitude(x[i]));
    if constexpr (kGroup == kWarpThreads) {
      return cuda::warp_max(largest);
    } else {
      __shared__ float warps[kGroup / kWarpThreads];
      return cuda::block_max(largest, warps);
    }
  }
};

template <int kGroup>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ Params params) {
  extern __shared__ float memory[];
  constexpr int kGroups = kThreads / kGroup;
  using Shared = SharedRow<kGroup>;
  const int group = threadIdx.x / kGroup;
  const Shared shared{memory + group * params.head_dim, params.head_dim};
  const int64_t step = int64_t{gridDim.x} * kGroups;
  for (int64_t index = int64_t{blockIdx.x} * kGroups + group; index < params.num_rows;
       index += step) {
    const Row row(params, index);
    const bf16_t* const from = row.source(params);
    for (int i = Shared::rank(); i < shared.count; i += kGroup) {
      shared.x[i] = bf16_to_float(from[i]);
    }
    Shared::sync();
    if (row.is_key) shared.layer_norm(params);
    if (params.pairs > 0) shared.rotate(params, row.angles(params));
    if (params.hadamard) shared.hadamard(params);
    const float scale = index_tile_scale(shared.amax(), params.mode);
    uint8_t* const codes = row.codes(params);
    for (int i = Shared::rank(); i < shared.count; i += kGroup) {
      codes[i] = e4m3_from_float(shared.x[i] / scale);
    }
    if (Shared::rank() == 0) row.store_scale(params, scale);
    Shared::sync();
  }
}

bool rows_are_aligned(const ConstTensorView& rows, uintptr_t quad_bytes) {
  if (!rows.defined()) return true;
  bool aligned = cuda::is_aligned(rows.data, quad_bytes);
  for (int axis = 0; axis + 1 < rows.rank; ++axis) {
    aligned = aligned && rows.stride[static_cast<size_t>(axis)] % 4 == 0;
  }
  return aligned;
}

Params make_params(const IndexQuantizeProblem& problem, const IndexQuantizeTensors& tensors) {
  Params params{};
  params.q = access<const bf16_t, 3>(tensors.q);
  params.k = access<const bf16_t, 2>(tensors.k);
  params.norm_weight = static_cast<const float*>(tensors.norm_weight.data);
  params.norm_bias = static_cast<const float*>(tensors.norm_bias.data);
  params.head_gate = access<const float, 2>(tensors.head_gate);
  params.positions = static_cast<const int32_t*>(tensors.positions.data);
  params.q_fp8 = access<uint8_t, 3>(tensors.q_fp8);
  params.q_scale = access<float, 2>(tensors.q_scale);
  params.k_fp8 = access<uint8_t, 2>(tensors.k_fp8);
  params.k_scale = static_cast<float*>(tensors.k_scale.data);
  params.head_weight = access<float, 2>(tensors.head_weight);
  const bool has_q = tensors.q.defined();
  params.num_heads = has_q ? static_cast<int>(problem.num_heads) : 0;
  params.rows_per_token = params.num_heads + (tensors.k.defined() ? 1 : 0);
  params.num_rows = (has_q ? tensors.q.shape[0] : tensors.k.shape[0]) * params.rows_per_token;
  params.head_dim = static_cast<int>(problem.head_dim);
  params.pairs = static_cast<int>(problem.rope_dim / 2);
  if (params.pairs > 0) params.cos_sin = access<const float, 2>(tensors.cos_sin);
  params.half_split = problem.rope_style == RopeStyle::kHalfSplit;
  params.hadamard = problem.hadamard;
  params.mode = problem.scale_mode;
  const auto width = static_cast<double>(problem.head_dim);
  params.per_head =
      static_cast<float>(1 / std::sqrt(static_cast<double>(problem.num_heads) * width));
  params.per_width = static_cast<float>(1 / std::sqrt(width));
  return params;
}

// A row each for the groups of a block; a grid that is cut short walks on.
unsigned blocks_of(int64_t rows, int64_t groups) {
  return static_cast<unsigned>(std::min<int64_t>((rows + groups - 1) / groups, int64_t{1} << 30));
}

}  // namespace

void index_quantize_cuda_portable(const IndexQuantizeProblem& problem, const Device& device,
                                  const IndexQuantizeTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const Params params = make_params(problem, tensors);
  const dim3 block(kThreads);
  const dim3 row_blocks(blocks_of(params.num_rows, kRowsPerBlock));
  const size_t row_bytes = static_cast<size_t>(params.head_dim) * sizeof(float);
  if (params.head_dim == kFastDim && (!params.half_split || params.pairs % 4 == 0)) {
    const bool aligned = rows_are_aligned(tensors.q, 8) && rows_are_aligned(tensors.k, 8) &&
                         rows_are_aligned(tensors.q_fp8, 4) && rows_are_aligned(tensors.k_fp8, 4);
    cuda::launch("index_quantize", aligned ? quantize_128<true> : quantize_128<false>,
                 {row_blocks, block}, stream, params);
  } else if (params.head_dim <= kWarpMaxDim) {
    cuda::launch("index_quantize", quantize<kWarpThreads>,
                 {row_blocks, block, row_bytes * kRowsPerBlock}, stream, params);
  } else {
    cuda::launch("index_quantize", quantize<kThreads>,
                 {dim3(blocks_of(params.num_rows, 1)), block, row_bytes}, stream, params);
  }
}

}  // namespace fovea::internal
