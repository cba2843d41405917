#include <algorithm>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/mma.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/core/sink.h"
#include "src/core/workspace.h"
#include "src/mla/sparse_mla_cache.h"
#include "src/mla/sparse_mla_impl.h"
#include "src/mla/sparse_mla_parts.h"

// A block of 8 warps takes kHeads heads of one row and one part of its slots, 64 at a time:
//
//   fetch   packed rows of the next tile travel into a staging area while this one is computed;
//           bf16 rows go straight to their place, all requests in flight at once
//   keys    bf16 [64, Dqk] in shared memory, zeros where a slot is unused
//   logits  Q [kHeads, Dqk] x K^T on tensor cores; the warps share out heads and keys
//   softmax running maximum and sum of each head, 256 / kHeads threads a head; a weight as the sum
//           of two bf16, because one alone would cost the output its last bit where few keys carry
//           the weight
//   values  P [kHeads, 64] x K[:, 0:512]; each warp owns 64 channels of all heads in registers
//
// Shared memory decides how many heads a block takes: 166 KiB for 64, 120 for 32, 97 for 16, and 41
// for the staging area where it fits. The number of parts is fixed by the plan, so that a row's
// bits depend on nothing but the row; with one part the block writes the result, otherwise a second
// launch folds the parts in their order.
namespace fovea::internal {
namespace {

using cuda::MmaA;
using cuda::MmaB;
using cuda::MmaC;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = 64;
constexpr int kValueDim = static_cast<int>(kLatentDim);
constexpr int kChannelsPerWarp = kValueDim / kWarps;
// The 64 logits of a head, fp32, and later its weights: 64 rounded ones at the start, what they
// lack 144 bytes further. Rows are an odd number of 16-byte units apart, for ldmatrix.
constexpr int kScoreBytes = 304;
constexpr int kWeightStride = kScoreBytes / 2;
constexpr int kRestOffset = 72;
constexpr int kStagedRowBytes = static_cast<int>(kV32RowBytes);  // the longest packed row
constexpr int64_t kStagingBytes = kKeys * kStagedRowBytes;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// A row of queries or keys: an odd number of 16-byte units apart, for ldmatrix.
constexpr int row_stride(int head_dim) { return head_dim + 8; }

struct Segment {
  const uint8_t* base;
  int64_t num_pages;
  int64_t page_size;
  int64_t page_stride_bytes;
  int64_t row_bytes;
  RowFormat format;
  bool aligned;  // every row starts at a multiple of 16 bytes
  bool staged;   // its tiles go through the staging area
  const int32_t* indices;
  int64_t index_stride;
  int64_t width;
  const int32_t* topk_length;  // may be null

  __device__ int64_t length(int64_t t) const {
    if (topk_length == nullptr) return width;
    const int64_t len = topk_length[t];
    return len < 0 ? 0 : len > width ? width : len;
  }
  __device__ const uint8_t* row(int32_t index) const {
    if (index < 0) return nullptr;
    const int64_t page = static_cast<uint32_t>(index) / static_cast<uint32_t>(page_size);
    if (page >= num_pages) return nullptr;
    return base + page * page_stride_bytes + (index - page * page_size) * row_bytes;
  }
};

struct Params {
  const void* q;
  bool q_is_fp8;
  bool q_aligned;  // bf16, every 8th channel at a multiple of 16 bytes
  int64_t q_row_stride, q_head_stride;
  Segment segments[2];
  const float* sink;
  Accessor<bf16_t, 3> out;
  Accessor<float, 2> lse;
  Accessor<float, 2> max_logits;
  bool out_aligned;  // every second channel at a multiple of 4 bytes
  int64_t num_rows;
  int64_t num_heads;
  int64_t head_groups;
  int64_t num_parts;
  float logit_scale;  // softmax_scale * q_scale * k_scale
  float logit_cap;
  float value_scale;  // k_scale
  float empty_lse;
  // Of several parts: unnormalised sums [T, parts, H, 512], largest logit and sum of weights.
  float* part_values;
  float2* part_state;
};

template <int kHeads, int kHeadDim>
struct SharedMemory {
  bf16_t q[kHeads][row_stride(kHeadDim)];
  bf16_t k[kKeys][row_stride(kHeadDim)];
  alignas(16) uint8_t scores[kHeads][kScoreBytes];
  const uint8_t* rows[3][kKeys];  // of this tile, the next and the one after
  float largest[kHeads];
  float sum[kHeads];
  float shrink[kHeads];  // what the new maximum leaves of the old sums

