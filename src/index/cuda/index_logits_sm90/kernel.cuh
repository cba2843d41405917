#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/index/cuda/index_logits_rows.cuh"
#include "src/index/cuda/index_logits_sm90/config.h"

// Keys are the rows of a product, 64 a warpgroup, and come from global memory to the registers that
// tensor cores read; the heads of queries are its columns and stay in shared memory. So a thread
// has 16 heads of two keys for a row: relu, weights and the sum over heads happen where the
// products are, and four lanes add up what they have.
//
// All warpgroups of a block do the same with rows of their own:
//
//   4 rows   products of rows 0, 1 | of rows 2, 3 | of rows 0, 1 of the next keys | . .
//   threads  weigh rows 2, 3 of the last keys | weigh rows 0, 1 | weigh rows 2, 3 | . .
//   memory   the next 64 keys . . . . . . . . . . . . . . . . . . . . . .
//
// With one or two rows a warpgroup waits for its products; others of the multiprocessor go on.
//
// Work is counted in tiles: 64 keys of a run, which are neighbouring rows of a group that read the
// same keys. Every block counts all tiles and takes an even share of them, wherever it begins.
//
// Channels are dealt out so that a lane's share of a key is 16 bytes twice: step s of a product has
// words s of pieces 0..3 of a key, then of pieces 4..7, in the keys and in the queries. Sums of 32
// products, the order of steps, of heads and of lanes are the same for every number of rows.
namespace fovea::internal::index_sm90 {

using cuda::PanelMatrix;
using cuda::WgmmaA;
using cuda::WgmmaSums;
using index_rows::Window;

struct Params : index_rows::Inputs {
  using Inputs::Inputs;

  int32_t group_rows = 1;  // rows of a block
  int64_t num_groups = 0;
  int64_t num_blocks = 0;
};

// What is left to do for a warpgroup: tiles of the run that begins with row `first` of group
// `group`, from number `tile` on, then those of the runs behind.
struct Share {
  int64_t group;
  int64_t tile;
  int64_t num_tiles;
  int first;
};

// What a block has in shared memory.
template <class Shape>
struct SharedMemory {
  uint8_t queries[Shape::kBlockRows][kQueryBytes];
  float4 weights[Shape::kBlockRows][4][4];  // see load_weights
  int64_t sums[cuda::kWarpThreads + 1];
  // Here and not in the registers of threads that have none to spare.
  Share shares[Shape::kGroups];
};

// Neighbouring rows of a group whose windows meet, and empty ones between them.
struct Run {
  int first;    // has keys
  int next;     // rows [first, next) of the group
  Window keys;  // of them all

