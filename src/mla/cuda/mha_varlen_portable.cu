#include <algorithm>
#include <cmath>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/mma.cuh"
#include "src/core/cuda/request_offsets.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/workspace.h"
#include "src/mla/mha_varlen_impl.h"

// The model's shape, 192 and 128 channels: a block of 4 warps takes 64 rows of one request and
// head and walks over its keys, 64 at a time, from the request's first one. A warp owns 16 rows:
// logits, weights, maximum, sum and values stay in its registers; keys and values come into shared
// memory while the other half of the work runs. Other shapes: a block per row and head, plain sums.
//
// Weights are rounded to bf16 for the product with the values, their sums are not. What a row does
// not see has weight 0, and 0 times a value that is not finite would be NaN: such values become 0,
// and the rows that see them add them one by one.
namespace fovea::internal {
namespace {

using cuda::exp2_fast;
using cuda::kWarpThreads;
using cuda::MmaA;
using cuda::MmaB;
using cuda::MmaC;

constexpr int kWarpRows = 16;
constexpr int kKeys = 64;
constexpr int kQkDim = 192;
constexpr int kValueDim = 128;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// Rows are an odd number of 16-byte units apart, for ldmatrix.
constexpr int row_stride(int head_dim) { return head_dim + 8; }

struct Params {
  Accessor<const bf16_t, 3> q, k, v;
  Accessor<bf16_t, 3> out;
  Accessor<float, 2> lse;
  const int32_t* row_offsets;  // [R+1], cut to the tensors and never falling
  const int32_t* key_offsets;
  int64_t num_requests;
  int64_t num_tiles;  // of a head
  int head_dim_qk, head_dim_v;
  bool causal;
  bool aligned;      // rows of q, k and v start at multiples of 16 bytes
  bool out_aligned;  // rows of out start at multiples of 4 bytes
  float softmax_scale;
  float log2_scale;  // softmax_scale * log2(e)
};

// Keys that a row of a request sees.
__device__ int32_t keys_seen(bool causal, int64_t row, int64_t num_rows, int64_t num_keys) {
  const int64_t seen = causal ? num_keys - num_rows + row + 1 : num_keys;
  return static_cast<int32_t>(seen < 0 ? 0 : seen > num_keys ? num_keys : seen);
}

template <int kWarps>
struct SharedMemory {
  static constexpr int kRows = kWarps * kWarpRows;
  bf16_t q[kRows][row_stride(kQkDim)];
  bf16_t k[kKeys][row_stride(kQkDim)];
  bf16_t v[kKeys][row_stride(kValueDim)];
  uint8_t weight_kind[kRows][kKeys];  // only where values are not finite
};

// Calls each(row, channel) for the units of 8 channels of a tile that a thread moves.
template <int kWarps, int kRows, int kDim, class Each>
__device__ void for_units(Each each) {
  constexpr int kLanes = 8;  // of a row
  constexpr int kPass = kWarps * kWarpThreads / kLanes;
#pragma unroll
  for (int pass = 0; pass < kRows / kPass; ++pass) {
#pragma unroll
    for (int d = 0; d < kDim; d += kLanes * 8) {
      each(pass * kPass + static_cast<int>(threadIdx.x) / kLanes,
           d + static_cast<int>(threadIdx.x) % kLanes * 8);
    }
  }
}

// Rows into shared memory, zeros past the first `count`; count >= 1.
template <int kWarps, int kRows, int kStride>
__device__ void load_rows(const bf16_t* from, int64_t stride, int count, bool aligned,
                          bf16_t (&to)[kRows][kStride]) {
  constexpr int kDim = kStride - row_stride(0);
  if (aligned) {
    for_units<kWarps, kRows, kDim>([&](int row, int channel) {
      const bool used = row < count;
      cuda::copy_async<16>(&to[row][channel], from + (used ? row : 0) * stride + channel, used);
    });
  } else {
    for_units<kWarps, kRows, kDim>([&](int row, int channel) {
#pragma unroll 1
      for (int d = channel; d < channel + 8; ++d) {
        to[row][d] = row < count ? from[row * stride + d] : bf16_t{0};
      }
    });
  }
  cuda::commit_copies();
}

__device__ bool is_finite(uint32_t bf16_bits) { return (bf16_bits & 0x7F80) != 0x7F80; }

// Whether some value that the thread has moved is not finite: its exponent is all ones, which one
// more carries out of.
template <int kWarps>
__device__ bool has_nonfinite(const SharedMemory<kWarps>& shared) {
  uint32_t carries = 0;
  for_units<kWarps, kKeys, kValueDim>([&](int row, int channel) {
    const uint4 words = *reinterpret_cast<const uint4*>(&shared.v[row][channel]);
    for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
      carries |= (word & 0x7F807F80) + 0x00800080;
    }
  });
  return (carries & 0x80008000) != 0;
}

// Zeros in their place.
template <int kWarps>
__device__ void clear_nonfinite(SharedMemory<kWarps>& shared) {
  for_units<kWarps, kKeys, kValueDim>([&](int row, int channel) {
#pragma unroll 1
    for (int d = channel; d < channel + 8; ++d) {
      if (!is_finite(shared.v[row][d].bits)) shared.v[row][d] = bf16_t{0};
    }
  });
}

// The walk of one block.
struct Walk {
  const bf16_t* keys;  // of the request and head
  const bf16_t* values;
  int32_t num_keys;    // that some row sees
  int32_t whole_keys;  // that every row sees
  int32_t visible[2];  // of the lane's rows
};

struct RowState {
  float largest[2] = {kNegInf, kNegInf};  // in units of log2
  float sum[2] = {0, 0};                  // the lane's share
};

// logits[n]: keys 8 n .. 8 n + 7 of the warp's rows, not yet scaled.
template <int kWarps>
__device__ void multiply_keys(const SharedMemory<kWarps>& shared, MmaC (&logits)[kKeys / 8]) {
  const int first_row = static_cast<int>(threadIdx.x) / kWarpThreads * kWarpRows;
#pragma unroll
  for (int step = 0; step < kQkDim / 16; ++step) {
    const MmaA a = cuda::load_a(&shared.q[first_row][16 * step], row_stride(kQkDim));
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      MmaB b0, b1;
      cuda::load_b_transposed(&shared.k[8 * n][16 * step], row_stride(kQkDim), b0, b1);
      cuda::mma(logits[n], a, b0);
      cuda::mma(logits[n + 1], a, b1);
    }
  }
}