  __device__ float* logits(int head) { return reinterpret_cast<float*>(scores[head]); }
  __device__ bf16_t* weights(int head) { return reinterpret_cast<bf16_t*>(scores[head]); }
};

// Eight bf16 of a row at channels 8 i .. 8 i + 7.
template <bool kAligned>
__device__ uint4 load_bf16(const uint8_t* row, int i) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const uint4*>(row + 16 * i);
  } else {
    uint32_t word[4] = {};
    for (int b = 0; b < 16; ++b) {
      word[b / 4] |= static_cast<uint32_t>(row[16 * i + b]) << (8 * (b % 4));
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
}

__device__ void store16(bf16_t* to, uint2 low, uint2 high, uint2 low2, uint2 high2) {
  auto* const words = reinterpret_cast<uint4*>(to);
  words[0] = make_uint4(low.x, low.y, high.x, high.y);
  words[1] = make_uint4(low2.x, low2.y, high2.x, high2.y);
}

// One row of a cache as bf16, by the lanes of a warp.
template <int kHeadDim, bool kAligned>
__device__ __forceinline__ void load_key(RowFormat format, const uint8_t* row, bf16_t* to) {
  const int lane = threadIdx.x % 32;
  if (format == RowFormat::kBf16) {
    for (int i = lane; i < kHeadDim / 8; i += 32) {
      reinterpret_cast<uint4*>(to)[i] = load_bf16<kAligned>(row, i);
    }
    return;
  }
  // 16 codes a lane cover the latent part; those of f576's rope part follow.
  const uint4 codes = load_bf16<kAligned>(row, lane);
  float scale = 1;
  if (format == RowFormat::kV32) {
    const uint8_t* const at = row + kV32ScaleOffset + lane / 8 * 4;
    if constexpr (kAligned) {
      scale = *reinterpret_cast<const float*>(at);
    } else {
      scale = __uint_as_float(at[0] | at[1] << 8 | at[2] << 16 | uint32_t{at[3]} << 24);
    }
    if (lane < 8) {
      reinterpret_cast<uint4*>(to + kLatentDim)[lane] =
          load_bf16<kAligned>(row + kV32RopeOffset, lane);
    }
  } else if (lane < 4) {
    const uint4 rope = load_bf16<kAligned>(row + kLatentDim, lane);
    store16(to + kLatentDim + 16 * lane, cuda::decode4(rope.x, 1), cuda::decode4(rope.y, 1),
            cuda::decode4(rope.z, 1), cuda::decode4(rope.w, 1));
  }
  store16(to + 16 * lane, cuda::decode4(codes.x, scale), cuda::decode4(codes.y, scale),
          cuda::decode4(codes.z, scale), cuda::decode4(codes.w, scale));
}

__device__ void clear_key(int head_dim, bf16_t* to) {
  for (int i = threadIdx.x % 32; i < head_dim / 8; i += 32) {
    reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
  }
}

// 64 slots of one segment.
struct Tile {
  const Segment* segment;
  int64_t first_slot;
  int64_t slots;  // of the segment in this row

  __device__ const uint8_t* row(int64_t t, int key) const {
    const int64_t slot = first_slot + key;
    if (slot >= slots) return nullptr;
    return segment->row(segment->indices[t * segment->index_stride + slot]);
  }
};

__device__ Tile tile_at(const Params& params, const RowParts& parts, int64_t block) {
  if (block < parts.primary_blocks) {
    return {&params.segments[0], block * kBlockSlots, parts.primary_slots};
  }
  return {&params.segments[1], (block - parts.primary_blocks) * kBlockSlots, parts.extra_slots};
}

// Asks for the packed rows of a tile; they are there after wait_for_copies and a barrier.
__device__ void stage_rows(const Segment& segment, const uint8_t* const* rows, uint8_t* staging) {
  const int lane = threadIdx.x % 32;
  const int pieces = static_cast<int>(segment.row_bytes / 16);
#pragma unroll
  for (int i = 0; i < kKeys / kWarps; ++i) {
    const int key = threadIdx.x / 32 + i * kWarps;
    if (rows[key] == nullptr) continue;
    for (int piece = lane; piece < pieces; piece += 32) {
      cuda::copy_async<16>(staging + key * kStagedRowBytes + 16 * piece, rows[key] + 16 * piece,
                           true);
    }
  }
}

// Rows at any address; a call of its own, to keep the code of the usual paths together.
template <int kHeads, int kHeadDim>
__device__ __noinline__ void load_unaligned(RowFormat format, const uint8_t* const* rows,
                                            SharedMemory<kHeads, kHeadDim>& shared) {
#pragma unroll 1
  for (int key = threadIdx.x / 32; key < kKeys; key += kWarps) {
    if (rows[key] != nullptr) load_key<kHeadDim, false>(format, rows[key], shared.k[key]);
  }
}

// Brings the keys of a tile into place. Of a staged tile the rows have arrived. One loop per
// source: all of them unrolled together would not fit the instruction cache.
template <int kHeads, int kHeadDim>
__device__ void load_keys(const Segment& segment, const uint8_t* const* rows,
                          const uint8_t* staging, SharedMemory<kHeads, kHeadDim>& shared) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  if (segment.format == RowFormat::kBf16 && segment.aligned) {
#pragma unroll
    for (int i = 0; i < kKeys / kWarps; ++i) {
      const int key = warp + i * kWarps;
      const uint8_t* const row = rows[key];
      if (row == nullptr) continue;
      for (int piece = lane; piece < kHeadDim / 8; piece += 32) {
        cuda::copy_async<16>(&shared.k[key][8 * piece], row + 16 * piece, true);
      }
    }
    cuda::wait_for_copies();
  } else if (segment.staged) {
#pragma unroll 2
    for (int key = warp; key < kKeys; key += kWarps) {
      if (rows[key] == nullptr) continue;
      load_key<kHeadDim, true>(segment.format, staging + key * kStagedRowBytes, shared.k[key]);
    }
  } else {
    load_unaligned<kHeads, kHeadDim>(segment.format, rows, shared);
  }
#pragma unroll 1
  for (int key = warp; key < kKeys; key += kWarps) {
    if (rows[key] == nullptr) clear_key(kHeadDim, shared.k[key]);
  }
}

// Queries of the group, zeros for heads past the last.
template <int kHeads, int kHeadDim>
__device__ void load_queries(const Params& params, int64_t t, int64_t first_head,
                             SharedMemory<kHeads, kHeadDim>& shared) {
  const int64_t start = t * params.q_row_stride + first_head * params.q_head_stride;
  const int heads = static_cast<int>(
      params.num_heads - first_head < kHeads ? params.num_heads - first_head : kHeads);
  if (params.q_aligned) {
    const auto* const from = static_cast<const bf16_t*>(params.q) + start;
    for (int i = threadIdx.x; i < heads * (kHeadDim / 8); i += kThreads) {
      const int head = i / (kHeadDim / 8), d = i % (kHeadDim / 8) * 8;
      cuda::copy_async<16>(&shared.q[head][d], from + head * params.q_head_stride + d, true);
    }
    cuda::wait_for_copies();
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < heads * kHeadDim; i += kThreads) {
      const int64_t at = start + i / kHeadDim * params.q_head_stride + i % kHeadDim;
      shared.q[i / kHeadDim][i % kHeadDim] =
          params.q_is_fp8
              ? bf16_from_float(e4m3_to_float(static_cast<const uint8_t*>(params.q)[at]))
              : static_cast<const bf16_t*>(params.q)[at];
    }
  }
  for (int i = heads * kHeadDim + threadIdx.x; i < kHeads * kHeadDim; i += kThreads) {
    shared.q[i / kHeadDim][i % kHeadDim] = bf16_t{0};
  }
}

