#include <algorithm>
#include <limits>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/workspace.h"
#include "src/kda/cuda/kda_rows.cuh"
#include "src/kda/cuda/kda_sequences.cuh"
#include "src/kda/cuda/warp_sums.cuh"
#include "src/kda/kda_stages_impl.h"

// The stages one by one, in fp32: what they hand over through memory is as exact as its type.
//
// | stage  | block                                    | thread                                    |
// |--------|------------------------------------------|-------------------------------------------|
// | gate   | chunk, value head                        | a channel of the sums, then a warp a row  |
// | intra  | chunk, value head                        | a column of A and P, rows side by side    |
// | inter  | sequence, value head, 32 columns of V    | a warp has 4 columns, its lanes share K   |
// | output | chunk, value head, 32 columns of V       | a column of V, rows side by side          |
//
// exp2 is taken of differences of G that are never positive, one per pair of rows and channel.
namespace fovea::internal {
namespace {

using cuda::exp2_fast;
using cuda::KdaInput;
using cuda::kWarpThreads;
using cuda::SequenceTable;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kSlice = 32;  // channels, or columns of V, at a time
constexpr int kMaxLaneChannels = 8;

// Rows [T, heads, width]. T below is float or bf16_t, the type in which stages hand over.
template <class T>
using In = Accessor<const T, 3>;
template <class T>
using Out = Accessor<T, 3>;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16_t x) { return bf16_to_float(x); }
__device__ inline void put(float& to, float x) { to = x; }
__device__ inline void put(bf16_t& to, float x) { to = bf16_from_float(x); }

// What every stage is told.
struct StageParams {
  KdaInput input;  // the numbers of the layer and the rows that the stage reads of it
  SequenceTable table;
  int64_t num_sequences;
  int chunk;
  int head_dim_k, head_dim_v;
  int slices;  // blocks that share the columns of V
};

template <class T>
struct GateParams {
  StageParams stage;
  Out<float> g_sum;
  Out<T> q_hat, k_hat;
};

template <class T>
struct IntraParams {
  StageParams stage;
  In<T> q_hat, k_hat;
  In<float> g_sum;
  Out<T> p, x, w, u0, kr;
};

template <class T>
struct InterParams {
  StageParams stage;
  In<T> w, kr, u0;
  In<float> g_sum;
  Out<T> u;
  StateAccess initial_state, chunk_states, final_state;
};

template <class T>
struct OutputParams {
  StageParams stage;
  In<T> q_hat, p, u;
  In<float> g_sum;
  Out<bf16_t> out;
  StateAccess chunk_states;
};

// The chunk of a block; no rows: there is none.
struct Chunk {
  int64_t index;
  int64_t first = 0;
  int count = 0;
  int hv, head;
  int slice;

