#pragma once

#include <cstdint>

#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/mma_tf32.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/kda/cuda/kda_prepare.cuh"
#include "src/kda/cuda/kda_states.cuh"

/// Second half of a prefill: the chain over a sequence's tiles, one block per sequence, value head
/// and slice of V (columns of V do not know of one another).
///
/// | warps             | work                                                                    |
/// |-------------------|-------------------------------------------------------------------------|
/// | 0 .. kV / 16 - 1  | 16 rows of the state (V) each, all K channels, in registers             |
/// | the K / 32 behind | the next tile into shared memory: decayed q and k, X, P, v              |
///
/// With the state as S^T [V, K], the products of a tile are
///
///   R^T = V^T - S^T Kd^T         Kd = k exp2(G)
///   U^T = R^T (X diag(beta))^T
///   O^T = S^T Qd^T + U^T P^T     Qd = scale q exp2(G)
///   S^T <- S^T diag(exp2(G_last)) + U^T Kr     Kr = k exp2(G_last - G)
///
/// Each result is the left operand of a later product and stays in the registers of its warp: a sum
/// over columns may take them in any order, so columns are numbered as a lane holds them
/// (mma_tf32.cuh). Thereby a lane's right operands of two steps are four neighbours in shared
/// memory. tf32 operands: the state's limit of 1e-3 is out of reach of bf16.
///
/// Tokens with one key cancel in the sum over U, and what a fresh state keeps of them is as small
/// as one of their values; so U enters the state in two parts (tf32 and what that leaves), and X is
/// split likewise: an error of its entries would meet the sum of all R, not their difference.
namespace fovea::internal::cuda {

struct ChainParams {
  KdaInput input;
  Accessor<bf16_t, 3> out;
  SequenceTable table;
  TileRecords records;
  PrefillTargets targets;
  int64_t num_sequences;
  int slices;  // of V
  bool pairs_aligned;
  bool v_aligned;    // rows of v start at multiples of 16 bytes
  bool out_aligned;  // the same of out
};

// Rows are 16 words mod 32 apart: two rows of four lanes of 16 bytes fill the banks.
template <int kK, int kV>
struct ChainStage {
  float k_in[kTileRows][kK + 16];  // Kd
  float q_in[kTileRows][kK + 16];  // Qd
  float k_out[kK][kTileRows];      // Kr^T; words of 4 tokens stand at swizzled()
  float decay[kK];                 // exp2(G_last)
  float x[kTileRows][kTileRows];
  float p[kTileRows][kTileRows];
  bf16_t v[kTileRows][kV + 8];
};

// What a block works on. Consumers read it where they need it: beside the state, registers are few.
struct __align__(16) ChainPlace {
  int n, hv, v_begin, first_row;
};

template <int kK, int kV>
struct ChainMemory {
  ChainStage<kK, kV> stages[2];
  ChainPlace place;
  bf16_t out[kV / 16][kTileRows][16];  // of a warp, for whole stores
};

// Place of the four tokens 4 quad .. + 3 of a channel.
__device__ inline int swizzled(int channel, int quad) { return 4 * (quad ^ (channel >> 2 & 3)); }

// Numbering of tokens: column `slot` of the u-th 8 columns of a product.
__device__ inline int token_of(int u, int slot) { return 4 * (slot >> 1) + 2 * u + (slot & 1); }
// The same of channels, for the t-th 8 columns of the state.
__device__ inline int channel_of(int t, int slot) {
  return 16 * (t >> 1) + 4 * (slot >> 1) + 2 * (t & 1) + (slot & 1);
}

// ---- producers ----

// i is known at compile time.
__device__ inline float element_of(const float4& word, int i) {
  return i == 0 ? word.x : i == 1 ? word.y : i == 2 ? word.z : word.w;
}

// What a producer thread holds of a tile: two channels of 8 rows. Rows past the end hold the last
// one; they become zeros when they are stored, since a choice would wait for what is loaded.
template <int kK, int kV>
struct RawTile {
  static constexpr int kThreads = kK;
  static constexpr int kVectors = (kTileRows * kV / 8 + kThreads - 1) / kThreads;
  static constexpr int kEntries = 2 * kTileRows * kTileRows / 4 / kThreads;
  int count;  // rows that there are, of kTileRows
  uint32_t q[8], k[8];
  float2 g[8], last;
  float4 q_factor[2], k_factor[2];
  float4 entries[kEntries];  // of X, then P
  uint4 v[kVectors];
};

template <int kK, int kV>
struct Producer {
  const ChainParams& params;
  int64_t first_row, end_row;  // of the sequence
  int64_t first_record;
  int head, hv, v_begin;
  int thread;