// logits[head][key] = dot(q, k), not yet scaled.
template <int kHeads, int kHeadDim>
__device__ void multiply_keys(SharedMemory<kHeads, kHeadDim>& shared) {
  constexpr int kStride = row_stride(kHeadDim);
  constexpr int kHeadTiles = kHeads / 16;
  constexpr int kKeyWarps = kWarps / kHeadTiles;    // warps that share the keys
  constexpr int kKeyTiles = kKeys / 8 / kKeyWarps;  // groups of 8 keys of each warp
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int first_head = warp % kHeadTiles * 16;
  const int first_key = warp / kHeadTiles * kKeyTiles * 8;
  MmaC sums[kKeyTiles] = {};
#pragma unroll 3
  for (int d = 0; d < kHeadDim; d += 32) {
    const MmaA a0 = cuda::load_a(&shared.q[first_head][d], kStride);
    const MmaA a1 = cuda::load_a(&shared.q[first_head][d + 16], kStride);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      MmaB b0, b1;
      cuda::load_b_transposed_deep(&shared.k[first_key + 8 * n][d], kStride, b0, b1);
      cuda::mma(sums[n], a0, b0);
      cuda::mma(sums[n], a1, b1);
    }
  }
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
    const int key = first_key + 8 * n + 2 * (lane % 4);
    float* const low = shared.logits(first_head + lane / 4) + key;
    float* const high = shared.logits(first_head + lane / 4 + 8) + key;
    low[0] = sums[n].x[0];
    low[1] = sums[n].x[1];
    high[0] = sums[n].x[2];
    high[1] = sums[n].x[3];
  }
}

