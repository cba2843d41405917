#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/bulk_copy.cuh"
#include "src/core/cuda/mbarrier.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/cuda/tensor_copy.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/index/cuda/index_logits_rows.cuh"
#include "src/index/cuda/index_logits_sm90/config.h"

// Keys are the rows of a product, 64 a warpgroup; the heads of queries are its columns. So a thread
// has 16 heads of two keys for a row: relu, weights and the sum over heads happen where the
// products are, and four lanes add up what they have.
//
// A warpgroup goes by turns of tiles of keys. A part of a turn is one series of products: of a tile
// and two rows (or one). There are sums of two parts, so that one is multiplied while the other is
// weighed:
//
//   memory          the keys of the turns behind
//   tensor cores    part 0 | part 1 | part 2 | part 3 |
//   threads                | weigh 0| weigh 1| weigh 2| weigh 3
//
// Between turns nothing is under way: the compiler keeps no products across the end of a loop.
// Others of the multiprocessor multiply then. With one row memory decides, a turn is one part.
//
// Of one row a warp brings 16 of the 64 keys of a tile. Of 2 to 4 rows of pages, each tile of a
// turn is brought by one warp, a lane of which starts bulk copies. Two warpgroups with rows of
// their own share the keys: a warp brings 8, and neither may be more than a turn ahead of the
// other.
//
// Work is counted in tiles: 64 keys of a run, which are neighbouring rows of a group that read the
// same keys. Every block counts all tiles and takes an even share of them, wherever it begins.
//
// The order in which products, heads and lanes are added is the same for every number of rows.
namespace fovea::internal::index_sm90 {

using cuda::PanelMatrix;
using cuda::WgmmaSums;
using index_rows::Window;

struct Params : index_rows::Inputs {
  using Inputs::Inputs;

  int32_t group_rows = 1;  // rows of a block
  int64_t num_groups = 0;
  int64_t num_blocks = 0;
  double share = 0;                 // of a block: 1 / num_blocks
  cuda::PanelMap codes_of_pages{};  // pages that PageReader reads
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
  uint8_t tiles[Shape::kStages][kTileBytes];  // of 64 keys
  float scales[Shape::kStages][kKeys];
  uint8_t is_held[Shape::kStages][kKeys];
  float4 weights[Shape::kBlockRows][4][4];  // see load_weights
  int64_t sums[cuda::kWarpThreads + 1];
  // Here and not in the registers of threads that have none to spare.
  Share shares[Shape::kGroups];
  // Two warpgroups: the keys of a turn, for every fourth. Pages by bulk copies: those of a stage.
  cuda::Mbarrier is_there[Shape::kStages];
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
  const auto tiles_of = [&](int64_t group) {
    int64_t tiles = 0;
#pragma unroll 1
    for (int row = 0; row < rows_of(params, group);) {
      const Run run = find_run<kPaged, Shape>(params, group, row);
      tiles += run.num_tiles();
      row = run.next;
    }
    return tiles;
  };
  int64_t first = 0, own, upto, total;
  if (params.num_groups == 1) {
    own = upto = total = tiles_of(0);
  } else {
    const int64_t each = (params.num_groups + Shape::kThreads - 1) / Shape::kThreads;
    first = index_rows::clamp(threadIdx.x * each, 0, params.num_groups);
    const int64_t last = index_rows::clamp(first + each, 0, params.num_groups);
    own = 0;
#pragma unroll 1
    for (int64_t group = first; group < last; ++group) own += tiles_of(group);
    upto = cuda::block_inclusive_sum(own, shared.sums, &total);
  }
  // Blocks agree on where a share ends and the next begins, which need not be exact.
  const auto begin_of = [&](int64_t block) {
    return block == params.num_blocks
               ? total
               : static_cast<int64_t>(static_cast<double>(total) *
                                      (static_cast<double>(block) * params.share));
  };
  const int64_t begin = begin_of(blockIdx.x), end = begin_of(int64_t{blockIdx.x} + 1);
  if (begin >= end) {
    if (threadIdx.x < Shape::kGroups) shared.shares[threadIdx.x].num_tiles = 0;
  } else if (upto - own <= begin && begin < upto) {
    Share share{first, begin - (upto - own), end - begin, 0};
#pragma unroll 1
    for (; share.group + 1 < params.num_groups; ++share.group) {
      const int64_t tiles = tiles_of(share.group);
      if (share.tile < tiles) break;
      share.tile -= tiles;
    }
    for (int i = 0; i < Shape::kGroups; ++i) shared.shares[i] = share;
  }
  __syncthreads();
}

// Of sums a thread has keys key_of_thread() and + 8, heads 8 j + 2 lane_of_four() and + 1.
__device__ inline int key_of_thread() {
  return threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 32 / 4;
}
__device__ inline int lane_of_four() { return threadIdx.x % 4; }

// The number is known to the compiler, which has a copy of the program for every warpgroup: what a
// warpgroup has at addresses of its own needs no registers. And blocks whose barriers it does not
// know take all 16, and no more than four of them fit a multiprocessor.
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  cuda::sync_some(1 + warpgroup, kGroupThreads);
}