  __device__ int64_t num_tiles() const {
    return (int64_t{keys.end} - keys.begin + kKeys - 1) / kKeys;
  }
};

// Rows of a group that exist.
__device__ inline int rows_of(const Params& params, int64_t group) {
  const int64_t left = params.q_fp8.shape[0] - group * params.group_rows;
  return left < params.group_rows ? static_cast<int>(left) : params.group_rows;
}

template <bool kPaged, class Shape>
__device__ Run find_run(const Params& params, int64_t group, int first) {
  const int64_t first_row = group * params.group_rows;
  Run run{first, rows_of(params, group), Window{0, 0, 0}};
  Window windows[Shape::kBlockRows];
#pragma unroll
  for (int i = 0; i < Shape::kBlockRows; ++i) {
    windows[i] = Window{0, 0, 0};
    if (i >= first && i < run.next)
      windows[i] = index_rows::window_of<kPaged>(params, first_row + i);
  }
#pragma unroll
  for (int i = 0; i < Shape::kBlockRows; ++i) {
    if (i >= run.next || windows[i].is_empty()) continue;
    if (run.keys.is_empty()) {
      run.first = i;
      run.keys = windows[i];
    } else if (run.keys.meets(windows[i])) {
      run.keys.include(windows[i]);
    } else {
      run.next = i;
    }
  }
  return run;
}

// Finds the shares of the block; every thread calls it.
template <bool kPaged, class Shape>
__device__ __forceinline__ void find_share(const Params& params, SharedMemory<Shape>& shared) {
  const int64_t each = (params.num_groups + Shape::kThreads - 1) / Shape::kThreads;
  const int64_t first = index_rows::clamp(threadIdx.x * each, 0, params.num_groups);
  const int64_t last = index_rows::clamp(first + each, 0, params.num_groups);
  const auto tiles_of = [&](int64_t group) {
    int64_t tiles = 0;
    for (int row = 0; row < rows_of(params, group);) {
      const Run run = find_run<kPaged, Shape>(params, group, row);
      tiles += run.num_tiles();
      row = run.next;
    }
    return tiles;
  };
  int64_t own = 0;
  for (int64_t group = first; group < last; ++group) own += tiles_of(group);
  int64_t total;
  const int64_t upto = cuda::block_inclusive_sum(own, shared.sums, &total);
  const int64_t begin = total * blockIdx.x / params.num_blocks;
  const int64_t end = total * (int64_t{blockIdx.x} + 1) / params.num_blocks;
  if (begin >= end) {
    if (threadIdx.x < Shape::kGroups) shared.shares[threadIdx.x].num_tiles = 0;
  } else if (upto - own <= begin && begin < upto) {
    Share share{first, begin - (upto - own), end - begin, 0};
    for (int64_t tiles = tiles_of(first); share.tile >= tiles; tiles = tiles_of(share.group)) {
      share.tile -= tiles;
      ++share.group;
    }
    for (int i = 0; i < Shape::kGroups; ++i) shared.shares[i] = share;
  }
  __syncthreads();
}

// The place of a thread: key `key` and + 8 of the warpgroup's 64, pieces `lane` and + 4 of them; of
// sums, heads 8 j + 2 lane and + 1.
__device__ inline int key_of_thread() {
  return threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 32 / 4;
}
__device__ inline int lane_of_four() { return threadIdx.x % 4; }
// Exchanged, so that the compiler knows the number to be that of the whole warp.
template <class Shape>
__device__ __forceinline__ int own_warpgroup() {
  if constexpr (Shape::kGroups == 1) return 0;
  return __shfl_sync(0xFFFFFFFF, threadIdx.x / kGroupThreads, 0);
}

// Where the warpgroup is alone the compiler knows the barrier: blocks whose barriers it does not
// know take all 16, and no more than four of them fit a multiprocessor.
template <class Shape>
__device__ __forceinline__ void sync_warpgroup() {
  cuda::sync_some(1 + own_warpgroup<Shape>(), kGroupThreads);
}

// What a thread has asked for of a tile: its pieces of two keys, and of the key whose logits it
// writes the scale.
struct AskedKeys {
  uint4 low[2];
  uint4 high[2];
  uint32_t scale;
  bool is_held;
};

// Reads keys of a run up to position `end`. `position` is that of the thread's first key in a tile.
// Unsigned: it may go past `end`.
template <bool kPaged, bool kWide, bool kOnce>
struct KeyReader;

// Codes at multiples of 16 bytes; the 16 keys of a warp lie in one page, of a power of two of keys.
// In place of keys past the end the last one is read again, and in place of those without a page
// what `spare` points to, [128]: loads without conditions.
template <bool kPaged, bool kOnce>
struct KeyReader<kPaged, true, kOnce> {
  const Params& params;
  uint32_t end;
  int32_t request;
  const uint8_t* spare;
  uint32_t page;  // as the table has it, of the tile that is asked for next

  __device__ uint32_t clamped(uint32_t position) const {
    return position < end ? position : end - 1;
  }
  __device__ bool has_column(uint32_t column) const {
    return column < static_cast<uint32_t>(params.page_table.shape[1]);
  }
  // Starts to read the page of a tile.
  __device__ void find_page(uint32_t position) {
    if constexpr (kPaged) {
      const uint32_t column = clamped(position) >> params.page_shift;
      cuda::load_ahead(page, has_column(column) ? params.page_table.row(request) + column
                                                : params.row_to_request);
    }
  }
  // Starts to read a tile whose page is found.
  __device__ void ask(uint32_t position, AskedKeys& asked) const {
    const int lane = lane_of_four();
    const uint32_t at[2] = {clamped(position), clamped(position + 8)};
    const uint32_t scaled = lane / 2 == 0 ? at[0] : at[1];
    const uint8_t *codes[2], *scale;
    asked.is_held = true;
    if constexpr (kPaged) {
      const auto id = static_cast<int32_t>(page);
      asked.is_held = has_column(at[0] >> params.page_shift) && params.pages.holds(id);
      const uint32_t mask = (1u << params.page_shift) - 1;
      const uint8_t* const from =
          asked.is_held ? params.pages.data + id * params.pages.page_stride_bytes : spare;
      const uint32_t held = asked.is_held ? mask : 0;
      codes[0] = from + kDim * (at[0] & held);
      codes[1] = from + kDim * (at[1] & held);
      scale = from + (asked.is_held ? kDim << params.page_shift : 0) + 4 * (scaled & held);
    } else {
      codes[0] = params.k_fp8.data + at[0] * params.k_fp8.stride[0];
      codes[1] = params.k_fp8.data + at[1] * params.k_fp8.stride[0];
      scale = reinterpret_cast<const uint8_t*>(params.k_scale + scaled);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      cuda::load_ahead<kOnce>(asked.low[i], codes[i] + 16 * lane);
      cuda::load_ahead<kOnce>(asked.high[i], codes[i] + 16 * lane + 64);
    }
    cuda::load_ahead(asked.scale, scale);
  }
};

// Any addresses and pages, and keys of fewer channels.
template <bool kPaged, bool kOnce>
struct KeyReader<kPaged, false, kOnce> {
  const Params& params;
  uint32_t end;
  int32_t request;
  const uint8_t* spare;

