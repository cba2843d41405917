#pragma once

#include <cstdint>
#include <limits>

#include "fovea/dtype.h"
#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/mma.cuh"
#include "src/core/sink.h"
#include "src/core/workspace.h"
#include "src/mla/cuda/latent_keys.cuh"

// What sparse_mla and dense_mla share on GPUs. A block of 8 warps takes kHeads heads of one row and
// one part of its keys, 64 at a time. Each tile of 16 heads belongs to a team of 8 / (kHeads / 16)
// warps, which after the keys have come wait for each other only:
//
//   fetch   bf16 rows of the next tile travel to a ring of 112 rows in shared memory while this
//           tile is computed, the last 16 of them when the first 16 of this tile are used up;
//           packed rows of the next tile travel to a staging area in the same place
//   keys    bf16 [64, Dqk] in shared memory, zeros where a key is absent
//   logits  Q [kHeads, Dqk] x K^T on tensor cores; the warps of a team share out the keys
//   softmax running maximum and sum of each head, 256 / kHeads threads a head; weights are rounded
//           to bf16, their sum is not
//   values  P [kHeads, 64] x K[:, 0:512]; the warps of a team share out the channels, in registers
//
// Shared memory decides how many heads a block takes: 165 KiB for 64, 120 for 32, 97 for 16, and 55
// for the ring or 41 for the staging area where they fit. With one part a block writes the result,
// otherwise the blocks of a cluster or a second launch fold the parts in their order.
namespace fovea::internal::latent {

using cuda::MmaA;
using cuda::MmaB;
using cuda::MmaC;

inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();

struct Scores {
  float logit_scale;  // softmax_scale * q_scale * k_scale
  float logit_cap;    // 0: none
};

struct Outputs {
  const float* sink;  // may be null
  Accessor<bf16_t, 3> out;
  Accessor<float, 2> lse;
  Accessor<float, 2> max_logits;  // may be absent
  bool out_aligned;               // every second channel at a multiple of 4 bytes
  int64_t num_heads;
  int64_t num_parts;
  float value_scale;  // k_scale
  float empty_lse;
  // Of several parts: unnormalised sums [T, parts, H, 512], largest logit and sum of weights.
  float* part_values;
  float2* part_state;

  __device__ int64_t part_index(int64_t t, int64_t part, int64_t head) const {
    return (t * num_parts + part) * num_heads + head;
  }
};

// logits[head][key] = dot(q, k), not yet scaled, of the team's heads.
template <int kHeads, int kHeadDim>
__device__ __forceinline__ void multiply_keys(const Team<kHeads>& team, int first,
                                              SharedMemory<kHeads, kHeadDim>& shared) {
  constexpr int kStride = row_stride(kHeadDim);
  constexpr int kKeyTiles = kKeys / 8 / Team<kHeads>::kWarpsOfTile;  // groups of 8 keys a warp
  const int lane = threadIdx.x % 32;
  const int first_key = team.member * kKeyTiles * 8;
  const bf16_t* const q = shared.q[team.first_head()];
  // Sixteen keys are neighbours in the ring.
  const bf16_t* k[(kKeyTiles + 1) / 2];
#pragma unroll
  for (int n = 0; n < kKeyTiles; n += 2) k[n / 2] = shared.ring_row(first, first_key + 8 * n);
  MmaC sums[kKeyTiles] = {};
#pragma unroll 18
  for (int d = 0; d < kHeadDim; d += 32) {
    const MmaA a0 = cuda::load_a(q + d, kStride);
    const MmaA a1 = cuda::load_a(q + d + 16, kStride);
    MmaB b0[kKeyTiles], b1[kKeyTiles];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      cuda::load_b_transposed_deep(k[n / 2] + n % 2 * 8 * kStride + d, kStride, b0[n], b1[n]);
    }
    // One sum after the other, so that no product waits for the last one.
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) cuda::mma(sums[n], a0, b0[n]);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) cuda::mma(sums[n], a1, b1[n]);
  }
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
    const int key = first_key + 8 * n + 2 * (lane % 4);
    const int head = team.first_head() + lane / 4;
    *reinterpret_cast<float2*>(shared.logits(head) + key) = make_float2(sums[n].x[0], sums[n].x[1]);
    *reinterpret_cast<float2*>(shared.logits(head + 8) + key) =
        make_float2(sums[n].x[2], sums[n].x[3]);
  }
}