// Where a stage of a warpgroup is.
struct Stage {
  uint8_t* codes;
  float* scales;
  uint8_t* is_held;
};

// Brings the keys of the warp from position to position, 64 a step, to shared memory: those up to
// `end`, and in place of others zeros or anything.
template <bool kPaged, bool kWide, int kWarpKeys>
struct KeyReader;

// Codes at multiples of 16 bytes, keys side by side; those of the warp lie in one page, of a power
// of two of keys. A copy of the warp takes 4 keys: `piece` of 16 bytes of key `key`.
template <bool kPaged, int kWarpKeys>
struct KeyReader<kPaged, true, kWarpKeys> {
  static constexpr int kTurn = 32;  // tiles whose pages the lanes of a warp have
  const Params& params;
  uint32_t position;  // of the tile that is fetched next; may go past `end`
  uint32_t end;
  int32_t request;
  int warp_key;
  int offset[2];  // of keys 0..3 and 4..7 in a tile; two more are 8 rows below
  // Ragged: of the tile that is fetched next.
  const uint8_t* codes;
  const float* scale;
  // Paged. The lane's tile is one of kTurn, of which `tile` is fetched next: where its codes are,
  // null where it has no page, and what the page table has for its tile kTurn later.
  uint32_t tile;
  uint64_t codes_of_lane;
  uint32_t next_page;
  uint32_t held;  // bit b: the tile b + 1 before the next has a page

  __device__ KeyReader(const Params& all, const Run& run, uint32_t first_key, uint32_t end_key)
      : params(all), end(end_key), request(run.keys.request), tile(0), held(0) {
    const int lane = threadIdx.x % 32, key = lane / 8, piece = lane % 8;
    warp_key = threadIdx.x / 32 * kWarpKeys;
    position = first_key + warp_key;
    offset[0] = cuda::panel_offset(warp_key + key, piece);
    offset[1] = cuda::panel_offset(warp_key + key + 4, piece);
    cuda::hold(offset[0]);
    cuda::hold(offset[1]);
    if constexpr (kPaged) {
      find_pages(position);
    } else {
      codes = params.k_fp8.data + int64_t{position} * kDim + 16 * lane;
      scale = params.k_scale + position + lane % kWarpKeys;
    }
  }

  __device__ bool has_page(uint32_t at) const {
    return at < end && at >> params.page_shift < params.page_table.shape[1];
  }
  __device__ uint32_t in_page(uint32_t at) const { return at & ((1u << params.page_shift) - 1); }
  // Starts to read the pages of the tiles from that at `first` on, one a lane.
  __device__ void find_pages(uint32_t first) {
    const uint32_t at = first + threadIdx.x % 32 * kKeys;
    cuda::load_ahead(next_page, has_page(at)
                                    ? params.page_table.row(request) + (at >> params.page_shift)
                                    : params.row_to_request);
  }
  __device__ void take_pages() {
    const uint32_t at = position + threadIdx.x % 32 * kKeys;
    const auto id = static_cast<int32_t>(next_page);
    codes_of_lane = 0;
    if (has_page(at) && params.pages.holds(id)) {
      codes_of_lane = reinterpret_cast<uint64_t>(
          params.pages.data + id * params.pages.page_stride_bytes + in_page(at) * kDim);
    }
    find_pages(position + kTurn * kKeys);
  }