  __device__ void find_page(uint32_t) {}
  __device__ void ask(uint32_t position, AskedKeys& asked) const {
    const int lane = lane_of_four();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = position + 8 * i;
      bool present = at < end;
      const uint8_t *codes = nullptr, *scale = nullptr;
      if (present) {
        if constexpr (kPaged) {
          int32_t column, offset;
          index_rows::split_position(params, static_cast<int32_t>(at), column, offset);
          const int64_t page = index_rows::page_at(params, request, column);
          present = page >= 0;
          codes = params.pages.codes(page, offset);
          scale = params.pages.scale(page, offset);
        } else {
          codes = params.k_fp8.row(at);
          scale = reinterpret_cast<const uint8_t*>(params.k_scale + at);
        }
      }
      if (lane / 2 == i) asked.is_held = present;
      if (!present) continue;
      asked.low[i] = index_rows::load_codes<1>(codes, 16 * lane, params.head_dim);
      asked.high[i] = index_rows::load_codes<1>(codes, 64 + 16 * lane, params.head_dim);
      if (lane / 2 == i) asked.scale = __float_as_uint(cuda::load_float<false>(scale));
    }
  }
};

// A of the four steps.
__device__ __forceinline__ void to_operands(const AskedKeys& asked, WgmmaA (&keys)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    keys[s] = {{index_rows::word_of(asked.low[0], s), index_rows::word_of(asked.low[1], s),
                index_rows::word_of(asked.high[0], s), index_rows::word_of(asked.high[1], s)}};
  }
}

template <int kN>
__device__ __forceinline__ void multiply(const WgmmaA (&keys)[kSteps], PanelMatrix queries,
                                         WgmmaSums<kN>& sums) {
  cuda::wgmma_fence();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    cuda::wgmma_e4m3(sums, keys[s], queries.advanced(32 * s), s > 0 ? 1 : 0);
  }
  cuda::wgmma_commit();
}

// The row that a thread writes logits of, in a series: of keys key_of_thread() + 8 * (lane / 2).
struct Target {
  float* logits;  // of position 0
  uint32_t begin;
  uint32_t end;
};

// Weights 4 k .. 4 k + 3 of row r of a series, of the thread's lane of four.
struct WeightsInMemory {
  const float4* first;
  __device__ float4 operator()(int r, int k) const { return first[16 * r + 4 * k]; }
};
struct WeightsInRegisters {
  float4 x[2][4];
  __device__ float4 operator()(int r, int k) const { return x[r][k]; }
};

// Weighs the products of a series and adds up heads; writes one logit. `position` as for KeyReader.
template <int kRows, class Weights>
__device__ __forceinline__ void finish(const WgmmaSums<64 * kRows>& sums, const Weights& weights,
                                       uint32_t scale, bool is_held, uint32_t position,
                                       const Target& target) {
  constexpr unsigned kAll = 0xFFFFFFFF;
  float sum[kRows][2];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = sum[r][1] = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float4 four = weights(r, k);
      const float weight[4] = {four.x, four.y, four.z, four.w};
      const float* const products = &sums.x[32 * r + 8 * k];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[r][0] = fmaf(weight[i], cuda::relu(products[4 * (i / 2) + i % 2]), sum[r][0]);
        sum[r][1] = fmaf(weight[i], cuda::relu(products[4 * (i / 2) + i % 2 + 2]), sum[r][1]);
      }
    }
  }
  const int lane = lane_of_four();
  float key_sum[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (kRows == 1) {
      key_sum[i] = sum[0][i] + __shfl_xor_sync(kAll, sum[0][i], 1);
    } else {
      const bool second = lane % 2 != 0;
      key_sum[i] = (second ? sum[1][i] : sum[0][i]) +
                   __shfl_xor_sync(kAll, second ? sum[0][i] : sum[1][i], 1);
    }
  }
  const bool upper = lane / 2 != 0;
  const float total =
      (upper ? key_sum[1] : key_sum[0]) + __shfl_xor_sync(kAll, upper ? key_sum[0] : key_sum[1], 2);
  const uint32_t at = position + 8 * (lane / 2);
  if (at >= target.begin && at < target.end) {
    target.logits[at] = is_held ? __uint_as_float(scale) * total : index_rows::kNegInf;
  }
}