  __device__ int channel() const { return 2 * (thread % (kK / 2)); }
  __device__ int first_token() const { return thread / (kK / 2) * 8; }

  __device__ void load(int tile, RawTile<kK, kV>& raw) const {
    using Raw = RawTile<kK, kV>;
    const int64_t record = first_record + int64_t{tile} * params.input.value_heads;
    const int64_t t0 = first_row + int64_t{tile} * kTileRows;
    raw.count = end_row - t0 < kTileRows ? static_cast<int>(end_row - t0) : kTileRows;
    // One branch for all rows: behind one of its own every load would wait for the one before.
    if (params.pairs_aligned) {
      load_pairs<true>(t0, raw);
    } else {
      load_pairs<false>(t0, raw);
    }
    const float* const g =
        params.records.g_sum + record * kTileRows * kK + first_token() * kK + channel();
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      raw.g[row] = *reinterpret_cast<const float2*>(g + row * kK);
    }
    const float* const factor = params.records.factor + record * 2 * kTileRows + first_token();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raw.q_factor[half] = *reinterpret_cast<const float4*>(factor + 4 * half);
      raw.k_factor[half] = *reinterpret_cast<const float4*>(factor + kTileRows + 4 * half);
    }
    raw.last = *reinterpret_cast<const float2*>(params.records.g_sum + record * kTileRows * kK +
                                                (kTileRows - 1) * kK + channel());
#pragma unroll
    for (int e = 0; e < Raw::kEntries; ++e) {
      const int at = 4 * (thread + e * Raw::kThreads);
      constexpr int kMatrix = kTileRows * kTileRows;
      const float* const from = at < kMatrix ? params.records.x + record * kMatrix + at
                                             : params.records.p + record * kMatrix + at - kMatrix;
      raw.entries[e] = *reinterpret_cast<const float4*>(from);
    }
    if (params.v_aligned) {
#pragma unroll
      for (int e = 0; e < Raw::kVectors; ++e) {
        raw.v[e] = *reinterpret_cast<const uint4*>(values(t0, raw.count, e));
      }
    } else {
#pragma unroll
      for (int e = 0; e < Raw::kVectors; ++e) {
        const bf16_t* const from = values(t0, raw.count, e);
        raw.v[e] = make_uint4(load_pair(from, false), load_pair(from + 2, false),
                              load_pair(from + 4, false), load_pair(from + 6, false));
      }
    }
  }

  template <bool kAligned>
  __device__ void load_pairs(int64_t t0, RawTile<kK, kV>& raw) const {
    const KdaInput& input = params.input;
    // Addresses by row, not step by step: a step that is left out past the end makes the compiler
    // keep the row before, and wait for it.
    const bf16_t* const q = input.q.row(t0, head) + channel();
    const bf16_t* const k = input.k.row(t0, head) + channel();
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const int64_t token = min(first_token() + row, raw.count - 1);
      raw.q[row] = load_pair(q + token * input.q.stride[0], kAligned);
      raw.k[row] = load_pair(k + token * input.k.stride[0], kAligned);
    }
  }

  // Unit e of the thread, 8 columns of a row that there is.
  __device__ const bf16_t* values(int64_t t0, int count, int e) const {
    constexpr int kUnits = kTileRows * kV / 8;
    const int unit = min(thread + e * RawTile<kK, kV>::kThreads, kUnits - 1);
    return params.input.v.row(t0 + min(unit / (kV / 8), count - 1), hv) + v_begin +
           unit % (kV / 8) * 8;
  }

  __device__ void store(const RawTile<kK, kV>& raw, ChainStage<kK, kV>& stage) const {
    using Raw = RawTile<kK, kV>;
    const int c = channel();
    float out_x[8], out_y[8];
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const int token = first_token() + row;
      const uint32_t k = token < raw.count ? raw.k[row] : 0;
      const uint32_t q = token < raw.count ? raw.q[row] : 0;
      const float k_factor = element_of(raw.k_factor[row / 4], row % 4);
      const float q_factor = element_of(raw.q_factor[row / 4], row % 4);
      const float kx = low_of(k) * k_factor, ky = high_of(k) * k_factor;
      const float qx = low_of(q) * q_factor, qy = high_of(q) * q_factor;
      const float in_x = exp2_fast(raw.g[row].x), in_y = exp2_fast(raw.g[row].y);
      *reinterpret_cast<float2*>(&stage.k_in[token][c]) =
          make_float2(round_tf32(kx * in_x), round_tf32(ky * in_y));
      *reinterpret_cast<float2*>(&stage.q_in[token][c]) =
          make_float2(round_tf32(qx * in_x), round_tf32(qy * in_y));
      out_x[row] = round_tf32(kx * exp2_fast(raw.last.x - raw.g[row].x));
      out_y[row] = round_tf32(ky * exp2_fast(raw.last.y - raw.g[row].y));
    }
    // Neighbouring lanes write even and odd channels in turn, which lie in different banks.
    const bool odd = (thread & 1) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const bool second = (step == 1) != odd;
        const int own = c + second;
        float4 word;
        word.x = second ? out_y[4 * half] : out_x[4 * half];
        word.y = second ? out_y[4 * half + 1] : out_x[4 * half + 1];
        word.z = second ? out_y[4 * half + 2] : out_x[4 * half + 2];
        word.w = second ? out_y[4 * half + 3] : out_x[4 * half + 3];
        const int quad = first_token() / 4 + half;
        *reinterpret_cast<float4*>(&stage.k_out[own][swizzled(own, quad)]) = word;
      }
    }
    if (first_token() == 0) {
      stage.decay[c] = exp2_fast(raw.last.x);
      stage.decay[c + 1] = exp2_fast(raw.last.y);
    }