// A call, because tanh would fill the instruction cache of a loop that rarely needs it.
__device__ __noinline__ float capped(float logit, float cap) { return cap * tanhf(logit / cap); }

// Weights of the tile and the state of each head. A NaN logit does not become the maximum; it makes
// its own weight NaN, and with it the head's sum.
template <int kHeads, int kHeadDim>
__device__ void softmax(const Params& params, const uint8_t* const* rows,
                        SharedMemory<kHeads, kHeadDim>& shared) {
  constexpr int kHeadThreads = kThreads / kHeads;  // neighbours in a warp
  constexpr int kQuads = kKeys / 4 / kHeadThreads;
  constexpr float kLog2E = 1.44269504f;
  const int head = threadIdx.x / kHeadThreads;
  const int first_key = threadIdx.x % kHeadThreads * 4;
  float logit[kQuads][4];
  float tile_max = kNegInf;
#pragma unroll
  for (int n = 0; n < kQuads; ++n) {
    const int key = first_key + 4 * kHeadThreads * n;
    const float4 dots = *reinterpret_cast<const float4*>(shared.logits(head) + key);
    const float dot[4] = {dots.x, dots.y, dots.z, dots.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      logit[n][i] = rows[key + i] != nullptr ? params.logit_scale * dot[i] : kNegInf;
    }
  }
  if (params.logit_cap > 0) {
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (rows[first_key + 4 * kHeadThreads * n + i] == nullptr) continue;
        logit[n][i] = capped(logit[n][i], params.logit_cap);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kQuads; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile_max = fmaxf(tile_max, logit[n][i]);
  }
#pragma unroll
  for (int step = kHeadThreads / 2; step > 0; step /= 2) {
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xFFFFFFFF, tile_max, step));
  }
  const float before = shared.largest[head];
  const float largest = fmaxf(before, tile_max);
  float quad_sum[kQuads];
  __syncwarp();  // the weights take the place of the logits