// The rows of a warpgroup, as far as they are of the run.
template <bool kPaged, class Shape>
struct OwnRows {
  const Params& params;
  const Run& run;
  int64_t first_row;  // of the group
  int first;          // own rows are first .. first + kRows - 1 of the group

  __device__ bool any() const { return first < run.next && first + Shape::kRows > run.first; }
  __device__ int64_t row(int r) const { return first_row + first + r; }
  __device__ Window window(int r) const {
    const int i = first + r;
    if (i < run.first || i >= run.next) return Window{0, 0, 0};
    return index_rows::window_of<kPaged>(params, first_row + i);
  }
};

// Queries to shared memory in the order of channels that the keys have; zeros where there are none.
template <bool kPaged, bool kWide, class Shape>
__device__ __forceinline__ void load_queries(const OwnRows<kPaged, Shape>& own, uint8_t* queries) {
  const Params& params = own.params;
  const int lane = threadIdx.x % kGroupThreads;
#pragma unroll 1
  for (int r = 0; r < Shape::kRows; ++r) {
    const bool present = !own.window(r).is_empty();
#pragma unroll
    for (int i = 0; i < kHeads * kDim / 16; i += kGroupThreads) {
      const int head = (i + lane) / 8, piece = (i + lane) % 8;
      uint4 codes = make_uint4(0, 0, 0, 0);
      if (present && head < params.num_heads) {
        codes = index_rows::load_codes < kWide
                    ? 16
                    : 1 > (params.q_fp8.row(own.row(r), head), 16 * piece, params.head_dim);
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int at = cuda::panel_offset(kHeads * r + head, 2 * s + piece / 4) + piece % 4 * 4;
        *reinterpret_cast<uint32_t*>(queries + at) = index_rows::word_of(codes, s);
      }
    }
  }
}

// Head 8 j + 2 lane + i of a row is weight i + 2 j of its lane: float 2 (j % 2) + i of
// [j / 2][lane].
template <bool kPaged, class Shape>
__device__ __forceinline__ void load_weights(const OwnRows<kPaged, Shape>& own,
                                             float4 (*weights)[4][4]) {
#pragma unroll 1
  for (int at = threadIdx.x % kGroupThreads; at < kHeads * Shape::kRows; at += kGroupThreads) {
    const int r = at / kHeads, k = at / 16 % 4, lane = at / 4 % 4, i = at % 4;
    const int head = 16 * k + i / 2 * 8 + 2 * lane + i % 2;
    const bool present = head < own.params.num_heads && !own.window(r).is_empty();
    reinterpret_cast<float*>(weights)[at] =
        present ? own.params.head_weight(own.row(r), head) : 0.0f;
  }
}

template <bool kPaged, class Shape>
__device__ __forceinline__ Target find_target(const OwnRows<kPaged, Shape>& own, int series) {
  const int lane = lane_of_four();
  const int r = Shape::kRows == 1 ? 0 : 2 * series + lane % 2;
  const Window window = own.window(r);
  const bool writes = Shape::kRows > 1 || lane % 2 == 0;
  const auto& logits = own.params.logits;
  return {logits.data + (own.row(r) * logits.stride[0] - window.begin),
          static_cast<uint32_t>(window.begin),
          static_cast<uint32_t>(writes ? window.end : window.begin)};
}

