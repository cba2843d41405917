#include <limits>

#include "fovea/numeric.h"
#include "src/compress/v4_compress_impl.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/fp8_tile.h"

// A block takes one row of kv_gate, its threads the channels. Rows that complete a group are
// computed by a first launch, which reads the state; a second one writes it. Tokens are added in
// the order of their positions, wherever they come from.
namespace fovea::internal {
namespace {

using cuda::kWarpThreads;

constexpr int kThreads = 128;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

struct Params {
  CompressView view;
  const float* norm_weight;
  float eps;
  RowFormat format;
  ScaleMode mode;
};

// How many of the `most` latest tokens up to row `row` are rows of this call, by the whole block.
__device__ int64_t tokens_here(const CompressView& view, const CompressToken& token, int64_t row,
                               int64_t most, int* shared) {
  if (threadIdx.x == 0) *shared = static_cast<int>(most);
  __syncthreads();
  for (int64_t back = 1 + threadIdx.x; back < most; back += kThreads) {
    if (!view.has_token(token, row, -back)) atomicMin(shared, static_cast<int>(back));
  }
  __syncthreads();
  return *shared;
}

__device__ float logit_of(const CompressTerm& term, int64_t i) {
  return term.ape != nullptr ? term.logit[i] + term.ape[i] : term.logit[i];
}

// While all logits are -inf, 0 is subtracted: -inf minus -inf would be NaN.
__device__ float base_of(float largest) { return largest == kNegInf ? 0.0f : largest; }

// e of channel i from tokens kept one by one. A NaN logit needs no care: its weight is NaN,
// whatever became of the maximum.
__device__ float stored_channel(const CompressView& view, const CompressToken& token, int64_t row,
                                int64_t here, int64_t i) {
  const int64_t span = view.groups * view.ratio;
  const int64_t first = token.position < span - 1 ? token.position : span - 1;
  const auto term_at = [&](int64_t back) {
    return view.term(token, row, here, back, view.groups == 2 && back < view.ratio ? 1 : 0);
  };
  float largest = kNegInf;
  for (int64_t back = first; back >= 0; --back) {
    largest = fmaxf(largest, logit_of(term_at(back), i));
  }
  const float base = base_of(largest);
  float sum = 0, value = 0;
  for (int64_t back = first; back >= 0; --back) {
    const CompressTerm term = term_at(back);
    const float weight = expf(logit_of(term, i) - base);
    sum += weight;
    value = fmaf(weight, term.value[i], value);
  }
  return sum == 0 ? 0.0f : value / sum;
}

struct OnlineSums {
  float m, l, a;
};

// Of channel i of the group of the token in row `row`, up to that token; `here` of its `span`
// tokens are rows of this call.
__device__ OnlineSums online_channel(const CompressView& view, const CompressToken& token,
                                     int64_t row, int64_t here, int64_t span, int64_t i) {
  OnlineSums sums{kNegInf, 0, 0};
  if (here < span) {
    sums = {view.online(token.state, 0, i), view.online(token.state, 1, i),
            view.online(token.state, 2, i)};
  }
  for (int64_t back = here - 1; back >= 0; --back) {
    const CompressTerm term = view.term(token, row, here, back, 0);
    const float u = logit_of(term, i);
    const float largest = fmaxf(sums.m, u);
    const float base = base_of(largest);
    const float keep = expf(sums.m - base), weight = expf(u - base);
    sums.l = fmaf(sums.l, keep, weight);
    sums.a = fmaf(weight, term.value[i], sums.a * keep);
    sums.m = largest;
  }
  return sums;
}

// The sum, or largest, of a value of every thread, in a fixed order.
template <class Combine>
__device__ float over_block(float value, float* shared, Combine combine) {
  for (int step = kWarpThreads / 2; step > 0; step /= 2) {
    value = combine(value, __shfl_xor_sync(0xFFFFFFFF, value, step));
  }
  if (threadIdx.x % kWarpThreads == 0) shared[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  value = shared[0];
  for (int warp = 1; warp < kThreads / kWarpThreads; ++warp) value = combine(value, shared[warp]);
  __syncthreads();
  return value;
}

// The pool is bytes: elements may lie at any address.
__device__ void store_bytes(uint32_t bits, int count, uint8_t* to) {
  for (int b = 0; b < count; ++b) to[b] = static_cast<uint8_t>(bits >> (8 * b));
}

__global__ void __launch_bounds__(kThreads) complete_rows(const __grid_constant__ Params params) {
  __shared__ float e[kMaxCompressDim];
  __shared__ float partial[kThreads / kWarpThreads];
  __shared__ int count;
  const CompressView& view = params.view;
  const int64_t row = blockIdx.x;
  const CompressToken token = view.token(row);
  const int32_t slot = token.valid() && view.completes_group(token) ? view.slot(token) : -1;
  if (threadIdx.x == 0) view.emitted(row) = slot;
  if (slot < 0) return;
  const int64_t span = view.ring > 0 ? view.groups * view.ratio : view.ratio;
  const int64_t here = tokens_here(view, token, row, span, &count);
  float squares = 0;
  for (int64_t i = threadIdx.x; i < view.dim; i += kThreads) {
    float value;
    if (view.ring > 0) {
      value = stored_channel(view, token, row, here, i);
    } else {
      const OnlineSums sums = online_channel(view, token, row, here, span, i);
      value = sums.l == 0 ? 0.0f : sums.a / sums.l;
    }
    e[i] = value;
    squares = fmaf(value, value, squares);
  }
  squares = over_block(squares, partial, [](float a, float b) { return a + b; });
  const float factor = 1.0f / sqrtf(squares / static_cast<float>(view.dim) + params.eps);
  for (int64_t i = threadIdx.x; i < view.dim; i += kThreads) {
    e[i] = e[i] * factor * params.norm_weight[i];
  }
  __syncthreads();
  if (threadIdx.x < kCompressRopeDim / 2) {
    float* const x = e + view.dim - kCompressRopeDim + 2 * threadIdx.x;
    const float* const rotation = view.rotation(token);
    const float cosine = rotation[threadIdx.x];
    const float sine = rotation[kCompressRopeDim / 2 + threadIdx.x];
    const float a = x[0], b = x[1];
    x[0] = a * cosine - b * sine;
    x[1] = b * cosine + a * sine;
  }
  __syncthreads();
  if (params.format == RowFormat::kBf16) {
    uint8_t* const record = view.pool.record(slot, 2 * view.dim);
    for (int64_t i = threadIdx.x; i < view.dim; i += kThreads) {
      store_bytes(bf16_from_float(e[i]).bits, 2, record + 2 * i);
    }
    return;
  }
  if (params.format == RowFormat::kV4) {
    // A warp takes a tile at a time, a lane two of its channels.
    const int lane = threadIdx.x % kWarpThreads;
    uint8_t* const data = view.pool.v4_data(slot);
    uint8_t* const scales = view.pool.v4_scales(slot);
    for (int tile = threadIdx.x / kWarpThreads; tile < kV4NumTiles;
         tile += kThreads / kWarpThreads) {
      const int first = tile * static_cast<int>(kV4TileDim) + 2 * lane;
      const bf16_t x[2] = {bf16_from_float(e[first]), bf16_from_float(e[first + 1])};
      float amax = tile_amax(x, 2);
      for (int step = kWarpThreads / 2; step > 0; step /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, step));
      }
      const float scale = latent_tile_scale(amax, ScaleMode::kPow2);
      data[first] = e4m3_from_float(bf16_to_float(x[0]) / scale);
      data[first + 1] = e4m3_from_float(bf16_to_float(x[1]) / scale);
      if (lane == 0) scales[tile] = ue8m0_from_float(scale);
    }
    if (threadIdx.x == 0) scales[kV4NumTiles] = 0;
    if (threadIdx.x < kV4RopeDim) {
      store_bytes(bf16_from_float(e[kV4LatentDim + threadIdx.x]).bits, 2,
                  data + kV4LatentDim + 2 * threadIdx.x);
    }
    return;
  }
  float amax = 0;
  for (int64_t i = threadIdx.x; i < view.dim; i += kThreads) {
    const bf16_t x = bf16_from_float(e[i]);
    amax = fmaxf(amax, tile_amax(&x, 1));
  }
  amax = over_block(amax, partial, [](float a, float b) { return fmaxf(a, b); });
  const float scale = index_tile_scale(amax, params.mode);
  uint8_t* const codes = view.pool.i132_codes(slot, view.dim);
  for (int64_t i = threadIdx.x; i < view.dim; i += kThreads) {
    codes[i] = e4m3_from_float(bf16_to_float(bf16_from_float(e[i])) / scale);
  }
  if (threadIdx.x == 0) {
    store_bytes(__float_as_uint(scale), 4, view.pool.i132_scale(slot, view.dim));
  }
}

__global__ void __launch_bounds__(kThreads) store_state(const __grid_constant__ Params params) {
  __shared__ int count;
  const CompressView& view = params.view;
  const int64_t row = blockIdx.x;
  const CompressToken token = view.token(row);
  if (!token.valid()) return;
  if (view.ring > 0) {
    if (!view.stays(token, row)) return;
    const int64_t entry = token.position % view.ring;
    const CompressTerm term = view.term(token, row, 1, 0, 0);
    for (int64_t i = threadIdx.x; i < view.groups * view.dim; i += kThreads) {
      view.stored(token.state, entry, 0, i) = term.value[i];
      view.stored(token.state, entry, 1, i) = logit_of(term, i);
    }
    return;
  }
  if (view.has_token(token, row, 1)) return;
  const bool complete = view.completes_group(token);
  const int64_t span = token.position % view.ratio + 1;
  const int64_t here = tokens_here(view, token, row, span, &count);
  for (int64_t i = threadIdx.x; i < view.dim; i += kThreads) {
    const OnlineSums sums =
        complete ? OnlineSums{kNegInf, 0, 0} : online_channel(view, token, row, here, span, i);
    view.online(token.state, 0, i) = sums.m;
    view.online(token.state, 1, i) = sums.l;
    view.online(token.state, 2, i) = sums.a;
  }
}

}  // namespace

void v4_compress_cuda_portable(const V4CompressProblem& problem, const Device& device,
                               const V4CompressTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const Params params{CompressView(problem, tensors),
                      static_cast<const float*>(tensors.norm_weight.data), problem.eps,
                      problem.row_format, problem.scale_mode};
  const dim3 rows(static_cast<unsigned>(params.view.num_rows));
  cuda::launch("v4_compress", complete_rows, {rows, dim3(kThreads)}, stream, params);
  cuda::launch("v4_compress", store_state, {rows, dim3(kThreads)}, stream, params);
}

}  // namespace fovea::internal