// A call, because tanh would fill the instruction cache of a loop that rarely needs it.
static __device__ __noinline__ float capped(float logit, float cap) {
  return cap * tanhf(logit / cap);
}

// Weights of the tile and the state of each head. A NaN logit does not become the maximum; it makes
// its own weight NaN, and with it the head's sum.
template <int kHeads, int kHeadDim>
__device__ __forceinline__ void softmax(const Team<kHeads>& team, const Scores& scores,
                                        const uint32_t (&present)[kKeys / 32],
                                        SharedMemory<kHeads, kHeadDim>& shared) {
  constexpr int kHeadThreads = kThreads / kHeads;  // neighbours in a warp
  constexpr int kQuads = kKeys / 4 / kHeadThreads;
  constexpr float kLog2E = 1.44269504f;
  const int lane = threadIdx.x % 32;
  const int head = team.first_head() + (team.member * 32 + lane) / kHeadThreads;
  const int first_key = lane % kHeadThreads * 4;
  float logit[kQuads][4];
  float tile_max = kNegInf;
#pragma unroll
  for (int n = 0; n < kQuads; ++n) {
    const int key = first_key + 4 * kHeadThreads * n;
    const float4 dots = *reinterpret_cast<const float4*>(shared.logits(head) + key);
    const float dot[4] = {dots.x, dots.y, dots.z, dots.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) logit[n][i] = scores.logit_scale * dot[i];
  }
  if (scores.logit_cap > 0) {
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logit[n][i] = capped(logit[n][i], scores.logit_cap);
    }
  }
  if ((present[0] & present[1]) != 0xFFFFFFFF) {
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const int key = first_key + 4 * kHeadThreads * n;
      const uint32_t bits = present[key / 32] >> key % 32;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((bits >> i & 1) == 0) logit[n][i] = kNegInf;
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
  // Without any weight so far, -inf - -inf must not become NaN; a NaN logit must stay one.
  const float reference = largest == kNegInf ? 0.0f : largest;
  float quad_sum[kQuads];
  __syncwarp();  // the weights take the place of the logits
#pragma unroll
  for (int n = 0; n < kQuads; ++n) {
    float weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = cuda::exp2_fast((logit[n][i] - reference) * kLog2E);
      weights[i] = weight;
      quad_sum[n] = i == 0 ? weight : quad_sum[n] + weight;
    }
    *reinterpret_cast<uint2*>(shared.weights(head) + first_key + 4 * kHeadThreads * n) = make_uint2(
        cuda::bf16_pair(weights[0], weights[1]), cuda::bf16_pair(weights[2], weights[3]));
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
  if (lane % kHeadThreads == 0) {
    const float shrink = before == largest ? 1.0f : exp2f((before - largest) * kLog2E);
    shared.largest[head] = largest;
    shared.shrink[head] = shrink;
    shared.sum[head] = fmaf(shared.sum[head], shrink, sum);
  }
}