// Tiles [first_tile, first_tile + num_tiles) of a run.
template <bool kPaged, bool kWide, class Shape>
__device__ __forceinline__ void score_run(const Params& params, const Run& run, int64_t group,
                                          int64_t first_tile, int64_t num_tiles,
                                          SharedMemory<Shape>& shared) {
  constexpr int kRows = Shape::kRows;
  const int warpgroup = own_warpgroup<Shape>();
  const OwnRows<kPaged, Shape> own{params, run, group * params.group_rows, warpgroup * kRows};
  if (!own.any()) return;
  uint8_t* const queries = shared.queries[warpgroup * kRows];
  load_queries<kPaged, kWide, Shape>(own, queries);
  load_weights<kPaged, Shape>(own, &shared.weights[warpgroup * kRows]);
  Target targets[Shape::kSeries];
#pragma unroll
  for (int i = 0; i < Shape::kSeries; ++i) targets[i] = find_target<kPaged, Shape>(own, i);
  cuda::shared_stores_before_wgmma();
  sync_warpgroup<Shape>();

  const WeightsInMemory weights{&shared.weights[warpgroup * kRows][0][lane_of_four()]};
  // A query that may be read: the first row of a run has keys.
  const uint8_t* const spare = params.q_fp8.row(own.first_row + run.first, 0);
  // The last keys are those of the share.
  const int64_t end_key = run.keys.begin + (first_tile + num_tiles) * kKeys;
  KeyReader<kPaged, kWide, Shape::kGroups == 1> reader{
      params, static_cast<uint32_t>(end_key < run.keys.end ? end_key : run.keys.end),
      run.keys.request, spare};
  const auto tiles = static_cast<int>(num_tiles);
  auto position = static_cast<uint32_t>(run.keys.begin + first_tile * kKeys + key_of_thread());
  const PanelMatrix matrix = cuda::panel_matrix(queries, kRows * kQueryBytes);
  AskedKeys asked{};
  WgmmaA keys[kSteps] = {};
  reader.find_page(position);
  reader.ask(position, asked);
  reader.find_page(position + kKeys);
  if constexpr (Shape::kSeries == 1) {
    WgmmaSums<64 * kRows> sums = {};
#pragma unroll 1
    for (int i = 0; i < tiles; ++i, position += kKeys) {
      to_operands(asked, keys);
      const uint32_t scale = asked.scale;
      const bool is_held = asked.is_held;
      multiply(keys, matrix, sums);
      reader.ask(position + kKeys, asked);
      reader.find_page(position + 2 * kKeys);
      cuda::wgmma_wait<0>();
      cuda::wgmma_pin(sums);
      cuda::wgmma_pin(keys);
      finish<kRows>(sums, weights, scale, is_held, position, targets[0]);
    }
  } else {
    static_assert(Shape::kSeries == 2 && Shape::kSeriesRows == 2);
    WgmmaSums<128> first = {}, second = {};
    // Those of the first rows in registers, as many as there are.
    WeightsInRegisters first_weights;
#pragma unroll
    for (int i = 0; i < 8; ++i) first_weights.x[i / 4][i % 4] = weights(i / 4, i % 4);
    const WeightsInMemory second_weights{weights.first + 32};
#pragma unroll 1
    for (int i = 0; i < tiles; ++i, position += kKeys) {
      to_operands(asked, keys);
      const uint32_t scale = asked.scale;
      const bool is_held = asked.is_held;
      multiply(keys, matrix, first);
      multiply(keys, matrix.advanced(2 * kQueryBytes), second);
      reader.ask(position + kKeys, asked);
      reader.find_page(position + 2 * kKeys);
      cuda::wgmma_wait<1>();
      cuda::wgmma_pin(first);
      finish<2>(first, first_weights, scale, is_held, position, targets[0]);
      cuda::wgmma_wait<0>();
      cuda::wgmma_pin(second);
      cuda::wgmma_pin(keys);
      finish<2>(second, second_weights, scale, is_held, position, targets[1]);
    }
  }
}

template <bool kPaged, bool kWide, class Shape>
__device__ __forceinline__ void score_share(const Params& params, SharedMemory<Shape>& shared) {
  find_share<kPaged, Shape>(params, shared);
  const int warpgroup = own_warpgroup<Shape>();
  while (true) {
    const Share share = shared.shares[warpgroup];
    if (share.num_tiles == 0) return;
    const Run run = find_run<kPaged, Shape>(params, share.group, share.first);
    const int64_t tiles = run.num_tiles() - share.tile;
    const int64_t taken = tiles <= 0 ? 0 : tiles < share.num_tiles ? tiles : share.num_tiles;
    sync_warpgroup<Shape>();  // all have read the share, and the queries
    if (threadIdx.x % kGroupThreads == 0) {
      const bool last = run.next >= rows_of(params, share.group);
      shared.shares[warpgroup] = {share.group + (last ? 1 : 0), tiles < 0 ? -tiles : 0,
                                  share.num_tiles - taken, last ? 0 : run.next};
    }
    if (taken > 0)
      score_run<kPaged, kWide, Shape>(params, run, share.group, share.tile, taken, shared);
    sync_warpgroup<Shape>();
  }
}

// Without these instructions the body is empty; the list of implementations refuses such devices.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#define FOVEA_SM90_BODY(...) __VA_ARGS__
#else
#define FOVEA_SM90_BODY(...)
#endif

template <bool kPaged, bool kWide, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    score(const __grid_constant__ Params params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    score_share<kPaged, kWide>(params, *reinterpret_cast<SharedMemory<Shape>*>(memory));
  })
}

#undef FOVEA_SM90_BODY

}  // namespace fovea::internal::index_sm90