  __device__ void copy(const Stage& stage, int32_t count) const {
    const int lane = threadIdx.x % 32;
    const bool all = count >= kWarpKeys;
#pragma unroll
    for (int i = 0; i < kWarpKeys / 4; ++i) {
      cuda::copy_async<16>(stage.codes + offset[i % 2] + i / 2 * 8 * cuda::kPanelRowBytes,
                           codes + i * 512, all || 4 * i + lane / 8 < count);
    }
    // Several lanes bring the same scale: a branch takes longer.
    const int key = lane % kWarpKeys;
    cuda::copy_async<4>(stage.scales + warp_key + key, scale, all || key < count);
  }

  // Starts to copy the tile, and goes to the next. `first`: the number of the tile may be a
  // multiple of kTurn.
  __device__ void fetch(const Stage& stage, bool first) {
    const int lane = threadIdx.x % 32;
    if constexpr (kPaged) {
      if (first && tile == 0) take_pages();
      const uint64_t from = __shfl_sync(0xFFFFFFFF, codes_of_lane, tile);
      tile = (tile + 1) % kTurn;
      const bool is_held = from != 0;
      held = held << 1 | (is_held ? 1 : 0);
      if (kWarpKeys < 16 && lane == 0) stage.is_held[warp_key / kWarpKeys] = is_held ? 1 : 0;
      // Keys of the page past the last one are read as well.
      if (is_held) {
        codes = reinterpret_cast<const uint8_t*>(from) + 16 * lane;
        scale = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(from) +
                                               (kDim << params.page_shift) -
                                               in_page(position) * (kDim - 4)) +
                lane % kWarpKeys;
        copy(stage, kWarpKeys);
      }
    } else {
      const auto count = static_cast<int32_t>(end - position);  // may be negative
      if (count >= kWarpKeys) {
        copy(stage, kWarpKeys);
      } else {
        copy(stage, count);
      }
      codes += kKeys * kDim;
      scale += kKeys;
    }
    position += kKeys;
  }
  // Of the tile that was fetched `back` before the last one.
  __device__ bool is_held(const Stage& stage, int key, int back) const {
    if constexpr (!kPaged) return true;
    if constexpr (kWarpKeys < 16) return stage.is_held[key / kWarpKeys] != 0;
    return (held >> back & 1) != 0;
  }
};

// Brings tiles of keys from pages of at least 16 at multiples of 16 bytes, each by one warp: a
// piece of a tile that is a page or lies in one is two copies that one lane starts. Every warp that
// calls it has one tile of a turn of kTiles.
template <int kTiles>
struct PageReader {
  static constexpr int kStep = kTiles * kKeys;
  const Params& params;
  uint32_t position;  // of the warp's tile that is fetched next
  uint32_t end;
  int32_t request;
  int piece_shift;     // log2 of the keys of a piece
  int piece;           // of those whose pages the lanes have, the first that is fetched next
  int32_t page;        // of the lane's piece, -1: none
  uint32_t next_page;  // what the page table has for the lane's piece 32 later

  __device__ PageReader(const Params& all, const Run& run, uint32_t first_key, uint32_t end_key)
      : params(all),
        position(first_key + threadIdx.x / 32 * kKeys),
        end(end_key),
        request(run.keys.request),
        piece_shift(all.page_shift < 6 ? all.page_shift : 6),
        piece(0),
        page(-1) {
    static_assert(kKeys == 1 << 6);
    find_pages(position);
  }

  __device__ uint32_t of_lane(uint32_t first) const {
    const uint32_t lane = threadIdx.x % 32;
    const int in_tile = 6 - piece_shift;  // log2 of the pieces of a tile
    return first + (lane >> in_tile) * kStep + ((lane & ((1U << in_tile) - 1)) << piece_shift);
  }
  __device__ bool has_page(uint32_t at) const {
    return at < end && at >> params.page_shift < params.page_table.shape[1];
  }
  // Starts to read the pages of the warp's 32 pieces from that at `first` on, one a lane.
  __device__ void find_pages(uint32_t first) {
    const uint32_t at = of_lane(first);
    cuda::load_ahead(next_page, has_page(at)
                                    ? params.page_table.row(request) + (at >> params.page_shift)
                                    : params.row_to_request);
  }
  __device__ void take_pages() {
    const auto id = static_cast<int32_t>(next_page);
    page = has_page(of_lane(position)) && params.pages.holds(id) ? id : -1;
    find_pages(position + kTiles * (32U << piece_shift));
  }