// values[n] of the warp's channels: shrunk, plus the tile's weights times its keys. Calls
// after_first() when the first 16 keys are used up.
template <int kHeads, int kHeadDim, class AfterFirst>
__device__ __forceinline__ void add_values(const Team<kHeads>& team, int first,
                                           const AfterFirst& after_first,
                                           SharedMemory<kHeads, kHeadDim>& shared,
                                           Values<kHeads>& values) {
  constexpr int kStride = row_stride(kHeadDim);
  constexpr int kTiles = Team<kHeads>::kChannels / 8;
  const int lane = threadIdx.x % 32;
  const int first_channel = team.member * Team<kHeads>::kChannels;
  const float low = shared.shrink[team.first_head() + lane / 4];
  const float high = shared.shrink[team.first_head() + lane / 4 + 8];
  // Mostly no maximum has changed.
  if (!__all_sync(0xFFFFFFFF, low == 1 && high == 1)) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      values[n].x[0] *= low;
      values[n].x[1] *= low;
      values[n].x[2] *= high;
      values[n].x[3] *= high;
    }
  }
  const bf16_t* const weights = shared.weights(team.first_head());
#pragma unroll 2
  for (int key = 0; key < kKeys; key += 16) {
    const MmaA a = cuda::load_a(weights + key, kWeightStride);
    const bf16_t* const k = shared.ring_row(first, key) + first_channel;
    // Four sums in turn, so that no product waits for the last one.
#pragma unroll
    for (int n = 0; n < kTiles; n += 4) {
      MmaB b[4];
      cuda::load_b(k + 8 * n, kStride, b[0], b[1]);
      cuda::load_b(k + 8 * n + 16, kStride, b[2], b[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) cuda::mma(values[n + i], a, b[i]);
    }
    if (key == 0) after_first();
  }
}

// What is left of a head: lse and the factor that its sums are multiplied with.
struct HeadResult {
  float lse;
  float max_logit;
  float factor;
};

__device__ inline HeadResult finish_head(const Outputs& outputs, int64_t head, float largest,
                                         float sum) {
  if (largest == kNegInf && !isnan(sum)) return {outputs.empty_lse, kNegInf, 0.0f};
  const float lse = largest + logf(sum);
  const float left = outputs.sink != nullptr ? sink_factor(outputs.sink[head], lse) : 1.0f;
  return {lse, isnan(lse) ? lse : largest, left * outputs.value_scale / sum};
}

__device__ inline void store_head(const Outputs& outputs, int64_t t, int64_t head,
                                  const HeadResult& head_result) {
  outputs.lse(t, head) = head_result.lse;
  if (outputs.max_logits) outputs.max_logits(t, head) = head_result.max_logit;
}

template <int kHeads, int kHeadDim>
__device__ void clear_state(SharedMemory<kHeads, kHeadDim>& shared) {
  for (int h = threadIdx.x; h < kHeads; h += kThreads) {
    shared.largest[h] = kNegInf;
    shared.sum[h] = 0;
    shared.shrink[h] = 1;
  }
}