#pragma unroll
  for (int n = 0; n < kQuads; ++n) {
    bf16_t rounded[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Without any weight so far, -inf - -inf must not become NaN; a NaN logit must stay one.
      const float weight = logit[n][i] == kNegInf ? 0.0f : exp2f((logit[n][i] - largest) * kLog2E);
      rounded[i] = bf16_from_float(weight);
      rest[i] = bf16_from_float(weight - bf16_to_float(rounded[i]));
      quad_sum[n] = i == 0 ? weight : quad_sum[n] + weight;
    }
    bf16_t* const to = shared.weights(head) + first_key + 4 * kHeadThreads * n;
    cuda::store4<true>(rounded, to);
    cuda::store4<true>(rest, to + kRestOffset);
  }
  // Quad q joins q ^ 8, then q ^ 4, 2, 1, in a thread or across: the same sum for any kHeads.
#pragma unroll
  for (int apart = kQuads / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int n = 0; n < apart; ++n) quad_sum[n] += quad_sum[n + apart];
  }
  float sum = quad_sum[0];
#pragma unroll
  for (int step = kHeadThreads / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
  }
  if (threadIdx.x % kHeadThreads == 0) {
    const float shrink = before == largest ? 1.0f : exp2f((before - largest) * kLog2E);
    shared.largest[head] = largest;
    shared.shrink[head] = shrink;
    shared.sum[head] = fmaf(shared.sum[head], shrink, sum);
  }
}

// values[m][n] of the warp's 64 channels: shrunk, plus the tile's weights times its keys.
template <int kHeads, int kHeadDim>
__device__ void add_values(SharedMemory<kHeads, kHeadDim>& shared,
                           MmaC (&values)[kHeads / 16][kChannelsPerWarp / 8]) {
  constexpr int kStride = row_stride(kHeadDim);
  const int lane = threadIdx.x % 32;
  const int first_channel = threadIdx.x / 32 * kChannelsPerWarp;
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
    const float low = shared.shrink[16 * m + lane / 4];
    const float high = shared.shrink[16 * m + lane / 4 + 8];
#pragma unroll
    for (int n = 0; n < kChannelsPerWarp / 8; ++n) {
      values[m][n].x[0] *= low;
      values[m][n].x[1] *= low;
      values[m][n].x[2] *= high;
      values[m][n].x[3] *= high;
    }
  }
#pragma unroll 1
  for (int key = 0; key < kKeys; key += 16) {
    MmaA rounded[kHeads / 16], rest[kHeads / 16];
#pragma unroll
    for (int m = 0; m < kHeads / 16; ++m) {
      rounded[m] = cuda::load_a(shared.weights(16 * m) + key, kWeightStride);
      rest[m] = cuda::load_a(shared.weights(16 * m) + kRestOffset + key, kWeightStride);
    }
#pragma unroll
    for (int n = 0; n < kChannelsPerWarp / 8; n += 2) {
      MmaB b0, b1;
      cuda::load_b(&shared.k[key][first_channel + 8 * n], kStride, b0, b1);
#pragma unroll
      for (int m = 0; m < kHeads / 16; ++m) {
        cuda::mma(values[m][n], rounded[m], b0);
        cuda::mma(values[m][n], rest[m], b0);
        cuda::mma(values[m][n + 1], rounded[m], b1);
        cuda::mma(values[m][n + 1], rest[m], b1);
      }
    }
  }
}

// What is left of a head: lse and the factor that its sums are multiplied with.
struct HeadResult {
  float lse;
  float max_logit;
  float factor;
};

__device__ HeadResult finish_head(const Params& params, int64_t head, float largest, float sum) {
  if (largest == kNegInf && !isnan(sum)) return {params.empty_lse, kNegInf, 0.0f};
  const float lse = largest + logf(sum);
  const float left = params.sink != nullptr ? sink_factor(params.sink[head], lse) : 1.0f;
  return {lse, isnan(lse) ? lse : largest, left * params.value_scale / sum};
}

__device__ void store_head(const Params& params, int64_t t, int64_t head,
                           const HeadResult& head_result) {
  params.lse(t, head) = head_result.lse;
  if (params.max_logits) params.max_logits(t, head) = head_result.max_logit;
}