  // By one lane. Keys of the page past the last one are read as well.
  __device__ void copy(const Stage& stage, int32_t from, uint32_t at, cuda::Mbarrier& there) const {
    const auto row = static_cast<int>(at & ((1U << params.page_shift) - 1));
    const auto first = static_cast<int>(at - position);
    cuda::copy_panel(stage.codes + first * kDim, params.codes_of_pages, row, from, there);
    cuda::copy_bulk(stage.scales + first,
                    params.pages.data + from * params.pages.page_stride_bytes +
                        (kDim << params.page_shift) + row * static_cast<int>(sizeof(float)),
                    static_cast<int>(sizeof(float)) << piece_shift, there,
                    cuda::cache_policy_once());
  }
  // Starts to bring the tile, which `there` counts, and goes to the warp's next.
  __device__ void fetch(const Stage& stage, cuda::Mbarrier& there) {
    constexpr unsigned kAll = 0xFFFFFFFF;
    const bool is_first = threadIdx.x % 32 == 0;
    auto* const is_held = reinterpret_cast<uint32_t*>(stage.is_held);
    if (piece == 0) take_pages();
    if (piece_shift == 6) {
      const int32_t from = __shfl_sync(kAll, page, piece);
      if (is_first) {
        *is_held = from >= 0 ? 0x01010101 : 0;
        cuda::mbarrier_arrive_expecting(
            there, from >= 0 ? kTileBytes + kKeys * static_cast<int>(sizeof(float)) : 0);
        if (from >= 0) copy(stage, from, position, there);
      }
      piece = (piece + 1) % 32;
    } else {
      // Two or four pieces: 32 or 16 keys each.
      const int pieces = kKeys >> piece_shift;
      const uint32_t of_piece = piece_shift == 5 ? 0x0101 : 0x01;
      uint32_t held = 0;
#pragma unroll 1
      for (int i = 0; i < pieces; ++i) {
        if (__shfl_sync(kAll, page, piece + i) >= 0) held |= of_piece << (i << piece_shift) / 2;
      }
      if (is_first) {
        *is_held = held;
        cuda::mbarrier_arrive_expecting(
            there, __popc(held) * 16 * (kDim + static_cast<int>(sizeof(float))));
      }
#pragma unroll 1
      for (int i = 0; i < pieces; ++i) {
        const int32_t from = __shfl_sync(kAll, page, piece + i);
        if (is_first && from >= 0)
          copy(stage, from, position + (static_cast<uint32_t>(i) << piece_shift), there);
      }
      piece = (piece + pieces) % 32;
    }
    position += kStep;
  }
};

// Any addresses and pages, and keys of fewer channels.
template <bool kPaged, int kWarpKeys>
struct KeyReader<kPaged, false, kWarpKeys> {
  const Params& params;
  uint32_t position;
  uint32_t end;
  int32_t request;

  __device__ KeyReader(const Params& all, const Run& run, uint32_t first_key, uint32_t end_key)
      : params(all),
        position(first_key + threadIdx.x % kGroupThreads / 2),
        end(end_key),
        request(run.keys.request) {}

  __device__ void fetch(const Stage& stage, bool) {
    const int key = threadIdx.x % kGroupThreads / 2;
    bool present = position < end;
    const uint8_t *codes = nullptr, *scale = nullptr;
    if (present) {
      if constexpr (kPaged) {
        int32_t column, in_page;
        index_rows::split_position(params, static_cast<int32_t>(position), column, in_page);
        const int64_t id = index_rows::page_at(params, request, column);
        present = id >= 0;
        codes = params.pages.codes(id, in_page);
        scale = params.pages.scale(id, in_page);
      } else {
        codes = params.k_fp8.row(position);
        scale = reinterpret_cast<const uint8_t*>(params.k_scale + position);
      }
    }
#pragma unroll 1
    for (int piece = threadIdx.x % 2; piece < kDim / 16; piece += 2) {
      uint4 word = make_uint4(0, 0, 0, 0);
      if (present) word = index_rows::load_codes<1>(codes, 16 * piece, params.head_dim);
      *reinterpret_cast<uint4*>(stage.codes + cuda::panel_offset(key, piece)) = word;
    }
    if (threadIdx.x % 2 == 0) {
      stage.is_held[key] = present ? 1 : 0;
      stage.scales[key] = present ? cuda::load_float<false>(scale) : 0.0f;
    }
    position += kKeys;
  }
  __device__ static bool is_held(const Stage& stage, int key, int) {
    return stage.is_held[key] != 0;
  }
};