// Logits in, weights out; what the old sums are multiplied with goes to `shrink`. A NaN logit does
// not become the maximum: its weight is NaN, whatever became of it.
__device__ void softmax(const Params& params, const Walk& walk, int32_t first_key, bool masked,
                        MmaC (&logits)[kKeys / 8], RowState& state, float (&shrink)[2]) {
  const int lane = threadIdx.x % kWarpThreads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t visible = walk.visible[half] - first_key - 2 * (lane % 4);
    float largest = kNegInf;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& logit = logits[n].x[2 * half + e];
        logit *= params.log2_scale;
        if (masked && 8 * n + e >= visible) logit = kNegInf;
        largest = fmaxf(largest, logit);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
    largest = fmaxf(largest, state.largest[half]);
    // While all logits are -inf, subtract 0: -inf minus -inf would be NaN.
    const float base = largest == kNegInf ? 0.0f : largest;
    shrink[half] = exp2_fast(state.largest[half] - base);
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& weight = logits[n].x[2 * half + e];
        weight = exp2_fast(weight - base);
        sum += weight;
      }
    }
    state.largest[half] = largest;
    state.sum[half] = fmaf(state.sum[half], shrink[half], sum);
  }
}

// values[n]: channels 8 n .. 8 n + 7 of the warp's rows.
template <int kWarps>
__device__ void add_values(const SharedMemory<kWarps>& shared, const MmaC (&weights)[kKeys / 8],
                           MmaC (&values)[kValueDim / 8]) {
#pragma unroll
  for (int key = 0; key < kKeys; key += 16) {
    MmaA a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const MmaC& from = weights[key / 8 + i / 2];
      a.x[i] = cuda::bf16_pair(from.x[i % 2 * 2], from.x[i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < kValueDim / 8; n += 2) {
      MmaB b0, b1;
      cuda::load_b(&shared.v[key][8 * n], row_stride(kValueDim), b0, b1);
      cuda::mma(values[n], a, b0);
      cuda::mma(values[n + 1], a, b1);
    }
  }
}

// Whether a weight is 0, above, or NaN: all that a product with NaN or an infinity depends on.
template <int kWarps>
__device__ void note_weights(const MmaC (&weights)[kKeys / 8], SharedMemory<kWarps>& shared) {
  const int lane = threadIdx.x % kWarpThreads;
  const int row = threadIdx.x / kWarpThreads * kWarpRows + lane / 4;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = weights[n].x[i];
      shared.weight_kind[row + i / 2 * 8][8 * n + 2 * (lane % 4) + i % 2] = isnan(weight) ? 2
                                                                            : weight > 0  ? 1
                                                                                          : 0;
    }
  }
  __syncwarp();
}