#pragma unroll
    for (int e = 0; e < Raw::kEntries; ++e) {
      // x and p are neighbours.
      reinterpret_cast<float4*>(&stage.x[0][0])[thread + e * Raw::kThreads] = raw.entries[e];
    }
#pragma unroll
    for (int e = 0; e < Raw::kVectors; ++e) {
      const int unit = thread + e * Raw::kThreads;
      if (unit >= kTileRows * kV / 8) continue;
      const int row = unit / (kV / 8);
      *reinterpret_cast<uint4*>(&stage.v[row][unit % (kV / 8) * 8]) =
          row < raw.count ? raw.v[e] : make_uint4(0, 0, 0, 0);
    }
  }
};

// ---- consumers ----

// A warp's 16 rows of S^T: state[t] holds channels channel_of(t, ..).
template <int kK>
using WarpState = MmaC[kK / 8];

// Whether no number is infinite or NaN: such a number times 0 is NaN.
__device__ inline bool are_finite(const MmaA (&numbers)[2]) {
  float zero = 0;
#pragma unroll
  for (const MmaA& part : numbers) {
#pragma unroll
    for (const uint32_t bits : part.x) zero = fmaf(__uint_as_float(bits), 0.0f, zero);
  }
  return zero == 0.0f;
}

// A right operand as two tf32: with it a product has the left operand's rounding alone.
template <bool kSplit>
struct RightWords {
  float4 high, low;