template <int kN>
__device__ __forceinline__ void multiply(PanelMatrix keys, PanelMatrix queries,
                                         WgmmaSums<kN>& sums) {
  cuda::wgmma_fence();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    cuda::wgmma_e4m3(sums, keys.advanced(32 * s), queries.advanced(32 * s), s > 0 ? 1 : 0);
  }
  cuda::wgmma_commit();
}

// The row that a thread writes logits of, in a series.
struct Target {
  float* logits;
  uint32_t begin;  // key of column 0
  uint32_t count;
};

// Weights 4 k .. 4 k + 3 of row r of a series, of the thread's lane of four.
struct WeightsInMemory {
  const float4* first;
  __device__ float4 operator()(int r, int k) const { return first[16 * r + 4 * k]; }
};
template <int kRows>
struct WeightsInRegisters {
  float4 x[kRows][4];
  __device__ explicit WeightsInRegisters(const WeightsInMemory& from) {
#pragma unroll
    for (int i = 0; i < 4 * kRows; ++i) x[i / 4][i % 4] = from(i / 4, i % 4);
  }
  struct Series {
    const WeightsInRegisters& all;
    int first_row;
    __device__ float4 operator()(int r, int k) const { return all.x[first_row + r][k]; }
  };
  __device__ Series of(int first_row) const { return {*this, first_row}; }
};