// Attends to the blocks [begin_block, end_block) of 64 keys. `keys` knows the place(block, key) of
// every key, which takes a read of a table, its row(block, key, place), null where it is absent,
// and the layout(block) of each block's rows. Keys with kHasScales have `scales`, KeyScales whose
// from[key] row() sets; with others it is NoScales. With `ring` all rows are aligned bf16 and the
// ring has its place behind `shared`. Begins and ends without a barrier.
template <int kHeads, int kHeadDim, class Keys>
__device__ __forceinline__ void attend_blocks(const Keys& keys, bool ring, int64_t begin_block,
                                              int64_t end_block, const Scores& scores,
                                              SharedMemory<kHeads, kHeadDim>& shared,
                                              Values<kHeads>& values) {
  const Team<kHeads> team;
  auto* const staging = reinterpret_cast<uint8_t*>(&shared + 1);
  const int key = static_cast<int>(threadIdx.x);
  // Of whole warps.
  const auto finds = [&](int64_t block) { return key < kKeys && block < end_block; };
  const auto stage = [&](int64_t block) {
    if (block >= end_block) return;
    const RowLayout& layout = keys.layout(block);
    if (layout.staged) stage_rows(layout, shared.rows[block % 3], staging);
  };
  const auto set_row = [&](int64_t block, int32_t place) {
    const uint8_t* const row = keys.row(block, key, place);
    const uint32_t present = __ballot_sync(0xFFFFFFFF, row != nullptr);
    shared.rows[block % 3][key] = row;
    if (key % 32 == 0) shared.present[block % 3][key / 32] = present;
  };
  // The thread's key of a block whose row it has found last; read by load_keys.
  const auto ask = [&](int64_t block) {
    if constexpr (Keys::kHasScales) {
      if (finds(block)) return ask_scales(keys.layout(block), keys.scales.from[key]);
    }
    return AskedScales{};
  };
  const auto keep = [&](int64_t block, const AskedScales& asked) {
    if constexpr (Keys::kHasScales) {
      if (finds(block)) keys.scales.of_key[key] = joined_scales(keys.layout(block), asked);
    }
  };
  AskedScales first_asked;
  for (int64_t block = begin_block; block < begin_block + 2; ++block) {
    if (finds(block)) set_row(block, keys.place(block, key));
    if (block == begin_block) first_asked = ask(block);
  }
  __syncthreads();
  int first = 0;  // row of the ring where the tile starts
  if (ring) {
    if (begin_block < end_block) fetch_rows<0, kKeys>(shared.rows[begin_block % 3], first, shared);
  } else {
    stage(begin_block);
  }
  keep(begin_block, first_asked);
  for (int64_t block = begin_block; block < end_block; ++block) {
    const uint8_t* const* const rows = shared.rows[block % 3];
    const uint8_t* const* const next_rows = shared.rows[(block + 1) % 3];
    const bool fetches = ring && block + 1 < end_block;
    const int next = first + kKeys < kRingKeys ? first + kKeys : first + kKeys - kRingKeys;
    cuda::wait_for_copies();
    __syncthreads();  // fetched rows are there; the last tile's keys and weights are used up
    if (!ring) {
      load_keys(keys.layout(block), rows, staging, keys.scales, shared);
      __syncthreads();
      stage(block + 1);
    } else if (fetches) {
      fetch_rows<0, kAheadKeys>(next_rows, next, shared);
    }
    // Asked for before the products and looked at after them.
    const int32_t place = finds(block + 2) ? keys.place(block + 2, key) : -1;
    const AskedScales asked = ask(block + 1);
    multiply_keys(team, first, shared);
    keep(block + 1, asked);
    if (finds(block + 2)) set_row(block + 2, place);
    team.sync();
    softmax(team, scores, shared.present[block % 3], shared);
    team.sync();
    const auto after_first = [&] {
      if (!fetches) return;
      __syncthreads();
      fetch_rows<kAheadKeys, kKeys>(next_rows, next, shared);
    };
    add_values(team, first, after_first, shared, values);
    if (ring) first = next;
  }
}

// The inverse rotation of a row: pairs of its last channels, turned back by an angle each.
struct RowTurn {
  static constexpr bool kTurns = true;
  const float* rotation;  // cosines, then sines; null: none
  int rope_dim;

  // The channels `channel`, an even one, and the next, both multiplied with all factors.
  __device__ float2 operator()(int channel, float x, float y) const {
    const int first = kValueDim - rope_dim;
    if (rotation == nullptr || channel < first) return make_float2(x, y);
    const float cosine = rotation[(channel - first) / 2];
    const float sine = rotation[(channel - first + rope_dim) / 2];
    return make_float2(x * cosine + y * sine, y * cosine - x * sine);
  }
};

struct NoTurn {
  static constexpr bool kTurns = false;
  __device__ float2 operator()(int, float x, float y) const { return make_float2(x, y); }
};