  __device__ explicit RightWords(const float4& x) : high(x), low{} {
    if constexpr (kSplit) {
      high = make_float4(round_tf32(x.x), round_tf32(x.y), round_tf32(x.z), round_tf32(x.w));
      low = make_float4(round_tf32(x.x - high.x), round_tf32(x.y - high.y),
                        round_tf32(x.z - high.z), round_tf32(x.w - high.w));
    }
  }
  __device__ void multiply(const MmaA (&left)[2], MmaC& sum) const {
    mma_tf32(sum, left[0], high.x, high.y);
    mma_tf32(sum, left[1], high.z, high.w);
    if constexpr (kSplit) {
      mma_tf32(sum, left[0], low.x, low.y);
      mma_tf32(sum, left[1], low.z, low.w);
    }
  }
};

// Adds left (16 rows of V, all tokens) times the transpose of `right`, of which row t is 0 behind
// column t; kSplit: `right` is fp32, otherwise tf32. Zeros do not keep out what is not finite,
// which would reach earlier tokens: then every token takes the columns up to its own alone, with
// the same bits.
template <bool kSplit>
__device__ inline void multiply_causal(const MmaA (&left)[2],
                                       const float (&right)[kTileRows][kTileRows],
                                       MmaC (&sums)[2]) {
  const int lane = threadIdx.x % kWarpThreads;
  const int g = lane / 4, j = lane % 4;
  const auto words = [&](int u) {
    return RightWords<kSplit>(*reinterpret_cast<const float4*>(&right[token_of(u, g)][4 * j]));
  };
  if (__all_sync(0xFFFFFFFF, are_finite(left))) {
#pragma unroll
    for (int u = 0; u < 2; ++u) words(u).multiply(left, sums[u]);
    return;
  }
#pragma unroll 1
  for (int token = 0; token < kTileRows; ++token) {
    MmaA before[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        before[w].x[i] = 4 * j + 2 * w + (i >> 1) <= token ? left[w].x[i] : 0;
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      MmaC sum = sums[u];
      words(u).multiply(before, sum);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (4 * j + 2 * u + (e & 1) == token) sums[u].x[e] = sum.x[e];
      }
    }
  }
}

// What operand_of() rounded away, as an operand.
__device__ inline MmaA remainder_of(const MmaC& c, const MmaA& rounded) {
  return {{to_tf32(c.x[0] - __uint_as_float(rounded.x[0])),
           to_tf32(c.x[2] - __uint_as_float(rounded.x[1])),
           to_tf32(c.x[1] - __uint_as_float(rounded.x[2])),
           to_tf32(c.x[3] - __uint_as_float(rounded.x[3]))}};
}

// One tile: the state moves on, the warp's part of out goes to `result`.
template <int kK, int kV>
__device__ inline void advance(const ChainStage<kK, kV>& stage, int warp, WarpState<kK>& state,
                               MmaC (&result)[2]) {
  const int lane = threadIdx.x % kWarpThreads;
  const int g = lane / 4, j = lane % 4;
  MmaC seen[2] = {};  // S^T Kd^T
  result[0] = result[1] = MmaC{};
#pragma unroll
  for (int m = 0; m < kK / 16; ++m) {
    const MmaA first = operand_of(state[2 * m]), second = operand_of(state[2 * m + 1]);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const float4 k =
          *reinterpret_cast<const float4*>(&stage.k_in[token_of(u, g)][16 * m + 4 * j]);
      const float4 q =
          *reinterpret_cast<const float4*>(&stage.q_in[token_of(u, g)][16 * m + 4 * j]);
      mma_tf32(seen[u], first, k.x, k.y);
      mma_tf32(result[u], first, q.x, q.y);
      mma_tf32(seen[u], second, k.z, k.w);
      mma_tf32(result[u], second, q.z, q.w);
    }
  }
  MmaA rest[2];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    MmaC r;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = 4 * j + 2 * u + (e & 1);
      r.x[e] = bf16_to_float(stage.v[token][16 * warp + g + 8 * (e >> 1)]) - seen[u].x[e];
    }
    rest[u] = operand_of(r);
  }
  MmaC sums[2] = {};
  multiply_causal<true>(rest, stage.x, sums);
  const MmaA corrections[2] = {operand_of(sums[0]), operand_of(sums[1])};
  const MmaA remainders[2] = {remainder_of(sums[0], corrections[0]),
                              remainder_of(sums[1], corrections[1])};
  multiply_causal<false>(corrections, stage.p, result);