// Weighs the products of a series and adds up heads; writes the logit of key `at`.
template <int kRows, class Weights>
__device__ __forceinline__ void finish(const WgmmaSums<64 * kRows>& sums, const Weights& weights,
                                       float scale, bool is_held, uint32_t at,
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
  const uint32_t column = at - target.begin;
  if (column < target.count) {
    cuda::store_global(target.logits + column, is_held ? scale * total : index_rows::kNegInf);
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

// Queries to shared memory; zeros where there are none.
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
      uint8_t* const to = queries + cuda::panel_offset(kHeads * r + head, piece);
      const bool is_head = present && head < params.num_heads;
      const uint8_t* const from = params.q_fp8.row(own.row(r), head);
      if constexpr (kWide) {
        cuda::copy_async<16>(to, from + 16 * piece, is_head);
      } else {
        uint4 codes = make_uint4(0, 0, 0, 0);
        if (is_head) codes = index_rows::load_codes<1>(from, 16 * piece, params.head_dim);
        *reinterpret_cast<uint4*>(to) = codes;
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
    cuda::copy_async<4>(reinterpret_cast<float*>(weights) + at,
                        own.params.head_weight.row(own.row(r)) + head, present);
  }
}

// Keys from `end` on are those of another share.
template <bool kPaged, class Shape>
__device__ __forceinline__ Target find_target(const OwnRows<kPaged, Shape>& own, int series,
                                              uint32_t end) {
  const int lane = lane_of_four();
  const int r = Shape::kRows == 1 ? 0 : 2 * series + lane % 2;
  Window window = own.window(r);
  const auto last = static_cast<int32_t>(end);
  if (window.end > last) window.end = window.begin < last ? last : window.begin;
  const bool writes = Shape::kRows > 1 || lane % 2 == 0;
  const auto& logits = own.params.logits;
  return {logits.data + own.row(r) * logits.stride[0], static_cast<uint32_t>(window.begin),
          static_cast<uint32_t>(writes ? window.end - window.begin : 0)};
}

// What a warpgroup knows of tiles [first_tile, first_tile + num_tiles) of a run.
struct Part {
  int tiles;
  uint32_t first_key;
  uint32_t end;  // the last keys are those of the share

  __device__ Part(const Run& run, int64_t first_tile, int64_t num_tiles)
      : tiles(static_cast<int>(num_tiles)),
        first_key(static_cast<uint32_t>(run.keys.begin + first_tile * kKeys)) {
    const int64_t end_key = run.keys.begin + (first_tile + num_tiles) * kKeys;
    end = static_cast<uint32_t>(end_key < run.keys.end ? end_key : run.keys.end);
  }
};

// Of a warpgroup: where its threads write logits of every series.
template <class Shape>
struct Targets {
  Target of[Shape::kSeries];
  int key;  // of a tile

  template <bool kPaged>
  __device__ Targets(const OwnRows<kPaged, Shape>& own, uint32_t end)
      : key(key_of_thread() + 8 * (lane_of_four() / 2)) {
#pragma unroll
    for (int i = 0; i < Shape::kSeries; ++i) {
      of[i] = find_target<kPaged, Shape>(own, i, end);
      cuda::hold(of[i].logits);
      cuda::hold(of[i].begin);
      cuda::hold(of[i].count);
    }
    cuda::hold(key);
  }
};

// A turn of several tiles that are there. `fetch` starts to bring tiles to the places of the last
// turn. No wait for memory stands between the products: the compiler puts them in series around it.
template <class Shape, class StageOf, class IsHeld, class Fetch>
__device__ __forceinline__ void score_turn(const StageOf& stage_of, const IsHeld& is_held,
                                           const Fetch& fetch, PanelMatrix queries,
                                           const WeightsInRegisters<Shape::kRows>& weights,
                                           uint32_t first_key, const Targets<Shape>& targets,
                                           WgmmaSums<64 * Shape::kSeriesRows> (&sums)[2]) {
  // Part p of a turn: tile p / kSeries, series p % kSeries of its rows.
  constexpr int kParts = Shape::kTiles * Shape::kSeries;
  const auto start = [&](int part) {
    multiply(cuda::panel_matrix(stage_of(part / Shape::kSeries).codes, kTileBytes),
             queries.advanced(part % Shape::kSeries * Shape::kSeriesRows * kQueryBytes),
             sums[part % 2]);
  };
  start(0);
  start(1);
  fetch();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int tile = part / Shape::kSeries, series = part % Shape::kSeries;
    const float scale = stage_of(tile).scales[targets.key];
    const bool is_key = is_held(tile);
    if (part < kParts - 1) {
      cuda::wgmma_wait<1>();
    } else {
      cuda::wgmma_wait<0>();
    }
    cuda::wgmma_pin(sums[part % 2]);
    finish<Shape::kSeriesRows>(sums[part % 2], weights.of(series * Shape::kSeriesRows), scale,
                               is_key, first_key + tile * kKeys + targets.key, targets.of[series]);
    // These products need the registers: what was weighed cannot wait for the end of the turn.
    if (part < kParts - 2) start(part + 2);
  }
}

// Pages by bulk copies. `fetched`: tiles so far.
template <class Shape>
__device__ __forceinline__ void score_pages(const Params& params, const Run& run, int64_t group,
                                            int64_t first_tile, int64_t num_tiles,
                                            SharedMemory<Shape>& shared, uint32_t& fetched) {
  const OwnRows<true, Shape> own{params, run, group * params.group_rows, 0};
  if (!own.any()) return;
  const Part part(run, first_tile, num_tiles);
  PageReader<Shape::kTiles> reader(params, run, part.first_key, part.end);
  load_queries<true, true, Shape>(own, shared.queries[0]);
  load_weights<true, Shape>(own, shared.weights);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const bool brings = warp < Shape::kTiles;
  const int tiles = (part.tiles + Shape::kTiles - 1) / Shape::kTiles * Shape::kTiles;
  auto stage = static_cast<int>(fetched % Shape::kStages);  // of the turn's first tile
  uint32_t phase = fetched / Shape::kStages;
  fetched += static_cast<uint32_t>(tiles);
  const auto stage_at = [&](int i) {
    return Stage{shared.tiles[i], shared.scales[i], shared.is_held[i]};
  };
  const auto fetch = [&](int i) { reader.fetch(stage_at(i), shared.is_there[i]); };
  if (brings) {
#pragma unroll 1
    for (int i = warp; i < Shape::kAhead && i < tiles; i += Shape::kTiles)
      fetch((stage + i) % Shape::kStages);
  }
  const Targets<Shape> targets(own, part.end);
  const WeightsInMemory weights{&shared.weights[0][0][lane_of_four()]};
  const PanelMatrix matrix = cuda::panel_matrix(shared.queries[0], Shape::kRows * kQueryBytes);
  cuda::wait_for_copies();  // queries and weights
  cuda::shared_stores_before_wgmma();
  sync_warpgroup(0);
  const WeightsInRegisters<Shape::kRows> all_weights(weights);
  WgmmaSums<64 * Shape::kSeriesRows> sums[2] = {};
#pragma unroll 1
  for (int i = 0; i < tiles; i += Shape::kTiles) {
    if (i > 0) sync_warpgroup(0);  // all warps are done with the last turn
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile)
      cuda::mbarrier_wait(shared.is_there[stage + tile], phase);
    score_turn<Shape>([&](int tile) { return stage_at(stage + tile); },
                      [&](int tile) { return shared.is_held[stage + tile][warp] != 0; },
                      [&] {
                        if (brings && i + Shape::kAhead < tiles)
                          fetch((stage == 0 ? Shape::kStages : stage) - Shape::kTiles + warp);
                      },
                      matrix, all_weights, part.first_key + i * kKeys, targets, sums);
    stage += Shape::kTiles;
    if (stage == Shape::kStages) {
      stage = 0;
      ++phase;
    }
  }
}

