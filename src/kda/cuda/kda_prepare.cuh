#pragma once

#include <cstdint>

#include "src/core/cuda/mma_tf32.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/kda/cuda/kda_rows.cuh"
#include "src/kda/cuda/kda_sequences.cuh"
#include "src/kda/cuda/warp_sums.cuh"

/// First half of a prefill: all tiles of 16 rows in parallel, one block a tile and value head. A
/// tile leaves behind what the chain over tiles needs of it: the sums G of its log decays, the
/// factors of its rows, X diag(beta) and scale P (docs/kda.md).
///
///   A_ij = beta_i k_i . (k_j exp2(G_i - G_j)), j < i      X = (I + A)^-1
///   P_ij =        q_i . (k_j exp2(G_i - G_j)), j <= i
///
/// exp2 is taken of differences of G that are never positive, one per pair of rows and channel
/// within the tile's halves; between them exp2(G_i - G_j) = exp2(G_i - G_8) exp2(G_8 - G_j), both
/// at most 1. No gate needs another path, and row i depends on rows <= i alone, bit for bit.
namespace fovea::internal::cuda {

/// What prepare leaves of tile t and value head hv, at index t * HV + hv.
struct TileRecords {
  float* g_sum = nullptr;   // [.., 16, K]
  float* x = nullptr;       // [.., 16, 16]: X diag(beta)
  float* p = nullptr;       // [.., 16, 16]: scale P, rounded to tf32
  float* factor = nullptr;  // [.., 2, 16]: of the rows of q (with scale), then of k

  TileRecords() = default;
  TileRecords(WorkspaceCutter& cutter, int64_t tiles, int64_t head_dim_k)
      : g_sum(cutter.take<float>(tiles * kTileRows * head_dim_k)),
        x(cutter.take<float>(tiles * kTileRows * kTileRows)),
        p(cutter.take<float>(tiles * kTileRows * kTileRows)),
        factor(cutter.take<float>(tiles * 2 * kTileRows)) {}
};

struct PrepareParams {
  KdaInput input;
  SequenceTable table;
  TileRecords records;
  int64_t num_sequences;
  bool pairs_aligned;  // rows of q and k start at multiples of 4 bytes
};

inline constexpr int kRowsAtOnce = 4;  // read before any of them is used

// Two neighbouring bf16 as one word.
__device__ inline uint32_t load_pair(const bf16_t* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint32_t*>(from);
  return from[0].bits | static_cast<uint32_t>(from[1].bits) << 16;
}
__device__ inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000); }

// Two channels of rows `first` .. + 3 of a tile; rows behind `last` hold that one. All of it is
// read behind one branch a type: behind one a row every load would wait for the one before.
struct RawRows {
  uint32_t q[kRowsAtOnce], k[kRowsAtOnce];
  float2 gate[kRowsAtOnce];

  __device__ void load(const PrepareParams& params, int64_t first_row, int first, int last,
                       int head, int hv, int channel) {
    const KdaInput& input = params.input;
    const auto row_at = [&](int r) { return first_row + min(first + r, last); };
    if (params.pairs_aligned) {
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        q[r] = load_pair(input.q.row(row_at(r), head) + channel, true);
        k[r] = load_pair(input.k.row(row_at(r), head) + channel, true);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        q[r] = load_pair(input.q.row(row_at(r), head) + channel, false);
        k[r] = load_pair(input.k.row(row_at(r), head) + channel, false);
      }
    }
    const auto at = [&](int r) { return row_at(r) * input.g_row + hv * input.g_head + channel; };
    if (input.g_is_bf16) {
      const auto* const data = static_cast<const bf16_t*>(input.g);
      bf16_t x[kRowsAtOnce], y[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        x[r] = data[at(r)];
        y[r] = data[at(r) + 1];
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        gate[r] = make_float2(bf16_to_float(x[r]), bf16_to_float(y[r]));
      }
    } else {
      const auto* const data = static_cast<const float*>(input.g);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) gate[r] = make_float2(data[at(r)], data[at(r) + 1]);
    }
  }
};

// Two channels of row i. Its products with row j go to `sums`: that of k_i to j, that of q_i to 16
// + j.
struct PairRow {
  float2 g;
  uint32_t k, q;