#pragma unroll
  for (int m = 0; m < kK / 16; ++m) {
    const float4 decay = *reinterpret_cast<const float4*>(&stage.decay[16 * m + 4 * j]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      MmaC& s = state[2 * m + e];
      const float left = e == 0 ? decay.x : decay.z, right = e == 0 ? decay.y : decay.w;
      s.x[0] *= left;
      s.x[1] *= right;
      s.x[2] *= left;
      s.x[3] *= right;
      const int channel = channel_of(2 * m + e, g);
      const float4 k =
          *reinterpret_cast<const float4*>(&stage.k_out[channel][swizzled(channel, j)]);
      mma_tf32(s, corrections[0], k.x, k.y);
      mma_tf32(s, corrections[1], k.z, k.w);
      mma_tf32(s, remainders[0], k.x, k.y);
      mma_tf32(s, remainders[1], k.z, k.w);
    }
  }
}

// Rows of out of one warp: through shared memory, so that a token's 16 channels are one store.
__device__ inline void store_out(const MmaC (&result)[2], bf16_t (&staging)[kTileRows][16],
                                 const Accessor<bf16_t, 3>& out, int64_t t0, int count, int hv,
                                 int v, bool aligned) {
  const int lane = threadIdx.x % kWarpThreads;
  const int g = lane / 4, j = lane % 4;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      staging[4 * j + 2 * u + (e & 1)][g + 8 * (e >> 1)] = bf16_from_float(result[u].x[e]);
    }
  }
  __syncwarp();
  const int token = lane / 2, part = lane % 2 * 8;
  if (token < count) {
    bf16_t* const to = out.row(t0 + token, hv) + v + part;
    const bf16_t* const from = &staging[token][part];
    if (aligned) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int i = 0; i < 8; ++i) to[i] = from[i];
    }
  }
  __syncwarp();
}

template <int kK>
__device__ inline void load_state(const StateAccess& access, int64_t entry, int hv, int v,
                                  WarpState<kK>& state) {
  const int lane = threadIdx.x % kWarpThreads;
#pragma unroll
  for (int m = 0; m < kK / 16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 word = make_float4(0, 0, 0, 0);
      if (entry >= 0) {
        word = load_state4(access, entry, hv, v + lane / 4 + 8 * half, 16 * m + 4 * (lane % 4));
      }
      state[2 * m].x[2 * half] = word.x;
      state[2 * m].x[2 * half + 1] = word.y;
      state[2 * m + 1].x[2 * half] = word.z;
      state[2 * m + 1].x[2 * half + 1] = word.w;
    }
  }
}

template <int kK>
__device__ inline void store_state(const WarpState<kK>& state, const StateAccess& access,
                                   int64_t entry, int hv, int v) {
  const int lane = threadIdx.x % kWarpThreads;
#pragma unroll
  for (int m = 0; m < kK / 16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 word =
          make_float4(state[2 * m].x[2 * half], state[2 * m].x[2 * half + 1],
                      state[2 * m + 1].x[2 * half], state[2 * m + 1].x[2 * half + 1]);
      store_state4(word, access, entry, hv, v + lane / 4 + 8 * half, 16 * m + 4 * (lane % 4));
    }
  }
}

// A place for the state of sequence n at `position`: entry -1 is none.
struct Target {
  const StateAccess& access;
  int64_t entry;
};

// Place -2 is chunk_states, -1 the final state, m >= 0 snapshot m, which lies at `position`.
__device__ inline Target target_at(const ChainParams& params, int64_t n, int64_t length,
                                   int64_t position, int64_t m) {
  const PrefillTargets& targets = params.targets;
  if (m == -2) {
    const auto chunk = divide_small(position, static_cast<uint32_t>(targets.interval));
    const int64_t entry = params.table.chunk_begin[n] + chunk.quotient;
    const bool kept =
        chunk.remainder == 0 && position < length && entry < targets.chunk_states.entries;
    return {targets.chunk_states, kept ? entry : -1};
  }
  if (m == -1) {
    return {targets.written(), position == length ? targets.final_entry(n, length) : -1};
  }
  return {targets.written(), targets.snapshot_entry(m, length)};
}