// Adds the values that clear_nonfinite() has taken out, to the rows that see them.
template <int kWarps>
__device__ void add_nonfinite(const Params& params, const Walk& walk, int32_t first_key,
                              const SharedMemory<kWarps>& shared, MmaC (&values)[kValueDim / 8]) {
  const int lane = threadIdx.x % kWarpThreads;
  const int row = threadIdx.x / kWarpThreads * kWarpRows + lane / 4;
  const int count = min(walk.num_keys - first_key, kKeys);
#pragma unroll
  for (int n = 0; n < kValueDim / 8; ++n) {
#pragma unroll 1
    for (int key = 0; key < count; ++key) {
      const bf16_t* const from =
          walk.values + (int64_t{first_key} + key) * params.v.stride[0] + 8 * n + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bf16_t value = from[i % 2];
        if (is_finite(value.bits) || key >= walk.visible[i / 2] - first_key) continue;
        const int kind = shared.weight_kind[row + i / 2 * 8][key];
        const float weight = kind == 2 ? __uint_as_float(0x7FFFFFFF) : static_cast<float>(kind);
        values[n].x[i] = fmaf(weight, bf16_to_float(value), values[n].x[i]);
      }
    }
  }
}

__device__ void store_row(const Params& params, int64_t t, int64_t head, int half, float largest,
                          float sum, const MmaC (&values)[kValueDim / 8]) {
  const int lane = threadIdx.x % kWarpThreads;
  const bool empty = sum == 0;
  if (lane % 4 == 0) {
    params.lse(t, head) = empty ? kNegInf : fmaf(largest, 0.693147180559945f, logf(sum));
  }
  const float factor = 1.0f / sum;
  bf16_t* const out = params.out.row(t, head) + 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < kValueDim / 8; ++n) {
    // Adding +0 turns -0 into +0: keys of weight 0 may or may not have done so before.
    const float low = empty ? 0.0f : values[n].x[2 * half] * factor + 0.0f;
    const float high = empty ? 0.0f : values[n].x[2 * half + 1] * factor + 0.0f;
    const uint32_t pair = cuda::bf16_pair(low, high);
    if (params.out_aligned) {
      *reinterpret_cast<uint32_t*>(out + 8 * n) = pair;
    } else {
      out[8 * n].bits = static_cast<uint16_t>(pair);
      out[8 * n + 1].bits = static_cast<uint16_t>(pair >> 16);
    }
  }
}

// The last request r that starts at or before tile `tile`. Request r has the tiles from begin_r /
// kRows + r on, one more than its rows can need: no sums over requests are involved.
template <int kRows>
__device__ int64_t request_of_tile(const Params& params, int64_t tile) {
  const auto first_tile = [&](int64_t r) { return params.row_offsets[r] / kRows + r; };
  return cuda::count_up_to(first_tile, params.num_requests, tile) - 1;
}