// Keys that every warp brings a part of: `turn` counts those that two warpgroups take together.
template <int kWarpgroup, bool kPaged, bool kWide, class Shape>
__device__ __forceinline__ void score_run(const Params& params, const Run& run, int64_t group,
                                          int64_t first_tile, int64_t num_tiles,
                                          SharedMemory<Shape>& shared, uint32_t& turn) {
  constexpr int kRows = Shape::kRows;
  const OwnRows<kPaged, Shape> own{params, run, group * params.group_rows, kWarpgroup * kRows};
  if constexpr (Shape::kGroups == 1) {
    if (!own.any()) return;
  } else {
    // Both bring keys, whoever has rows. The places of the last ones are free.
    cuda::sync_roles(3, 2 * kGroupThreads);
  }
  const Part part(run, first_tile, num_tiles);
  KeyReader<kPaged, kWide, kKeys / (4 * Shape::kGroups)> reader(params, run, part.first_key,
                                                                part.end);
  uint8_t* const queries = shared.queries[kWarpgroup * kRows];
  load_queries<kPaged, kWide, Shape>(own, queries);
  load_weights<kPaged, Shape>(own, &shared.weights[kWarpgroup * kRows]);
  const PanelMatrix matrix = cuda::panel_matrix(queries, kRows * kQueryBytes);
  const auto stage_of = [&](int i) {
    const int stage = (turn * Shape::kTiles + i) % Shape::kStages;
    return Stage{shared.tiles[stage], shared.scales[stage], shared.is_held[stage]};
  };
  const auto fetch = [&](int i, bool first) {
    reader.fetch(stage_of(i), first);
    cuda::commit_copies();
  };
  // Queries and weights are of the first group of copies.
#pragma unroll 1
  for (int i = 0; i < Shape::kAhead; ++i) fetch(i, true);
  const Targets<Shape> targets(own, part.end);
  const WeightsInMemory weights{&shared.weights[kWarpgroup * kRows][0][lane_of_four()]};

  if constexpr (Shape::kGroups == 1) {
    static_assert(Shape::kTiles == 1);
    WgmmaSums<64> sums = {};
#pragma unroll 1
    for (int i = 0; i < part.tiles; ++i) {
      const Stage stage = stage_of(i);
      // The keys of the tile are there, and all warps are done with those of the last.
      cuda::wait_copies<Shape::kStages - 2>();
      cuda::shared_stores_before_wgmma();
      sync_warpgroup(kWarpgroup);
      multiply(cuda::panel_matrix(stage.codes, kTileBytes), matrix, sums);
      fetch(i + Shape::kAhead, true);
      const float scale = stage.scales[targets.key];
      const bool is_held = reader.is_held(stage, targets.key, Shape::kAhead);
      cuda::wgmma_wait<0>();
      cuda::wgmma_pin(sums);
      finish<1>(sums, weights, scale, is_held, part.first_key + i * kKeys + targets.key,
                targets.of[0]);
    }
  } else {
    // Says that the warp's keys of turn `of` are there, and waits for those of all warps. Who has
    // said so for a turn is done with the products two turns before it.
    constexpr int kTurns = Shape::kStages / Shape::kTiles;
    static_assert(kTurns == 4 && Shape::kAhead == 2 * Shape::kTiles);
    const auto arrive = [&](int of) {
      cuda::shared_stores_before_wgmma();
      __syncwarp();
      if (threadIdx.x % 32 == 0) cuda::mbarrier_arrive(shared.is_there[(turn + of) % kTurns]);
    };
    const auto wait_for_both = [&](int of) {
      cuda::mbarrier_wait(shared.is_there[(turn + of) % kTurns], (turn + of) / kTurns);
    };
    cuda::wait_copies<Shape::kTiles>();
    arrive(0);
    wait_for_both(0);
    const WeightsInRegisters<kRows> all_weights(weights);
    WgmmaSums<64 * Shape::kSeriesRows> sums[2] = {};
#pragma unroll 1
    for (int i = 0; i < part.tiles; i += Shape::kTiles) {
      cuda::wait_copies<0>();
      arrive(i / Shape::kTiles + 1);
      wait_for_both(i / Shape::kTiles);
      const auto fetch_turn = [&] {
#pragma unroll
        for (int tile = 0; tile < Shape::kTiles; ++tile) fetch(i + Shape::kAhead + tile, tile == 0);
      };
      score_turn<Shape>(
          [&](int tile) { return stage_of(i + tile); },
          [&](int tile) { return reader.is_held(stage_of(i + tile), targets.key, 0); }, fetch_turn,
          matrix, all_weights, part.first_key + i * kKeys, targets, sums);
    }
    // One turn more was said to be there than products were made of.
    const int turns = (part.tiles + Shape::kTiles - 1) / Shape::kTiles;
    wait_for_both(turns);
    turn += turns + 1;
  }
  cuda::wait_for_copies();  // of tiles past the last one: nothing was read
}