template <int kHeads, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeads == 16 ? 2 : 1)
    attend(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeads, kHeadDim>*>(memory);
  const int64_t group = blockIdx.x % params.head_groups;
  const int64_t t = blockIdx.x / params.head_groups;
  const int64_t part = blockIdx.y;
  const int64_t first_head = group * kHeads;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const RowParts parts(params.segments[0].length(t), params.segments[1].length(t),
                       params.num_parts);
  // An empty row has no part; its first block writes the zeros.
  if (part >= parts.num_parts && part > 0) return;
  const int64_t end_block = parts.num_parts > 0 ? parts.first_block(part + 1) : 0;
  load_queries(params, t, first_head, shared);
  for (int h = threadIdx.x; h < kHeads; h += kThreads) {
    shared.largest[h] = kNegInf;
    shared.sum[h] = 0;
    shared.shrink[h] = 1;
  }
  MmaC values[kHeads / 16][kChannelsPerWarp / 8] = {};
  const int64_t begin_block = parts.num_parts > 0 ? parts.first_block(part) : 0;
  uint8_t* const staging = memory + sizeof(SharedMemory<kHeads, kHeadDim>);
  const auto find_rows = [&](int64_t block) {
    if (threadIdx.x < kKeys && block < end_block) {
      shared.rows[block % 3][threadIdx.x] =
          tile_at(params, parts, block).row(t, static_cast<int>(threadIdx.x));
    }
  };
  const auto stage = [&](int64_t block) {
    if (block >= end_block) return;
    const Segment& segment = *tile_at(params, parts, block).segment;
    if (segment.staged) stage_rows(segment, shared.rows[block % 3], staging);
  };
  find_rows(begin_block);
  find_rows(begin_block + 1);
  __syncthreads();
  stage(begin_block);
  for (int64_t block = begin_block; block < end_block; ++block) {
    const uint8_t* const* const rows = shared.rows[block % 3];
    cuda::wait_for_copies();
    __syncthreads();  // staged rows are there; the last tile's keys and weights are used up
    load_keys(*tile_at(params, parts, block).segment, rows, staging, shared);
    __syncthreads();
    stage(block + 1);
    find_rows(block + 2);
    multiply_keys(shared);
    __syncthreads();
    softmax(params, rows, shared);
    __syncthreads();
    add_values(shared, values);
  }
  __syncthreads();
  const bool final_result = parts.num_parts <= 1;
  if (threadIdx.x < kHeads && first_head + threadIdx.x < params.num_heads) {
    const int64_t head = first_head + threadIdx.x;
    const float largest = shared.largest[threadIdx.x];
    const float sum = shared.sum[threadIdx.x];
    if (final_result) {
      const HeadResult result = finish_head(params, head, largest, sum);
      store_head(params, t, head, result);
      shared.shrink[threadIdx.x] = result.factor;
    } else {
      params.part_state[(t * params.num_parts + part) * params.num_heads + head] =
          make_float2(largest, sum);
    }
  }
  __syncthreads();
  const int first_channel = warp * kChannelsPerWarp + 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_group = 16 * m + lane / 4 + 8 * half;
      const int64_t head = first_head + in_group;
      if (head >= params.num_heads) continue;
      const float factor = shared.shrink[in_group];
      const bool zero = final_result && factor == 0;
#pragma unroll
      for (int n = 0; n < kChannelsPerWarp / 8; ++n) {
        const float low = values[m][n].x[2 * half];
        const float high = values[m][n].x[2 * half + 1];
        const int channel = first_channel + 8 * n;
        if (final_result) {
          bf16_t* const to = params.out.row(t, head) + channel;
          const uint32_t pair = zero ? 0 : cuda::bf16_pair(factor * low, factor * high);
          if (params.out_aligned) {
            *reinterpret_cast<uint32_t*>(to) = pair;
          } else {
            to[0].bits = static_cast<uint16_t>(pair);
            to[1].bits = static_cast<uint16_t>(pair >> 16);
          }
        } else {
          float* const to = params.part_values +
                            ((t * params.num_parts + part) * params.num_heads + head) * kValueDim +
                            channel;
          *reinterpret_cast<float2*>(to) = make_float2(low, high);
        }
      }
    }
  }
}

constexpr int kFoldThreads = 128;