// The heads [first_head, end_head) of row t: results when the row has one part, otherwise what
// `part` of it has, to the workspace.
template <int kHeads, int kHeadDim, class Turn>
__device__ void store_part(const Outputs& outputs, int64_t t, int64_t first_head, int64_t end_head,
                           int64_t part, bool is_result, const Turn& turn,
                           SharedMemory<kHeads, kHeadDim>& shared, const Values<kHeads>& values) {
  const Team<kHeads> team;
  const int lane = threadIdx.x % 32;
  __syncthreads();
  if (threadIdx.x < kHeads && first_head + threadIdx.x < end_head) {
    const int64_t head = first_head + threadIdx.x;
    const float largest = shared.largest[threadIdx.x];
    const float sum = shared.sum[threadIdx.x];
    if (is_result) {
      const HeadResult result = finish_head(outputs, head, largest, sum);
      store_head(outputs, t, head, result);
      shared.shrink[threadIdx.x] = result.factor;
    } else {
      outputs.part_state[outputs.part_index(t, part, head)] = make_float2(largest, sum);
    }
  }
  __syncthreads();
  const int first_channel = team.member * Team<kHeads>::kChannels + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int in_group = team.first_head() + lane / 4 + 8 * half;
    const int64_t head = first_head + in_group;
    if (head >= end_head) continue;
    const float factor = shared.shrink[in_group];
    const bool zero = is_result && factor == 0;
#pragma unroll
    for (int n = 0; n < Team<kHeads>::kChannels / 8; ++n) {
      const float low = values[n].x[2 * half];
      const float high = values[n].x[2 * half + 1];
      const int channel = first_channel + 8 * n;
      if (is_result) {
        bf16_t* const to = outputs.out.row(t, head) + channel;
        const auto turned_pair = [&] {
          const float2 turned = turn(channel, factor * low, factor * high);
          return cuda::bf16_pair(turned.x, turned.y);
        };
        const uint32_t pair = zero ? 0 : turned_pair();
        if (outputs.out_aligned) {
          *reinterpret_cast<uint32_t*>(to) = pair;
        } else {
          to[0].bits = static_cast<uint16_t>(pair);
          to[1].bits = static_cast<uint16_t>(pair >> 16);
        }
      } else {
        float* const to =
            outputs.part_values + outputs.part_index(t, part, head) * kValueDim + channel;
        *reinterpret_cast<float2*>(to) = make_float2(low, high);
      }
    }
  }
}

inline constexpr int kFoldThreads = kValueDim / 4;

// The parts of one (row, head), in their order, by kFoldThreads threads, of which this is number
// `thread`; all warps whole.
template <class Turn>
__device__ inline void fold_head(const Outputs& outputs, int64_t t, int64_t head, int64_t num_parts,
                                 const Turn& turn, int thread) {
  constexpr int kWarpParts = 32, kAhead = 16;
  const auto state = [&](int64_t p) {
    return p < num_parts ? outputs.part_state[outputs.part_index(t, p, head)]
                         : make_float2(kNegInf, 0);
  };
  const int lane = thread % 32, d = 4 * thread;
  const float* from = outputs.part_values + outputs.part_index(t, 0, head) * kValueDim + d;
  const int64_t part_stride = outputs.num_heads * kValueDim;
  float2 own;
  float largest = kNegInf, sum = 0;
  float4 value = make_float4(0, 0, 0, 0);
#pragma unroll 1
  for (int64_t first = 0; first < num_parts; first += kAhead) {
    const auto left = static_cast<int>(num_parts - first);
    // Reads that nobody waits for yet, as many as most plans have parts.
    float4 add[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < left) add[i] = *reinterpret_cast<const float4*>(from);
      from += part_stride;
    }
    if (first % kWarpParts == 0) own = state(first + lane);
    if (first == 0) {
      largest = own.x;
#pragma unroll 1
      for (int64_t p = lane + kWarpParts; p < num_parts; p += kWarpParts)
        largest = fmaxf(largest, state(p).x);
#pragma unroll
      for (int apart = kWarpParts / 2; apart > 0; apart /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, apart));
    }
    const float own_weight = own.x == largest ? 1.0f : exp2f((own.x - largest) * 1.44269504f);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = static_cast<int>(first % kWarpParts) + i;
      const float weight = __shfl_sync(0xFFFFFFFF, own_weight, at);
      const float part_sum = __shfl_sync(0xFFFFFFFF, own.y, at);
      if (i >= left) continue;
      sum = fmaf(part_sum, weight, sum);
      value.x = fmaf(add[i].x, weight, value.x);
      value.y = fmaf(add[i].y, weight, value.y);
      value.z = fmaf(add[i].z, weight, value.z);
      value.w = fmaf(add[i].w, weight, value.w);
    }
  }
  const HeadResult result = finish_head(outputs, head, largest, sum);
  if (thread == 0) store_head(outputs, t, head, result);
  bf16_t* const to = outputs.out.row(t, head) + d;
  const auto pair_of = [&](int i, float x, float y) {
    const float2 pair =
        result.factor == 0 ? make_float2(0, 0) : turn(d + i, result.factor * x, result.factor * y);
    return cuda::bf16_pair(pair.x, pair.y);
  };
  const uint32_t pairs[2] = {pair_of(0, value.x, value.y), pair_of(2, value.z, value.w)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (outputs.out_aligned) {
      if (i % 2 == 0) *reinterpret_cast<uint32_t*>(to + i) = pairs[i / 2];
    } else {
      to[i].bits = static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16));
    }
  }
}