template <int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpThreads, 8 / kWarps)
    attend(const __grid_constant__ Params params) {
  using Shared = SharedMemory<kWarps>;
  constexpr int kRows = Shared::kRows;
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  // Blocks of one head run together and share its keys in the cache; the long walks of the last
  // rows start first.
  const int64_t head = blockIdx.x / static_cast<uint32_t>(params.num_tiles);
  const int64_t tile = params.num_tiles - 1 - blockIdx.x % static_cast<uint32_t>(params.num_tiles);
  const int64_t r = request_of_tile<kRows>(params, tile);
  if (r < 0) return;
  const int64_t begin = params.row_offsets[r];
  const int64_t num_rows = params.row_offsets[r + 1] - begin;
  const int64_t first_row = (tile - begin / kRows - r) * kRows;
  if (first_row >= num_rows) return;
  const int64_t first_t = begin + first_row;
  const int count = num_rows - first_row > kRows ? kRows : static_cast<int>(num_rows - first_row);
  const int64_t first_key = params.key_offsets[r];
  const int64_t request_keys = params.key_offsets[r + 1] - first_key;
  const int lane = threadIdx.x % kWarpThreads;
  const int own_row = threadIdx.x / kWarpThreads * kWarpRows + lane / 4;

  Walk walk;
  walk.num_keys = keys_seen(params.causal, first_row + count - 1, num_rows, request_keys);
  walk.whole_keys = keys_seen(params.causal, first_row, num_rows, request_keys);
  walk.keys = params.k.data + first_key * params.k.stride[0] + head * params.k.stride[1];
  walk.values = params.v.data + first_key * params.v.stride[0] + head * params.v.stride[1];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(own_row + 8 * half, count - 1);
    walk.visible[half] = keys_seen(params.causal, first_row + row, num_rows, request_keys);
  }
  const auto load_keys = [&](int32_t key) {
    load_rows<kWarps>(walk.keys + key * params.k.stride[0], params.k.stride[0],
                      min(walk.num_keys - key, kKeys), params.aligned, shared.k);
  };
  const auto load_values = [&](int32_t key) {
    load_rows<kWarps>(walk.values + key * params.v.stride[0], params.v.stride[0],
                      min(walk.num_keys - key, kKeys), params.aligned, shared.v);
  };

  MmaC values[kValueDim / 8] = {};
  RowState state;
  if (walk.num_keys > 0) {
    load_rows<kWarps>(params.q.row(first_t, head), params.q.stride[0], count, params.aligned,
                      shared.q);
    load_keys(0);
    load_values(0);
  }