// The parts of one (row, head), in their order.
__global__ void __launch_bounds__(kFoldThreads) fold(const __grid_constant__ Params params) {
  const int64_t t = blockIdx.x / params.num_heads;
  const int64_t head = blockIdx.x % params.num_heads;
  const RowParts parts(params.segments[0].length(t), params.segments[1].length(t),
                       params.num_parts);
  if (parts.num_parts <= 1) return;
  const auto index = [&](int64_t part) {
    return (t * params.num_parts + part) * params.num_heads + head;
  };
  float largest = kNegInf;
  for (int64_t p = 0; p < parts.num_parts; ++p) {
    largest = fmaxf(largest, params.part_state[index(p)].x);
  }
  const auto weight = [&](int64_t p) {
    const float part_max = params.part_state[index(p)].x;
    return part_max == largest ? 1.0f : exp2f((part_max - largest) * 1.44269504f);
  };
  float sum = 0;
  for (int64_t p = 0; p < parts.num_parts; ++p) {
    sum = fmaf(params.part_state[index(p)].y, weight(p), sum);
  }
  const HeadResult result = finish_head(params, head, largest, sum);
  if (threadIdx.x == 0) store_head(params, t, head, result);
  for (int d = threadIdx.x; d < kValueDim; d += kFoldThreads) {
    float value = 0;
    for (int64_t p = 0; p < parts.num_parts; ++p) {
      value = fmaf(params.part_values[index(p) * kValueDim + d], weight(p), value);
    }
    params.out(t, head, d) = bf16_from_float(result.factor == 0 ? 0.0f : result.factor * value);
  }
}

// The largest group of heads that the device has shared memory for.
int heads_per_block(const SparseMlaProblem& problem, const Device& device) {
  const int64_t shared_bytes = cuda::device_facts(device.ordinal).max_shared_bytes;
  if (problem.num_heads > 32 && shared_bytes >= int64_t{sizeof(SharedMemory<64, 576>)}) return 64;
  if (problem.num_heads > 16 && shared_bytes >= int64_t{sizeof(SharedMemory<32, 576>)}) return 32;
  return 16;
}

// Enough blocks for two rounds over the multiprocessors, from the bound of the rows alone.
int64_t parts_of(const SparseMlaProblem& problem, const Device& device) {
  const int64_t blocks = RowParts(problem.topk, problem.extra_topk, 1).num_blocks;
  if (problem.fixed_splits > 0) return std::max<int64_t>(1, std::min(problem.fixed_splits, blocks));
  const int64_t groups =
      (problem.num_heads + heads_per_block(problem, device) - 1) / heads_per_block(problem, device);
  const int64_t wanted = 2 * cuda::device_facts(device.ordinal).num_sms /
                         std::max<int64_t>(1, problem.max_rows * groups);
  return std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(blocks / 2, 1, kMaxParts));
}

struct PartMemory {
  float* values = nullptr;
  float2* state = nullptr;

  PartMemory(const SparseMlaProblem& problem, int64_t parts, WorkspaceCutter& cutter) {
    if (parts <= 1) return;
    const int64_t pieces = problem.max_rows * parts * problem.num_heads;
    values = cutter.take<float>(pieces * kValueDim);
    state = cutter.take<float2>(pieces);
  }
};

Segment device_segment(const SparseMlaSegment& from, bool has_staging) {
  Segment to{};
  to.base = from.base;
  to.num_pages = from.num_pages;
  to.page_size = from.page_size;
  to.page_stride_bytes = from.page_stride_bytes;
  to.row_bytes = from.row_bytes;
  to.format = from.format;
  to.aligned = reinterpret_cast<uintptr_t>(from.base) % 16 == 0 &&
               from.page_stride_bytes % 16 == 0 && from.row_bytes % 16 == 0;
  to.staged = has_staging && to.aligned && from.format != RowFormat::kBf16;
  to.indices = from.indices.data;
  to.index_stride = from.indices.stride[0];
  to.width = from.indices ? from.indices.shape[1] : 0;
  to.topk_length = from.topk_length.data;
  return to;
}