  // The row times exp2(G_i - G_m), m <= i.
  __device__ float2 decayed(uint32_t row, float2 g_m) const {
    return make_float2(exp2_fast(g.x - g_m.x) * low_of(row), exp2_fast(g.y - g_m.y) * high_of(row));
  }
  // Rows kFirst .. kFirst + 7, an exponential a pair. Rows behind i may hold anything: their weight
  // is chosen, not computed.
  template <int kFirst>
  __device__ void multiply_near(int i, const float2 (&g_of)[kTileRows],
                                const uint32_t (&k_of)[kTileRows], float (&sums)[32]) const {
#pragma unroll
    for (int j = kFirst; j < kFirst + kTileRows / 2; ++j) {
      const float x = j <= i ? exp2_fast(g.x - g_of[j].x) * low_of(k_of[j]) : 0.0f;
      const float y = j <= i ? exp2_fast(g.y - g_of[j].y) * high_of(k_of[j]) : 0.0f;
      sums[j] = fmaf(high_of(k), y, low_of(k) * x);
      sums[16 + j] = fmaf(high_of(q), y, low_of(q) * x);
    }
  }
  // Rows 0 .. 7 for a row of the other half: far[j] is k_j exp2(G_8 - G_j).
  __device__ void multiply_far(float2 g_8, const float2 (&far)[kTileRows / 2],
                               float (&sums)[32]) const {
    const float2 own_k = decayed(k, g_8), own_q = decayed(q, g_8);
#pragma unroll
    for (int j = 0; j < kTileRows / 2; ++j) {
      sums[j] = fmaf(own_k.y, far[j].y, own_k.x * far[j].x);
      sums[16 + j] = fmaf(own_q.y, far[j].y, own_q.x * far[j].x);
    }
  }
};

// Column `lane` of (I + A)^-1 by forward substitution: entries stay within [-1, 1] for unit keys
// and beta in [0, 1], which products of powers of A do not.
__device__ inline void invert_column(const float (&a)[kTileRows][kTileRows + 1], int column,
                                     float (&x)[kTileRows]) {
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    float value = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) value = fmaf(-a[i][m], x[m], value);
    x[i] = i < column ? 0.0f : value;
  }
}

/// One thread per two channels.
template <int kK>
__global__ void __launch_bounds__(kK / 2)
    prepare_tiles(const __grid_constant__ PrepareParams params) {
  constexpr int kThreads = kK / 2;
  constexpr int kWarps = kThreads / kWarpThreads;
  __shared__ float2 own_g[kTileRows][kThreads];
  __shared__ uint2 own_kq[kTileRows][kThreads];
  __shared__ float partial[kWarps][kTileRows][32];
  __shared__ float squares[kWarps][32];
  __shared__ float factors[2][kTileRows];
  __shared__ float betas[kTileRows];
  __shared__ float a[kTileRows][kTileRows + 1];
  __shared__ float product[2][kTileRows][kTileRows];
  const KdaInput& input = params.input;
  if (params.table.is_refused()) return;
  const int64_t tile = blockIdx.x / static_cast<uint32_t>(input.value_heads);
  const int hv = static_cast<int>(blockIdx.x % static_cast<uint32_t>(input.value_heads));
  if (tile >= params.table.tile_begin[params.num_sequences]) return;
  const auto begin_of = [&](int64_t n) { return int64_t{params.table.tile_begin[n]}; };
  const int64_t n = count_up_to(begin_of, params.num_sequences, tile) - 1;
  const int64_t first_row =
      params.table.offsets[n] + (tile - params.table.tile_begin[n]) * kTileRows;
  const int64_t left = params.table.offsets[n + 1] - first_row;
  const int count = left < kTileRows ? static_cast<int>(left) : kTileRows;
  const int64_t record = tile * input.value_heads + hv;
  const int head = hv / input.heads_per_key;
  const int channel = 2 * static_cast<int>(threadIdx.x);
  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;

  if (threadIdx.x < kTileRows) {
    const int row = threadIdx.x;
    betas[row] = row < count ? input.load_beta(first_row + row, hv) : 0.0f;
  }
  float2 g[kTileRows];
  uint32_t k[kTileRows];
  {
    const float rate = input.rate(hv);
    const float bias_x = input.bias(hv, channel), bias_y = input.bias(hv, channel + 1);
    float norms[32];
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int first = 0; first < kTileRows; first += kRowsAtOnce) {
      RawRows raw;
      raw.load(params, first_row, first, count - 1, head, hv, channel);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int row = first + r;
        const bool used = row < count;
        const uint32_t q = used ? raw.q[r] : 0;
        k[row] = used ? raw.k[r] : 0;
        if (used) {
          sum.x += input.log2_decay(raw.gate[r].x, bias_x, rate);
          sum.y += input.log2_decay(raw.gate[r].y, bias_y, rate);
        }
        g[row] = sum;
        own_g[row][threadIdx.x] = sum;
        own_kq[row][threadIdx.x] = make_uint2(k[row], q);
        norms[row] = fmaf(high_of(q), high_of(q), low_of(q) * low_of(q));
        norms[16 + row] = fmaf(high_of(k[row]), high_of(k[row]), low_of(k[row]) * low_of(k[row]));
      }
    }
    if (input.normalise) squares[warp][lane] = sum_transposed(norms);
  }
  float2* const g_sum =
      reinterpret_cast<float2*>(params.records.g_sum + record * kTileRows * kK + channel);