// Memory of the parts; none for one part.
struct PartMemory {
  float* values = nullptr;
  float2* state = nullptr;

  PartMemory(int64_t rows, int64_t heads, int64_t parts, WorkspaceCutter& cutter) {
    if (parts <= 1) return;
    const int64_t pieces = rows * parts * heads;
    values = cutter.take<float>(pieces * kValueDim);
    state = cutter.take<float2>(pieces);
  }
};

// Shared memory of a block without ring and staging area.
inline int64_t shared_bytes(int heads) {
  if (heads == 64) return sizeof(SharedMemory<64, 576>);
  return heads == 32 ? sizeof(SharedMemory<32, 576>) : sizeof(SharedMemory<16, 576>);
}

// Whether a block has room for rows of the next tile. In a ring only where it costs no block of its
// multiprocessor: two with 16 heads hide each other's fetches.
inline bool has_staging(int heads, int64_t max_shared_bytes) {
  return shared_bytes(heads) + kStagingBytes <= max_shared_bytes;
}
inline bool has_ring(int heads, int64_t max_shared_bytes) {
  return heads > 16 && shared_bytes(heads) + ahead_bytes(576) <= max_shared_bytes;
}

template <int kHeads, int kHeadDim>
size_t block_bytes(bool ring, bool stages) {
  return sizeof(SharedMemory<kHeads, kHeadDim>) + (ring     ? ahead_bytes(kHeadDim)
                                                   : stages ? kStagingBytes
                                                            : 0);
}

// The largest group of heads that a device has shared memory for.
inline int heads_per_block(int64_t num_heads, int64_t max_shared_bytes) {
  if (num_heads > 32 && max_shared_bytes >= shared_bytes(64)) return 64;
  return num_heads > 16 && max_shared_bytes >= shared_bytes(32) ? 32 : 16;
}

inline Queries device_queries(const ConstTensorView& q) {
  Queries queries{};
  queries.data = q.data;
  queries.is_fp8 = q.dtype == DType::kU8;
  queries.aligned = !queries.is_fp8 && cuda::is_aligned(q.data, 16) && q.stride[0] % 8 == 0 &&
                    q.stride[1] % 8 == 0;
  queries.row_stride = q.stride[0];
  queries.head_stride = q.stride[1];
  return queries;
}

inline bool pairs_are_aligned(const Accessor<bf16_t, 3>& out) {
  return cuda::is_aligned(out.data, 4) && out.stride[0] % 2 == 0 && out.stride[1] % 2 == 0;
}

}  // namespace fovea::internal::latent