template <int kK, int kV>
__global__ void __launch_bounds__(kV / 16 * kWarpThreads + kK, 1)
    chain_tiles(const __grid_constant__ ChainParams params) {
  constexpr int kConsumers = kV / 16;
  constexpr int kThreads = kConsumers * kWarpThreads + kK;
  constexpr int kFull = 1, kEmpty = 3;  // barriers, one a stage
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<ChainMemory<kK, kV>*>(memory);
  if (params.table.is_refused()) return;
  const KdaInput& input = params.input;
  const auto per_sequence = static_cast<uint32_t>(input.value_heads * params.slices);
  // 32 bits hold every row and sequence of a call.
  const int n = params.table.order[blockIdx.x / per_sequence];
  const int first_row = static_cast<int>(params.table.offsets[n]);
  const int length = static_cast<int>(params.table.offsets[n + 1]) - first_row;
  const int hv = static_cast<int>(blockIdx.x % per_sequence) / params.slices;
  const int v_begin = static_cast<int>(blockIdx.x % per_sequence) % params.slices * kV;
  if (threadIdx.x == 0) shared.place = {n, hv, v_begin, first_row};
  __syncthreads();
  const int warp = threadIdx.x / kWarpThreads;

  if (warp >= kConsumers) {
    const Producer<kK, kV> producer{params,
                                    first_row,
                                    int64_t{first_row} + length,
                                    params.table.tile_begin[n] * int64_t{input.value_heads} + hv,
                                    hv / input.heads_per_key,
                                    hv,
                                    v_begin,
                                    static_cast<int>(threadIdx.x) - kConsumers * kWarpThreads};
    const int tiles = (length - 1) / kTileRows + (length > 0);
    RawTile<kK, kV> raw;
    if (tiles > 0) producer.load(0, raw);
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % 2;
      if (tile >= 2) sync_some(kEmpty + stage, kThreads);
      producer.store(raw, shared.stages[stage]);
      arrive_some(kFull + stage, kThreads);
      if (tile + 1 < tiles) producer.load(tile + 1, raw);
    }
    return;
  }

  const PrefillTargets& targets = params.targets;
  WarpState<kK> state;
  load_state<kK>(targets.states, targets.routes.start(n), hv, v_begin + 16 * warp, state);
  SnapshotCursor snapshots(targets.snapshots, n, params.table.snapshots[n] > 0);
  const bool keeps_chunks = targets.chunk_states.data != nullptr;
  for (int position = 0;;) {
    const bool last = position == length;
    const bool due = snapshots.is_due(position);
    // Whatever this state goes to, in one loop: its stores are too much code for three places.
    if (last || due || keeps_chunks) {
      const ChainPlace place = shared.place;
      const int v = place.v_begin + 16 * warp;
      for (int64_t m = -2; m < snapshots.end();
           m = m < -1 ? m + 1 : snapshots.find(place.n, m + 1, position)) {
        const auto [access, entry] = target_at(params, place.n, length, position, m);
        if (entry >= 0) store_state<kK>(state, access, entry, place.hv, v);
      }
      if (due) snapshots.advance(place.n, position);
    }
    if (last) break;
    const int stage = position / kTileRows % 2;
    MmaC result[2];
    sync_some(kFull + stage, kThreads);
    advance<kK, kV>(shared.stages[stage], warp, state, result);
    const int left = length - position;
    if (left > 2 * kTileRows) arrive_some(kEmpty + stage, kThreads);
    const int count = min(left, kTileRows);
    const ChainPlace place = shared.place;
    store_out(result, shared.out[warp], params.out, int64_t{place.first_row} + position, count,
              place.hv, place.v_begin + 16 * warp, params.out_aligned);
    position += count;
  }
}

}  // namespace fovea::internal::cuda