template <int kWarpgroup, bool kPaged, bool kWide, class Shape>
__device__ __forceinline__ void score_share(const Params& params, SharedMemory<Shape>& shared) {
  uint32_t count = 0;  // of tiles or turns so far
  while (true) {
    const Share share = shared.shares[kWarpgroup];
    if (share.num_tiles == 0) return;
    const Run run = find_run<kPaged, Shape>(params, share.group, share.first);
    const int64_t tiles = run.num_tiles() - share.tile;
    const int64_t taken = tiles <= 0 ? 0 : tiles < share.num_tiles ? tiles : share.num_tiles;
    sync_warpgroup(kWarpgroup);  // all have read the share, and the queries
    if (threadIdx.x % kGroupThreads == 0) {
      const bool last = run.next >= rows_of(params, share.group);
      shared.shares[kWarpgroup] = {share.group + (last ? 1 : 0), tiles < 0 ? -tiles : 0,
                                   share.num_tiles - taken, last ? 0 : run.next};
    }
    if (taken > 0) {
      if constexpr (Shape::kBulkPages) {
        score_pages<Shape>(params, run, share.group, share.tile, taken, shared, count);
      } else {
        score_run<kWarpgroup, kPaged, kWide, Shape>(params, run, share.group, share.tile, taken,
                                                    shared, count);
      }
    }
    sync_warpgroup(kWarpgroup);
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
    auto& shared = *reinterpret_cast<SharedMemory<Shape>*>(memory);
    if (threadIdx.x == 0) {
      // Two warpgroups: a warp brings a part of every tile.
      for (cuda::Mbarrier& barrier : shared.is_there)
        cuda::mbarrier_init(barrier, Shape::kGroups == 2 ? Shape::kThreads / 32 : 1);
      if constexpr (Shape::kBulkPages) {
        cuda::show_barriers_to_copies();
        cuda::prefetch_map(params.codes_of_pages);
      }
    }
    find_share<kPaged, Shape>(params, shared);
    // A shuffle tells the compiler that a warp stays together.
    if (Shape::kGroups == 1 ||
        __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x), 0) < kGroupThreads) {
      score_share<0, kPaged, kWide>(params, shared);
    } else {
      score_share<Shape::kGroups - 1, kPaged, kWide>(params, shared);
    }
  })
}

#undef FOVEA_SM90_BODY

}  // namespace fovea::internal::index_sm90