#pragma unroll 1
  for (int32_t key = 0, left = walk.num_keys; left > 0; key += kKeys, left -= kKeys) {
    const bool more = left > kKeys;
    const bool masked = walk.whole_keys - key < kKeys;
    MmaC weights[kKeys / 8] = {};
    cuda::wait_copies<1>();
    __syncthreads();
    multiply_keys(shared, weights);
    __syncthreads();
    if (more) {
      load_keys(key + kKeys);
    } else {
      cuda::commit_copies();
    }
    float shrink[2];
    softmax(params, walk, key, masked, weights, state, shrink);
    if (__any_sync(0xFFFFFFFF, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (MmaC& value : values) {
#pragma unroll
        for (int i = 0; i < 4; ++i) value.x[i] *= shrink[i / 2];
      }
    }
    cuda::wait_copies<1>();
    const bool nonfinite = __syncthreads_or(has_nonfinite(shared)) != 0;
    if (nonfinite) {
      clear_nonfinite(shared);
      note_weights(weights, shared);
      __syncthreads();
    }
    add_values(shared, weights, values);
    if (nonfinite) add_nonfinite(params, walk, key, shared, values);
    __syncthreads();
    if (more) {
      load_values(key + kKeys);
    } else {
      cuda::commit_copies();
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
    const int row = own_row + 8 * half;
    if (row < count) store_row(params, first_t + row, head, half, state.largest[half], sum, values);
  }
}

// Channels of out that a block of attend_row() computes in one walk over the keys.
constexpr int kRowWarps = 4;
constexpr int kRowThreads = kRowWarps * kWarpThreads;
constexpr int kRowChannels = 8;
constexpr int kChunk = kRowChannels * kRowThreads;

// A row and head of any shape. Every warp follows the softmax of the same 32 keys.
__global__ void __launch_bounds__(kRowThreads) attend_row(const __grid_constant__ Params params) {
  __shared__ float logits[kWarpThreads];
  const int64_t t = blockIdx.x / static_cast<uint32_t>(params.q.shape[1]);
  const int64_t head = blockIdx.x % static_cast<uint32_t>(params.q.shape[1]);
  const auto begin_of = [&](int64_t r) { return int64_t{params.row_offsets[r]}; };
  const int64_t r = cuda::count_up_to(begin_of, params.num_requests, t) - 1;
  if (r < 0 || t >= params.row_offsets[r + 1]) return;
  const int64_t num_rows = params.row_offsets[r + 1] - params.row_offsets[r];
  const int64_t first_key = params.key_offsets[r];
  const int64_t visible = keys_seen(params.causal, t - params.row_offsets[r], num_rows,
                                    params.key_offsets[r + 1] - first_key);
  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;
  const bf16_t* const query = params.q.row(t, head);
  for (int chunk = 0; chunk < params.head_dim_v; chunk += kChunk) {
    float largest = kNegInf, sum = 0;
    float values[kRowChannels] = {};
    for (int64_t tile = 0; tile < visible; tile += kWarpThreads) {
      const int count = static_cast<int>(min(visible - tile, int64_t{kWarpThreads}));
      for (int key = warp; key < count; key += kRowWarps) {
        const bf16_t* const from = params.k.row(first_key + tile + key, head);
        float dot = 0;
        for (int d = lane; d < params.head_dim_qk; d += kWarpThreads) {
          dot = fmaf(bf16_to_float(query[d]), bf16_to_float(from[d]), dot);
        }
        for (int step = kWarpThreads / 2; step > 0; step /= 2) {
          dot += __shfl_xor_sync(0xFFFFFFFF, dot, step);
        }
        if (lane == 0) logits[key] = dot * params.softmax_scale;
      }
      __syncthreads();
      const float logit = lane < count ? logits[lane] : kNegInf;
      __syncthreads();
      float tile_max = logit;
      for (int step = kWarpThreads / 2; step > 0; step /= 2) {
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xFFFFFFFF, tile_max, step));
      }
      const float before = largest;
      largest = fmaxf(largest, tile_max);
      const float base = largest == kNegInf ? 0.0f : largest;
      const float shrink = expf(before - base);
      const float weight = expf(logit - base);
      float tile_sum = weight;
      for (int step = kWarpThreads / 2; step > 0; step /= 2) {
        tile_sum += __shfl_xor_sync(0xFFFFFFFF, tile_sum, step);
      }
      sum = fmaf(sum, shrink, tile_sum);
      for (float& value : values) value *= shrink;
      for (int key = 0; key < count; ++key) {
        const float key_weight = __shfl_sync(0xFFFFFFFF, weight, key);
        const bf16_t* const from = params.v.row(first_key + tile + key, head);
#pragma unroll
        for (int i = 0; i < kRowChannels; ++i) {
          const int d = chunk + i * kRowThreads + static_cast<int>(threadIdx.x);
          if (d < params.head_dim_v) {
            values[i] = fmaf(key_weight, bf16_to_float(from[d]), values[i]);
          }
        }
      }
    }
    const bool empty = sum == 0;
    const float factor = 1.0f / sum;
#pragma unroll
    for (int i = 0; i < kRowChannels; ++i) {
      const int d = chunk + i * kRowThreads + static_cast<int>(threadIdx.x);
      if (d < params.head_dim_v) {
        params.out(t, head, d) = empty ? bf16_t{0} : bf16_from_float(values[i] * factor + 0.0f);
      }
    }
    if (chunk == 0 && threadIdx.x == 0) {
      params.lse(t, head) = empty ? kNegInf : largest + logf(sum);
    }
  }
}

bool is_model_shape(const MhaVarlenProblem& problem) {
  return problem.head_dim_qk == kQkDim && problem.head_dim_v == kValueDim;
}

template <class T>
bool rows_are_aligned(const Accessor<T, 3>& rows, int64_t bytes) {
  const auto elements = bytes / int64_t{sizeof(bf16_t)};
  return reinterpret_cast<uintptr_t>(rows.data) % static_cast<uintptr_t>(bytes) == 0 &&
         rows.stride[0] % elements == 0 && rows.stride[1] % elements == 0;
}

// Warps of a block: many share every key among more rows, few give more blocks.
constexpr int kFewWarps = 4;
constexpr int kManyWarps = 8;