#pragma unroll
  for (int row = 0; row < kTileRows; ++row) g_sum[row * (kK / 2)] = g[row];

  // A row's own values come from shared memory: registers have no index.
  const auto own = [&](int i) {
    const uint2 kq = own_kq[i][threadIdx.x];
    return PairRow{own_g[i][threadIdx.x], kq.x, kq.y};
  };
#pragma unroll 1
  for (int i = 0; i < kTileRows / 2; ++i) {
    float sums[32] = {};
    const PairRow row = own(i);
    row.template multiply_near<0>(i, g, k, sums);
    partial[warp][i][lane] = sum_transposed(sums);
  }
  float2 far[kTileRows / 2];
#pragma unroll
  for (int j = 0; j < kTileRows / 2; ++j) {
    far[j] = make_float2(exp2_fast(g[8].x - g[j].x) * low_of(k[j]),
                         exp2_fast(g[8].y - g[j].y) * high_of(k[j]));
  }
  const float2 g_8 = g[8];
#pragma unroll 1
  for (int i = kTileRows / 2; i < kTileRows; ++i) {
    float sums[32];
    const PairRow row = own(i);
    row.multiply_far(g_8, far, sums);
    row.template multiply_near<kTileRows / 2>(i, g, k, sums);
    partial[warp][i][lane] = sum_transposed(sums);
  }
  __syncthreads();
  if (threadIdx.x < 2 * kTileRows) {
    const int which = threadIdx.x / kTileRows, row = threadIdx.x % kTileRows;
    float sum = 0;
    if (input.normalise) {
      for (int w = 0; w < kWarps; ++w) sum += squares[w][threadIdx.x];
    }
    float factor = input.normalise ? kda_inverse_norm(sum) : 1.0f;
    if (which == 0) factor *= input.scale;
    factors[which][row] = factor;
    params.records.factor[record * 2 * kTileRows + threadIdx.x] = factor;
  }
  __syncthreads();
  for (int entry = threadIdx.x; entry < kTileRows * kTileRows; entry += kThreads) {
    const int i = entry / kTileRows, j = entry % kTileRows;
    float keys = 0, queries = 0;
    for (int w = 0; w < kWarps; ++w) {
      keys += partial[w][i][j];
      queries += partial[w][i][16 + j];
    }
    a[i][j] = j < i ? betas[i] * (factors[1][i] * factors[1][j]) * keys : 0.0f;
    product[1][i][j] = j <= i ? round_tf32(factors[0][i] * factors[1][j] * queries) : 0.0f;
  }
  __syncthreads();
  if (threadIdx.x < kTileRows) {
    const int column = threadIdx.x;
    float x[kTileRows];
    invert_column(a, column, x);
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      // Rows before it do not see a beta that is NaN or infinite.
      product[0][i][column] = i < column ? 0.0f : x[i] * betas[column];
    }
  }
  __syncthreads();
  for (int entry = threadIdx.x; entry < kTileRows * kTileRows; entry += kThreads) {
    params.records.x[record * kTileRows * kTileRows + entry] =
        product[0][entry / kTileRows][entry % kTileRows];
    params.records.p[record * kTileRows * kTileRows + entry] =
        product[1][entry / kTileRows][entry % kTileRows];
  }
}

}  // namespace fovea::internal::cuda