// Shared memory of a block without the staging area.
size_t shared_bytes(int heads) {
  if (heads == 64) return sizeof(SharedMemory<64, 576>);
  return heads == 32 ? sizeof(SharedMemory<32, 576>) : sizeof(SharedMemory<16, 576>);
}

template <int kHeads>
void launch_attend(const SparseMlaProblem& problem, const Params& params, size_t staging_bytes,
                   Stream stream) {
  const dim3 grid(static_cast<unsigned>(params.num_rows * params.head_groups),
                  static_cast<unsigned>(params.num_parts));
  if (problem.head_dim_qk == 576) {
    cuda::launch("sparse_mla", attend<kHeads, 576>,
                 {grid, dim3(kThreads), sizeof(SharedMemory<kHeads, 576>) + staging_bytes}, stream,
                 params);
  } else {
    cuda::launch("sparse_mla", attend<kHeads, 512>,
                 {grid, dim3(kThreads), sizeof(SharedMemory<kHeads, 512>) + staging_bytes}, stream,
                 params);
  }
}

}  // namespace

Refusal sparse_mla_cuda_supports(const SparseMlaProblem& problem) {
  if (problem.num_heads > 128) {
    return "takes at most 128 heads, got " + std::to_string(problem.num_heads);
  }
  return {};
}

size_t sparse_mla_cuda_workspace(const SparseMlaProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  PartMemory(problem, parts_of(problem, device), cutter);
  return cutter.used_bytes();
}

void sparse_mla_cuda_portable(const SparseMlaProblem& problem, const Device& device,
                              const SparseMlaTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const int heads = heads_per_block(problem, device);
  WorkspaceCutter cutter(workspace);
  Params params{};
  params.q = tensors.q.data;
  params.q_is_fp8 = tensors.q.dtype == DType::kU8;
  params.q_aligned = !params.q_is_fp8 && cuda::is_aligned(tensors.q.data, 16) &&
                     tensors.q.stride[0] % 8 == 0 && tensors.q.stride[1] % 8 == 0;
  params.q_row_stride = tensors.q.stride[0];
  params.q_head_stride = tensors.q.stride[1];
  const bool has_staging = static_cast<int64_t>(shared_bytes(heads)) + kStagingBytes <=
                           cuda::device_facts(device.ordinal).max_shared_bytes;
  params.segments[0] = device_segment(primary_segment(problem, tensors), has_staging);
  params.segments[1] = device_segment(extra_segment(problem, tensors), has_staging);
  const size_t staging_bytes =
      params.segments[0].staged || params.segments[1].staged ? kStagingBytes : 0;
  params.sink = static_cast<const float*>(tensors.sink.data);
  params.out = access<bf16_t, 3>(tensors.out);
  params.out_aligned = cuda::is_aligned(tensors.out.data, 4) && params.out.stride[0] % 2 == 0 &&
                       params.out.stride[1] % 2 == 0;
  params.lse = access<float, 2>(tensors.lse);
  params.max_logits = access<float, 2>(tensors.max_logits);
  params.num_rows = tensors.q.shape[0];
  params.num_heads = problem.num_heads;
  params.head_groups = (problem.num_heads + heads - 1) / heads;
  params.num_parts = parts_of(problem, device);
  params.logit_scale = static_cast<float>(logit_scale(problem));
  params.logit_cap = problem.logit_cap;
  params.value_scale = problem.k_scale;
  params.empty_lse = problem.empty_lse == EmptyLse::kPosInf ? -kNegInf : kNegInf;
  const PartMemory memory(problem, params.num_parts, cutter);
  params.part_values = memory.values;
  params.part_state = memory.state;
  if (heads == 64) {
    launch_attend<64>(problem, params, staging_bytes, stream);
  } else if (heads == 32) {
    launch_attend<32>(problem, params, staging_bytes, stream);
  } else {
    launch_attend<16>(problem, params, staging_bytes, stream);
  }
  if (params.num_parts > 1) {
    cuda::launch(
        "sparse_mla", fold,
        {dim3(static_cast<unsigned>(params.num_rows * params.num_heads)), dim3(kFoldThreads)},
        stream, params);
  }
}

}  // namespace fovea::internal