  __device__ explicit Chunk(const StageParams& params) {
    const auto per_chunk = static_cast<uint32_t>(params.input.value_heads * params.slices);
    index = blockIdx.x / per_chunk;
    hv = static_cast<int>(blockIdx.x % per_chunk) / params.slices;
    slice = static_cast<int>(blockIdx.x % per_chunk) % params.slices;
    head = hv / params.input.heads_per_key;
    const SequenceTable& table = params.table;
    if (index >= table.chunk_begin[params.num_sequences]) return;
    const auto begin_of = [&](int64_t n) { return table.chunk_begin[n]; };
    const int64_t n = cuda::count_up_to(begin_of, params.num_sequences, index) - 1;
    first = table.offsets[n] + (index - table.chunk_begin[n]) * params.chunk;
    const int64_t left = table.offsets[n + 1] - first;
    count = left < params.chunk ? static_cast<int>(left) : params.chunk;
  }
};

// ---- K1

template <class T>
__device__ void normalise_row(const GateParams<T>& params, const In<bf16_t>& from, const Out<T>& to,
                              int64_t t, int head) {
  const int lane = threadIdx.x % kWarpThreads;
  float x[kMaxLaneChannels];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kMaxLaneChannels; ++i) {
    const int c = lane + i * kWarpThreads;
    x[i] = c < params.stage.head_dim_k ? bf16_to_float(from(t, head, c)) : 0.0f;
    squares = fmaf(x[i], x[i], squares);
  }
  float factor = 1;
  if (params.stage.input.normalise) factor = kda_inverse_norm(cuda::warp_sum(squares));
#pragma unroll
  for (int i = 0; i < kMaxLaneChannels; ++i) {
    const int c = lane + i * kWarpThreads;
    if (c < params.stage.head_dim_k) put(to(t, head, c), x[i] * factor);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_gates(const __grid_constant__ GateParams<T> params) {
  const KdaInput& input = params.stage.input;
  const Chunk chunk(params.stage);
  const int c = threadIdx.x;
  if (c < params.stage.head_dim_k) {
    const float rate = input.rate(chunk.hv), bias = input.bias(chunk.hv, c);
    // The sum to twice the precision: what a closed channel's large terms would round off of the
    // small ones stays in `rest`.
    float sum = 0, rest = 0;
#pragma unroll 4
    for (int row = 0; row < chunk.count; ++row) {
      const int64_t t = chunk.first + row;
      const float added = input.log2_decay(input.load_gate(t, chunk.hv, c), bias, rate) + rest;
      const float total = sum + added;
      rest = added - (total - sum);
      sum = total;
      params.g_sum(t, chunk.hv, c) = sum;
    }
  }
  if (chunk.hv % input.heads_per_key != 0) return;
  for (int row = static_cast<int>(threadIdx.x) / kWarpThreads; row < chunk.count; row += kWarps) {
    normalise_row(params, input.q, params.q_hat, chunk.first + row, chunk.head);
    normalise_row(params, input.k, params.k_hat, chunk.first + row, chunk.head);
  }
}

// ---- K2

// Rows are 4 words mod 32 apart: eight rows of one vector of 4 words fill the banks.
template <int kRows>
struct Slices {
  float g[kRows][kSlice + 4], k[kRows][kSlice + 4], q[kRows][kSlice + 4];
};
template <int kRows>
union IntraMemory {
  Slices<kRows> slices;
  float x[kRows][kRows + 4];  // when A is complete
};
template <int kRows>
union FactorMemory {
  float a[kRows][kRows + 4];
  float rows[kRows][kSlice];  // of diag(beta) Kd or diag(beta) V, when X is complete
};

// Products of one vector of channels: keys and queries of row i with row j.
__device__ inline void add_products(const float4& g_i, const float4& k_i, const float4& q_i,
                                    const float4& g_j, const float4& k_j, float& keys,
                                    float& queries) {
  const auto add = [&](float gi, float ki, float qi, float gj, float kj) {
    const float decayed = exp2_fast(gi - gj) * kj;
    keys = fmaf(ki, decayed, keys);
    queries = fmaf(qi, decayed, queries);
  };
  add(g_i.x, k_i.x, q_i.x, g_j.x, k_j.x);
  add(g_i.y, k_i.y, q_i.y, g_j.y, k_j.y);
  add(g_i.z, k_i.z, q_i.z, g_j.z, k_j.z);
  add(g_i.w, k_i.w, q_i.w, g_j.w, k_j.w);
}

__device__ inline float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

// A into shared memory, P into global memory. A thread has a column j of both and rows kStep apart.
template <int kRows, class T>
__device__ void multiply_rows(const IntraParams<T>& params, const Chunk& chunk,
                              const float (&betas)[kRows], Slices<kRows>& slices,
                              float (&a)[kRows][kRows + 4]) {
  constexpr int kStep = kThreads / kRows;
  constexpr int kEntries = kRows / kStep;
  const int j = threadIdx.x % kRows, i0 = threadIdx.x / kRows;
  float keys[kEntries] = {}, queries[kEntries] = {};
  for (int c0 = 0; c0 < params.stage.head_dim_k; c0 += kSlice) {
    __syncthreads();  // the slice before it has been read
    for (int at = threadIdx.x; at < kRows * kSlice; at += kThreads) {
      const int row = at / kSlice, c = at % kSlice;
      const bool used = row < chunk.count && c0 + c < params.stage.head_dim_k;
      const int64_t t = chunk.first + row;
      slices.g[row][c] = used ? params.g_sum(t, chunk.hv, c0 + c) : 0.0f;
      slices.k[row][c] = used ? to_float(params.k_hat(t, chunk.head, c0 + c)) : 0.0f;
      slices.q[row][c] = used ? to_float(params.q_hat(t, chunk.head, c0 + c)) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const int i = i0 + e * kStep;
      if (j > i || i >= chunk.count) continue;
#pragma unroll 2
      for (int c = 0; c < kSlice; c += 4) {
        add_products(load4(&slices.g[i][c]), load4(&slices.k[i][c]), load4(&slices.q[i][c]),
                     load4(&slices.g[j][c]), load4(&slices.k[j][c]), keys[e], queries[e]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    const int i = i0 + e * kStep;
    a[i][j] = j < i && i < chunk.count ? betas[i] * keys[e] : 0.0f;
    if (i < chunk.count) put(params.p(chunk.first + i, chunk.hv, j), j <= i ? queries[e] : 0.0f);
  }
}

// Column `column` of X = (I + A)^-1 by forward substitution; row i depends on rows <= i alone.
template <int kRows>
__device__ inline void invert_column(const float (&a)[kRows][kRows + 4], int column,
                                     float (&x)[kRows][kRows + 4]) {
  for (int i = 0; i < column; ++i) x[i][column] = 0;
  x[column][column] = 1;
  for (int i = column + 1; i < kRows; ++i) {
    float value = 0;
    for (int m = column; m < i; ++m) value = fmaf(-a[i][m], x[m][column], value);
    x[i][column] = value;
  }
}

// Writes rows of X diag(beta) M, M [rows, dim] given as value(row, column) with beta in it.
template <int kRows, class T, class Value>
__device__ void multiply_inverse(const Chunk& chunk, const float (&x)[kRows][kRows + 4],
                                 float (&rows)[kRows][kSlice], int dim, const Out<T>& to,
                                 const Value& value) {
  constexpr int kEntries = kRows / kWarps;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  for (int c0 = 0; c0 < dim; c0 += kSlice) {
    __syncthreads();  // what stood here has been read
#pragma unroll 2
    for (int row = warp; row < kRows; row += kWarps) {
      rows[row][lane] = row < chunk.count && c0 + lane < dim ? value(row, c0 + lane) : 0.0f;
    }
    __syncthreads();
    float sums[kEntries] = {};
    for (int j = 0; j < kRows; ++j) {
      const float m = rows[j][lane];
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
        // Rows behind it may hold anything, which 0 does not keep out.
        if (j <= warp + e * kWarps) sums[e] = fmaf(x[warp + e * kWarps][j], m, sums[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const int row = warp + e * kWarps;
      if (row < chunk.count && c0 + lane < dim) {
        put(to(chunk.first + row, chunk.hv, c0 + lane), sums[e]);
      }
    }
  }
}

// kRows: the chunk's length.
template <int kRows, class T>
__global__ void __launch_bounds__(kThreads, 1)
    look_within(const __grid_constant__ IntraParams<T> params) {
  __shared__ __align__(16) IntraMemory<kRows> memory;
  __shared__ __align__(16) FactorMemory<kRows> factors;
  __shared__ float betas[kRows];
  const KdaInput& input = params.stage.input;
  const Chunk chunk(params.stage);
  if (chunk.count == 0) return;
  if (threadIdx.x < kRows) {
    const int row = threadIdx.x;
    betas[row] = row < chunk.count ? input.load_beta(chunk.first + row, chunk.hv) : 0.0f;
  }
  // Its first barrier comes before betas is read.
  multiply_rows<kRows>(params, chunk, betas, memory.slices, factors.a);
  __syncthreads();
  if (threadIdx.x < kRows) invert_column<kRows>(factors.a, threadIdx.x, memory.x);
  __syncthreads();
  for (int at = threadIdx.x; at < chunk.count * kRows; at += kThreads) {
    const int row = at / kRows, column = at % kRows;
    put(params.x(chunk.first + row, chunk.hv, column), memory.x[row][column]);
  }
  const int dim_k = params.stage.head_dim_k;
  const int64_t last = chunk.first + chunk.count - 1;
  multiply_inverse<kRows>(chunk, memory.x, factors.rows, dim_k, params.w, [&](int row, int c) {
    const int64_t t = chunk.first + row;
    const float g = params.g_sum(t, chunk.hv, c), k = to_float(params.k_hat(t, chunk.head, c));
    const float g_last = params.g_sum(last, chunk.hv, c);
    put(params.kr(t, chunk.hv, c), k * exp2_fast(g_last - g));
    return betas[row] * (k * exp2_fast(g));
  });
  multiply_inverse<kRows>(
      chunk, memory.x, factors.rows, params.stage.head_dim_v, params.u0, [&](int row, int v) {
        return betas[row] * bf16_to_float(input.v(chunk.first + row, chunk.hv, v));
      });
}

// ---- K3

constexpr int kStateRows = 4;  // of V, of a warp
constexpr int kBatchRows = 8;  // of a chunk, whose sums with the state are taken together
constexpr int kMaxChunk = 64;
static_assert(kStateRows * kBatchRows == kWarpThreads && kStateRows * kWarps == kSlice);

using LaneState = float[kStateRows][kMaxLaneChannels];

// fn(r, i, v, c) for the elements of a lane's state that exist.
template <class Function>
__device__ inline void for_state(const StageParams& params, int v0, const Function& fn) {
  const int lane = threadIdx.x % kWarpThreads;
#pragma unroll
  for (int r = 0; r < kStateRows; ++r) {
#pragma unroll
    for (int i = 0; i < kMaxLaneChannels; ++i) {
      const int c = lane + i * kWarpThreads;
      if (v0 + r < params.head_dim_v && c < params.head_dim_k) fn(r, i, v0 + r, c);
    }
  }
}

__device__ inline void store_state(const StageParams& params, const LaneState& state, int v0,
                                   const StateAccess& to, int64_t entry, int hv) {
  for_state(params, v0,
            [&](int r, int i, int v, int c) { to.store(entry, hv, v, c, state[r][i]); });
}

// U of one chunk into `u` and global memory.
template <class T>
__device__ inline void correct(const InterParams<T>& params, const LaneState& state, int64_t first,
                               int count, int hv, int v0, float (&u)[kMaxChunk][kStateRows]) {
  const int lane = threadIdx.x % kWarpThreads;
  const int own_row = lane / kStateRows, own_v = v0 + lane % kStateRows;
#pragma unroll 1
  for (int row = 0; row < count; row += kBatchRows) {
    float sums[kWarpThreads] = {};
#pragma unroll
    for (int i = 0; i < kMaxLaneChannels; ++i) {
      const int c = lane + i * kWarpThreads;
      if (i * kWarpThreads >= params.stage.head_dim_k) break;
#pragma unroll
      for (int b = 0; b < kBatchRows; ++b) {
        const bool used = row + b < count && c < params.stage.head_dim_k;
        const float w = used ? to_float(params.w(first + row + b, hv, c)) : 0.0f;
#pragma unroll
        for (int r = 0; r < kStateRows; ++r) {
          float& sum = sums[b * kStateRows + r];
          sum = fmaf(w, state[r][i], sum);
        }
      }
    }
    const float seen = cuda::sum_transposed(sums);
    const int t = row + own_row;
    float correction = 0;
    if (t < count && own_v < params.stage.head_dim_v) {
      correction = to_float(params.u0(first + t, hv, own_v)) - seen;
      put(params.u(first + t, hv, own_v), correction);
    }
    u[t][lane % kStateRows] = correction;
  }
  __syncwarp();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    chain_chunks(const __grid_constant__ InterParams<T> params) {
  __shared__ __align__(16) float corrections[kWarps][kMaxChunk][kStateRows];
  const StageParams& stage = params.stage;
  const auto per_sequence = static_cast<uint32_t>(stage.input.value_heads * stage.slices);
  const int64_t n = stage.table.order[blockIdx.x / per_sequence];
  const int hv = static_cast<int>(blockIdx.x % per_sequence) / stage.slices;
  const int slice = static_cast<int>(blockIdx.x % per_sequence) % stage.slices;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const int v0 = slice * kSlice + warp * kStateRows;
  if (v0 >= stage.head_dim_v) return;
  const int64_t end = stage.table.offsets[n + 1];
  int64_t entry = stage.table.chunk_begin[n];
  LaneState state = {};
  if (params.initial_state.data != nullptr) {
    for_state(stage, v0, [&](int r, int i, int v, int c) {
      state[r][i] = params.initial_state.load(n, hv, v, c);
    });
  }
  float(&u)[kMaxChunk][kStateRows] = corrections[warp];
#pragma unroll 1
  for (int64_t first = stage.table.offsets[n]; first < end; first += stage.chunk, ++entry) {
    const int count = end - first < stage.chunk ? static_cast<int>(end - first) : stage.chunk;
    if (entry < params.chunk_states.entries) {
      store_state(stage, state, v0, params.chunk_states, entry, hv);
    }
    correct(params, state, first, count, hv, v0, u);
#pragma unroll
    for (int i = 0; i < kMaxLaneChannels; ++i) {
      const int c = lane + i * kWarpThreads;
      if (c >= stage.head_dim_k) continue;
      const float decay = exp2_fast(params.g_sum(first + count - 1, hv, c));
#pragma unroll
      for (int r = 0; r < kStateRows; ++r) state[r][i] *= decay;
#pragma unroll 4
      for (int row = 0; row < count; ++row) {
        const float kr = to_float(params.kr(first + row, hv, c));
        const float4 word = load4(u[row]);
        state[0][i] = fmaf(kr, word.x, state[0][i]);
        state[1][i] = fmaf(kr, word.y, state[1][i]);
        state[2][i] = fmaf(kr, word.z, state[2][i]);
        state[3][i] = fmaf(kr, word.w, state[3][i]);
      }
    }
    __syncwarp();  // u has been read
  }
  if (params.final_state.data != nullptr) {
    store_state(stage, state, v0, params.final_state, n, hv);
  }
}

// ---- K4

// kRows: the chunk's length.
template <int kRows, class T>
__global__ void __launch_bounds__(kThreads)
    put_out(const __grid_constant__ OutputParams<T> params) {
  constexpr int kEntries = kRows / kWarps;
  __shared__ __align__(16) float queries[kRows][kSlice + 4];  // Qd
  __shared__ __align__(16) float states[kSlice][kSlice + 4];  // rows of V
  const StageParams& stage = params.stage;
  const Chunk chunk(stage);
  // With the chunk the block ends: no warp waits at a barrier.
  if (chunk.count == 0 || chunk.index >= params.chunk_states.entries) return;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const int v = chunk.slice * kSlice + lane;
  float sums[kEntries] = {};
  for (int c0 = 0; c0 < stage.head_dim_k; c0 += kSlice) {
    __syncthreads();  // the slice before it has been read
    const int c = c0 + lane;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const int row = warp + e * kWarps;
      const int64_t t = chunk.first + row;
      queries[row][lane] =
          row < chunk.count && c < stage.head_dim_k
              ? to_float(params.q_hat(t, chunk.head, c)) * exp2_fast(params.g_sum(t, chunk.hv, c))
              : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < kSlice / kWarps; ++e) {
      const int row = warp + e * kWarps, from = chunk.slice * kSlice + row;
      states[row][lane] = from < stage.head_dim_v && c < stage.head_dim_k
                              ? params.chunk_states.load(chunk.index, chunk.hv, from, c)
                              : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSlice; i += 4) {
      const float4 s = load4(&states[lane][i]);
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
        const float4 q = load4(&queries[warp + e * kWarps][i]);
        sums[e] = fmaf(q.x, s.x, sums[e]);
        sums[e] = fmaf(q.y, s.y, sums[e]);
        sums[e] = fmaf(q.z, s.z, sums[e]);
        sums[e] = fmaf(q.w, s.w, sums[e]);
      }
    }
  }
  if (v >= stage.head_dim_v) return;
#pragma unroll 2
  for (int j = 0; j < chunk.count; ++j) {
    const float u = to_float(params.u(chunk.first + j, chunk.hv, v));
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const int row = warp + e * kWarps;
      if (j > row || row >= chunk.count) continue;
      sums[e] = fmaf(to_float(params.p(chunk.first + row, chunk.hv, j)), u, sums[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    const int row = warp + e * kWarps;
    if (row >= chunk.count) continue;
    put(params.out(chunk.first + row, chunk.hv, v), stage.input.scale * sums[e]);
  }
}

// ---- launches

int64_t slices_of(const KdaLayer& layer) { return (layer.head_dim_v + kSlice - 1) / kSlice; }

struct Call {
  const char* op;
  const KdaStageProblem& problem;
  Workspace workspace;
  Stream stream;
};

// Fills the table of sequences; without sequences there is nothing to launch. `slices` blocks share
// the columns of V.
StageParams start(const Call& call, const PackedOffsets& offsets, const KdaRows& rows,
                  int64_t slices) {
  const KdaLayer& layer = call.problem.layer;
  WorkspaceCutter cutter(call.workspace);
  StageParams params{};
  params.input = KdaInput(layer, rows);
  params.table = SequenceTable(cutter, call.problem.max_sequences);
  params.table.refused = nullptr;
  params.num_sequences = offsets.sequences;
  params.chunk = static_cast<int>(call.problem.chunk);
  params.head_dim_k = static_cast<int>(layer.head_dim_k);
  params.head_dim_v = static_cast<int>(layer.head_dim_v);
  params.slices = static_cast<int>(slices);
  if (params.num_sequences == 0) return params;
  cuda::SequenceParams sequences{};
  sequences.table = params.table;
  sequences.offsets = offsets;
  sequences.interval = call.problem.chunk;
  cuda::launch(call.op, cuda::fill_sequences, {dim3(1), dim3(cuda::kSequenceThreads)}, call.stream,
               sequences);
  return params;
}

// Blocks for `parts` sequences, or for the chunks that so many rows may have.
cuda::LaunchShape blocks_of(const StageParams& params, int64_t parts) {
  return {dim3(static_cast<unsigned>(parts * params.input.value_heads * params.slices)),
          dim3(kThreads)};
}
cuda::LaunchShape chunk_blocks(const StageParams& params, int64_t num_rows) {
  // Without sequences there is no table of them to look at.
  if (params.num_sequences == 0) return blocks_of(params, 0);
  return blocks_of(params, num_rows / params.chunk + params.num_sequences);
}

// fn(zero of the type in which stages hand over)
template <class Function>
void with_stage_type(const KdaStageProblem& problem, const Function& fn) {
  if (problem.stage_dtype == DType::kBf16) {
    fn(bf16_t{});
  } else {
    fn(float{});
  }
}

constexpr char kGateOp[] = "kda_stage_gate";
constexpr char kIntraOp[] = "kda_stage_intra";
constexpr char kInterOp[] = "kda_stage_inter";
constexpr char kOutputOp[] = "kda_stage_output";

template <class T>
void launch_gate(const StageParams& stage, const KdaStageGateTensors& t, Stream stream) {
  GateParams<T> params{};
  params.stage = stage;
  params.g_sum = access<float, 3>(t.g_sum);
  params.q_hat = access<T, 3>(t.q_hat);
  params.k_hat = access<T, 3>(t.k_hat);
  cuda::launch(kGateOp, sum_gates<T>, chunk_blocks(stage, t.q.shape[0]), stream, params);
}

template <class T>
void launch_intra(const StageParams& stage, const KdaStageIntraTensors& t, Stream stream) {
  IntraParams<T> params{};
  params.stage = stage;
  params.q_hat = access<const T, 3>(t.q_hat);
  params.k_hat = access<const T, 3>(t.k_hat);
  params.g_sum = access<const float, 3>(t.g_sum);
  params.p = access<T, 3>(t.p);
  params.x = access<T, 3>(t.x);
  params.w = access<T, 3>(t.w);
  params.u0 = access<T, 3>(t.u0);
  params.kr = access<T, 3>(t.kr);
  auto* const kernel = stage.chunk == 64   ? look_within<64, T>
                       : stage.chunk == 32 ? look_within<32, T>
                                           : look_within<16, T>;
  cuda::launch(kIntraOp, kernel, chunk_blocks(stage, t.v.shape[0]), stream, params);
}

template <class T>
void launch_inter(const StageParams& stage, const KdaStageInterTensors& t, Stream stream) {
  InterParams<T> params{};
  params.stage = stage;
  params.w = access<const T, 3>(t.w);
  params.kr = access<const T, 3>(t.kr);
  params.u0 = access<const T, 3>(t.u0);
  params.g_sum = access<const float, 3>(t.g_sum);
  params.u = access<T, 3>(t.u);
  params.initial_state = StateAccess(t.initial_state, StateLayout::kVk);
  params.chunk_states = StateAccess(t.chunk_states, StateLayout::kVk);
  params.final_state = StateAccess(t.final_state, StateLayout::kVk);
  cuda::launch(kInterOp, chain_chunks<T>, blocks_of(stage, stage.num_sequences), stream, params);
}

template <class T>
void launch_output(const StageParams& stage, const KdaStageOutputTensors& t, Stream stream) {
  OutputParams<T> params{};
  params.stage = stage;
  params.q_hat = access<const T, 3>(t.q_hat);
  params.p = access<const T, 3>(t.p);
  params.u = access<const T, 3>(t.u);
  params.g_sum = access<const float, 3>(t.g_sum);
  params.out = access<bf16_t, 3>(t.out);
  params.chunk_states = StateAccess(t.chunk_states, StateLayout::kVk);
  auto* const kernel = stage.chunk == 64   ? put_out<64, T>
                       : stage.chunk == 32 ? put_out<32, T>
                                           : put_out<16, T>;
  cuda::launch(kOutputOp, kernel, chunk_blocks(stage, t.u.shape[0]), stream, params);
}

}  // namespace

Refusal kda_stage_cuda_supports(const KdaStageProblem& problem) {
  const auto parts = static_cast<double>(problem.max_rows / problem.chunk + problem.max_sequences);
  const double blocks = parts * static_cast<double>(problem.layer.num_value_heads) *
                        static_cast<double>(slices_of(problem.layer));
  if (blocks <= std::numeric_limits<int32_t>::max()) return {};
  return "takes at most 2^31 - 1 chunks, value heads and slices of 32 columns of V, got bounds "
         "of " +
         std::to_string(static_cast<int64_t>(std::min(blocks, 0x1p62)));
}

size_t kda_stage_cuda_workspace(const KdaStageProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  SequenceTable(cutter, problem.max_sequences);
  return cutter.used_bytes();
}

void kda_stage_gate_cuda_portable(const KdaStageProblem& problem, const Device& device,
                                  const KdaStageGateTensors& tensors, Workspace workspace,
                                  Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  KdaRows rows;
  rows.q = tensors.q;
  rows.k = tensors.k;
  rows.g = tensors.g;
  rows.a_log = tensors.a_log;
  rows.dt_bias = tensors.dt_bias;
  const StageParams stage = start({kGateOp, problem, workspace, stream},
                                  PackedOffsets(tensors.q_indptr, tensors.q.shape[0]), rows, 1);
  with_stage_type(problem, [&](auto type) { launch_gate<decltype(type)>(stage, tensors, stream); });
}

void kda_stage_intra_cuda_portable(const KdaStageProblem& problem, const Device& device,
                                   const KdaStageIntraTensors& tensors, Workspace workspace,
                                   Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  KdaRows rows;
  rows.v = tensors.v;
  rows.beta = tensors.beta;
  const StageParams stage = start({kIntraOp, problem, workspace, stream},
                                  PackedOffsets(tensors.q_indptr, tensors.v.shape[0]), rows, 1);
  with_stage_type(problem,
                  [&](auto type) { launch_intra<decltype(type)>(stage, tensors, stream); });
}

void kda_stage_inter_cuda_portable(const KdaStageProblem& problem, const Device& device,
                                   const KdaStageInterTensors& tensors, Workspace workspace,
                                   Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const StageParams stage =
      start({kInterOp, problem, workspace, stream},
            PackedOffsets(tensors.q_indptr, tensors.w.shape[0]), {}, slices_of(problem.layer));
  with_stage_type(problem,
                  [&](auto type) { launch_inter<decltype(type)>(stage, tensors, stream); });
}

void kda_stage_output_cuda_portable(const KdaStageProblem& problem, const Device& device,
                                    const KdaStageOutputTensors& tensors, Workspace workspace,
                                    Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const StageParams stage =
      start({kOutputOp, problem, workspace, stream},
            PackedOffsets(tensors.q_indptr, tensors.u.shape[0]), {}, slices_of(problem.layer));
  with_stage_type(problem,
                  [&](auto type) { launch_output<decltype(type)>(stage, tensors, stream); });
}

}  // namespace fovea::internal