template <int kWarps>
void launch_attend(Params params, Stream stream) {
  using Shared = SharedMemory<kWarps>;
  params.num_tiles = params.q.shape[0] / Shared::kRows + params.num_requests;
  cuda::launch("mha_varlen", attend<kWarps>,
               {dim3(static_cast<unsigned>(params.num_tiles * params.q.shape[1])),
                dim3(kWarps * kWarpThreads), sizeof(Shared)},
               stream, params);
}

bool takes_many_warps(const MhaVarlenProblem& problem, const Device& device) {
  const cuda::DeviceFacts& facts = cuda::device_facts(device.ordinal);
  const double tiles = static_cast<double>(problem.max_rows / (kManyWarps * kWarpRows));
  return facts.max_shared_bytes >= int64_t{sizeof(SharedMemory<kManyWarps>)} &&
         tiles * static_cast<double>(problem.num_heads) >= 2.0 * facts.num_sms;
}

struct OffsetMemory {
  int32_t* rows;
  int32_t* keys;

  OffsetMemory(WorkspaceCutter& cutter, const MhaVarlenProblem& problem)
      : rows(cutter.take<int32_t>(problem.max_requests + 1)),
        keys(cutter.take<int32_t>(problem.max_requests + 1)) {}
};

}  // namespace

Refusal mha_varlen_cuda_supports(const MhaVarlenProblem& problem) {
  const double groups =
      is_model_shape(problem)
          ? static_cast<double>(problem.max_rows / kWarpRows / kFewWarps + problem.max_requests)
          : static_cast<double>(problem.max_rows);
  const double blocks = groups * static_cast<double>(problem.num_heads);
  if (blocks <= std::numeric_limits<int32_t>::max()) return {};
  return "takes at most 2^31 - 1 tiles of rows and heads, got bounds of " +
         std::to_string(static_cast<int64_t>(std::min(blocks, 0x1p62)));
}

size_t mha_varlen_cuda_workspace(const MhaVarlenProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  OffsetMemory(cutter, problem);
  return cutter.used_bytes();
}

void mha_varlen_cuda_portable(const MhaVarlenProblem& problem, const Device& device,
                              const MhaVarlenTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  const OffsetMemory memory(cutter, problem);
  Params params{};
  params.q = access<const bf16_t, 3>(tensors.q);
  params.k = access<const bf16_t, 3>(tensors.k);
  params.v = access<const bf16_t, 3>(tensors.v);
  params.out = access<bf16_t, 3>(tensors.out);
  params.lse = access<float, 2>(tensors.lse);
  params.row_offsets = memory.rows;
  params.key_offsets = memory.keys;
  params.num_requests = tensors.q_indptr.shape[0] - 1;
  params.head_dim_qk = static_cast<int>(problem.head_dim_qk);
  params.head_dim_v = static_cast<int>(problem.head_dim_v);
  params.causal = problem.causal;
  params.aligned = rows_are_aligned(params.q, 16) && rows_are_aligned(params.k, 16) &&
                   rows_are_aligned(params.v, 16);
  params.out_aligned = rows_are_aligned(params.out, 4);
  params.softmax_scale = problem.softmax_scale;
  params.log2_scale =
      static_cast<float>(std::min(static_cast<double>(problem.softmax_scale) * 1.4426950408889634,
                                  static_cast<double>(std::numeric_limits<float>::max())));
  if (params.num_requests == 0 || params.q.shape[0] == 0) return;
  const OffsetParams offsets{{static_cast<const int32_t*>(tensors.q_indptr.data),
                              static_cast<const int32_t*>(tensors.kv_indptr.data)},
                             {memory.rows, memory.keys},
                             {params.q.shape[0], params.k.shape[0]},
                             params.num_requests + 1};
  cuda::launch("mha_varlen", clean_offsets<kOffsetThreads>, {dim3(2), dim3(kOffsetThreads)}, stream,
               offsets);
  if (is_model_shape(problem)) {
    if (takes_many_warps(problem, device)) {
      launch_attend<kManyWarps>(params, stream);
    } else {
      launch_attend<kFewWarps>(params, stream);
    }
  } else {
    cuda::launch(
        "mha_varlen", attend_row,
        {dim3(static_cast<unsigned>(params.q.shape[0] * problem.num_heads)), dim3(kRowThreads)},
        stream, params);
  }
}

}  // namespace fovea::internal
