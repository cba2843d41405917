#include <algorithm>
#include <limits>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/mma_f16.cuh"
#include "src/index/cuda/index_logits_rows.cuh"

// The product of a row's heads with keys on tensor cores: 64 heads x 128 channels are the left
// matrix, which a warp keeps decoded in its registers (128 of them), and 16 keys the right one.
// Channels are dealt out so that a lane's share of a key is 16 neighbouring bytes; the sum does not
// mind. Relu, weights and the sum over heads happen in the registers that hold the products.
//
// score_rows (up to 64 heads of 128 channels) stages tiles of 128 keys in shared memory. A block
// takes a group of up to 8 rows and a chunk of their keys; the rows that share keys are scored
// together, a warp per row, and where there are fewer rows than warps several warps share out the
// keys of a tile. Shared memory: 5 tiles of 17 024 bytes and the page ids of the chunk, 8 208
// bytes, so that one block fits every GPU from compute capability 8.0; registers allow one block.
//
// score_any (all else: more heads, other widths, keys at any address) reads from global memory what
// a warp needs for 16 keys. On a problem of both kernels it does the same operations in the same
// order, so that the choice, which looks at addresses, changes no bit.
namespace fovea::internal {
namespace {

using cuda::MmaA;
using cuda::MmaB;
using cuda::MmaC;
using index_rows::clamp;
using index_rows::kNegInf;
using index_rows::load_codes;
using index_rows::page_at;
using index_rows::split_position;
using index_rows::Window;
using index_rows::window_of;
using index_rows::word_of;

constexpr char kOp[] = "index_logits";
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kHeads = 64;  // of one left matrix
constexpr int kHeadTiles = kHeads / 16;
constexpr int kDim = 128;       // channels of one left matrix
constexpr int kUnitKeys = 16;   // of one right matrix
constexpr int kTileKeys = 128;  // staged together
constexpr int kStages = 5;
constexpr int kMaxGroupRows = kWarps;
// A chunk is long enough that loading queries does not show, and short enough that the chunks of a
// batch fill the GPU evenly.
constexpr int64_t kMinChunkKeys = 512;
constexpr int64_t kMaxChunkKeys = 4096;
// Where paged groups alone fill half of the GPU, whatever their lengths: few rows share a block, so
// that what it does before its first key shows more.
constexpr int64_t kMaxPagedChunkKeys = 8192;
constexpr int64_t kChunksPerSm = 8;
constexpr int64_t kMaxChunkPages = 2048;

struct Params : index_rows::Inputs {
  using Inputs::Inputs;

  // score_rows
  int32_t key_stride = 0;    // bytes from a page or ragged key to the next
  int32_t scale_offset = 0;  // bytes from a page to its scales
  int32_t group_rows = 1;    // rows of a block
  int32_t chunk_keys = 0;    // keys of a block; blocks of a group go on in strides of num_chunks
  int32_t num_chunks = 0;
};

// Heads lane / 4 + 8 * i of a left matrix of 64 heads, i = 0..7; absent heads weigh nothing.
__device__ void load_weights(const Params& params, int64_t t, int32_t first_head,
                             float (&weight)[2 * kHeadTiles]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kHeadTiles; ++i) {
    const int32_t h = first_head + lane / 4 + 8 * i;
    weight[i] = h < params.num_heads ? params.head_weight(t, h) : 0.0f;
  }
}

// The part of a left matrix that one word of codes of heads g and g + 8 makes.
__device__ MmaA decode_a(uint32_t low_head, uint32_t high_head) {
  MmaA a;
  cuda::decode4_f16(low_head, a.x[0], a.x[2]);
  cuda::decode4_f16(high_head, a.x[1], a.x[3]);
  return a;
}

__device__ MmaB decode_b(uint32_t codes) {
  MmaB b;
  cuda::decode4_f16(codes, b.x[0], b.x[1]);
  return b;
}

using Products = MmaC[kHeadTiles];  // of 64 heads and 8 keys

__device__ void clear(Products& products) {
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) products[m] = MmaC{{0, 0, 0, 0}};
}

// Adds weight * relu(product) of head i of a lane's 8 heads to the sums of its 2 keys.
__device__ void weigh(const Products& products, const float (&weight)[2 * kHeadTiles], int i,
                      float& first, float& second) {
  const MmaC& product = products[i / 2];
  first = fmaf(weight[i], cuda::relu(product.x[i % 2 * 2]), first);
  second = fmaf(weight[i], cuda::relu(product.x[i % 2 * 2 + 1]), second);
}

// Adds up the 8 lanes that hold the same keys, in an order that is the same for every key; the
// result belongs to the key unit_key() of the lane.
__device__ float sum_lanes(const float (&sum)[4]) {
  constexpr unsigned kAll = 0xFFFFFFFF;
  const int lane = threadIdx.x % 32;
  const bool upper = (lane & 16) != 0;
  const float first =
      (upper ? sum[2] : sum[0]) + __shfl_xor_sync(kAll, upper ? sum[0] : sum[2], 16);
  const float second =
      (upper ? sum[3] : sum[1]) + __shfl_xor_sync(kAll, upper ? sum[1] : sum[3], 16);
  const bool odd = (lane & 8) != 0;
  const float both = (odd ? second : first) + __shfl_xor_sync(kAll, odd ? first : second, 8);
  return both + __shfl_xor_sync(kAll, both, 4);
}

__device__ int unit_key() {
  const int lane = threadIdx.x % 32;
  return (lane & 16) / 2 + 2 * (lane % 4) + (lane & 8) / 8;
}
// Two lanes have each key; one of them writes.
__device__ bool writes_key() { return (threadIdx.x & 4) == 0; }

struct Tile {
  uint8_t codes[kTileKeys * kDim];
  float scale[kTileKeys];
  uint8_t held[kTileKeys];
};
static_assert(sizeof(Tile) % 16 == 0 && kTileKeys == kWarps * kUnitKeys);

struct SharedMemory {
  Tile tiles[kStages];
  int32_t page_ids[kMaxChunkPages + 4];
};
static_assert(sizeof(SharedMemory) < 99 * 1024 - 1024);

// A tile's codes in units of 16 bytes, where unit u of odd keys stands at u ^ 4: 8 lanes that read
// the same four units of two neighbouring keys meet no bank twice.
__device__ int code_offset(int key, int unit) { return key * kDim + (unit ^ ((key & 1) * 4)) * 16; }

// fetch_tile where a unit lies in one page, whose size is a power of two and whose address and
// stride 16 divides: one look-up for the unit, and its codes are 2048 bytes on end. Copies the same
// bytes to the same places.
__device__ void fetch_page_unit(const Params& params, const int32_t* page_ids, int32_t first_column,
                                int32_t first, int32_t end, Tile& tile) {
  const int lane = threadIdx.x % 32;
  const int warp_key = threadIdx.x / 32 * kUnitKeys;
  const int32_t position = first + warp_key;
  const int32_t offset = position & ((1 << params.page_shift) - 1);
  // page_ids has the columns of keys before `end`.
  const int32_t column = min(position, end - 1) >> params.page_shift;
  const int32_t page = page_ids[column - first_column];
  const int32_t count = page < 0 ? 0 : end - position;  // keys of the unit; may be past 0 and 16
  // Where there is no key nothing is read, so that the address may be that of any page.
  const uint8_t* const from = params.pages.data + int64_t{max(page, 0)} * params.key_stride;
  const uint8_t* const codes = from + offset * kDim + lane * 16;
  constexpr int kUnitsPerKey = kDim / 16;  // of 16 bytes
  constexpr int kStepKeys = 32 / kUnitsPerKey;
  static_assert(kStepKeys % 2 == 0, "code_offset of a lane goes on by kDim for every key");
  const int lane_key = lane / kUnitsPerKey;
  uint8_t* const to = tile.codes + code_offset(warp_key + lane_key, lane % kUnitsPerKey);
#pragma unroll
  for (int i = 0; i < kUnitKeys; i += kStepKeys) {
    cuda::copy_async<16>(to + i * kDim, codes + i * kDim, i + lane_key < count);
  }
  if (lane < kUnitKeys) {
    const int key = warp_key + lane;
    cuda::copy_async<4>(&tile.scale[key], from + params.scale_offset + 4 * (offset + lane),
                        lane < count);
    tile.held[key] = lane < count;
  }
}

// Keys [first, end) of a tile into shared memory; the rest of the tile becomes zeros. Each warp
// fetches one unit.
template <bool kPaged, int kBytes>
__device__ void fetch_tile(const Params& params, const int32_t* page_ids, int32_t first_column,
                           int32_t first, int32_t end, Tile& tile) {
  // Byte of a key in the pool or in the ragged array, relative to its first; -1: no key.
  const auto locate = [&](int key, int32_t& offset) -> int64_t {
    const int32_t position = first + key;
    if (position >= end) return -1;
    if constexpr (!kPaged) {
      offset = position;
      return int64_t{position} * params.key_stride;
    }
    int32_t column;
    split_position(params, position, column, offset);
    const int32_t page = page_ids[column - first_column];
    return page < 0 ? -1 : int64_t{page} * params.key_stride;
  };
  constexpr int kPieces = kDim / kBytes;
  const uint8_t* const base = kPaged ? params.pages.data : params.k_fp8.data;
  const int lane = threadIdx.x % 32;
  const int warp_key = threadIdx.x / 32 * kUnitKeys;
  const int byte = lane % kPieces * kBytes;
#pragma unroll 4
  for (int i = 0; i < kUnitKeys; i += 32 / kPieces) {
    const int key = warp_key + i + lane / kPieces;
    int32_t offset = 0;
    const int64_t start = locate(key, offset);
    const uint8_t* from = params.q_fp8.data;  // not read: any address that is valid
    if (start >= 0) from = base + start + (kPaged ? offset * kDim : 0) + byte;
    cuda::copy_async<kBytes>(tile.codes + code_offset(key, byte / 16) + byte % 16, from,
                             start >= 0);
  }
  if (lane < kUnitKeys) {
    const int key = warp_key + lane;
    int32_t offset = 0;
    const int64_t start = locate(key, offset);
    const void* from = params.head_weight.data;
    if (start >= 0) {
      from = kPaged ? static_cast<const void*>(base + start + params.scale_offset + 4 * offset)
                    : params.k_scale + offset;
    }
    cuda::copy_async<4>(&tile.scale[key], from, start >= 0);
    tile.held[key] = start >= 0;
  }
}

// Consecutive rows of a group whose windows overlap: they read the same keys.
struct Run {
  int first;
  int next;  // rows [first, next) of the group; those without keys are passed over
  Window keys;
};

__device__ Run find_run(const Window* windows, int group_rows, int first) {
  Run run{first, first + 1, windows[first]};
  for (; run.next < group_rows; ++run.next) {
    const Window window = windows[run.next];
    if (window.is_empty()) continue;
    if (run.keys.is_empty() || !run.keys.meets(window)) break;
    run.keys.include(window);
  }
  return run;
}

// What a warp keeps of its row.
struct Query {
  MmaA heads[kHeadTiles][kDim / 16];
  float weight[2 * kHeadTiles];
};

template <int kBytes>
__device__ void load_query(const Params& params, int64_t t, bool present, Query& query) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = 64 * half + 16 * (lane % 4);
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
      uint4 codes[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = 16 * m + 8 * i + lane / 4;
        codes[i] = make_uint4(0, 0, 0, 0);
        if (present && h < params.num_heads) {
          codes[i] = load_codes<kBytes>(params.q_fp8.row(t, h), channel, kDim);
        }
      }
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        query.heads[m][4 * half + s] = decode_a(word_of(codes[0], s), word_of(codes[1], s));
      }
    }
  }
  if (present) load_weights(params, t, 0, query.weight);
}

// What is left to do of a unit of 16 keys while the products of the next one are computed: of keys
// 0..7 the sums of the lane's heads, of keys 8..15 the products.
struct Pending {
  Products products;
  float sum[2];
  float scale;
  int32_t position;  // negative: nothing to write
};

__device__ void start(Pending& pending) {
  clear(pending.products);
  pending.sum[0] = pending.sum[1] = pending.scale = 0;
  pending.position = -1;
}

// `logits` is where position 0 would stand.
__device__ void finish(const Pending& pending, const float (&sum)[4], float* logits) {
  const float total = sum_lanes(sum);
  if (pending.position >= 0) logits[pending.position] = pending.scale * total;
}

__device__ void finish(const Query& query, const Pending& pending, float* logits) {
  float sum[4] = {pending.sum[0], pending.sum[1], 0, 0};
#pragma unroll
  for (int i = 0; i < 2 * kHeadTiles; ++i) {
    weigh(pending.products, query.weight, i, sum[2], sum[3]);
  }
  finish(pending, sum, logits);
}

// Products of 8 keys of a tile, and between them the weighted sum of the 8 keys before: tensor
// cores and the other units work at the same time.
__device__ void multiply(const Query& query, const Tile& tile, int first_key, Products& products,
                         const Products& before, float& first, float& second) {
  const int lane = threadIdx.x % 32;
  const uint8_t* const codes = tile.codes;
  const int key = first_key + lane / 4;
  const uint4 halves[2] = {*reinterpret_cast<const uint4*>(codes + code_offset(key, lane % 4)),
                           *reinterpret_cast<const uint4*>(codes + code_offset(key, 4 + lane % 4))};
  clear(products);
#pragma unroll
  for (int s = 0; s < kDim / 16; ++s) {
    const MmaB b = decode_b(word_of(halves[s / 4], s % 4));
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) cuda::mma_f16(products[m], query.heads[m][s], b);
    // The last products of `before` take a while: their turn comes two steps later.
    if (s >= 2 && s < 2 + kHeadTiles) {
      weigh(before, query.weight, 2 * s - 4, first, second);
      weigh(before, query.weight, 2 * s - 3, first, second);
    }
  }
}
static_assert(kDim / 16 >= 2 + kHeadTiles);

// Keys first_key .. + 15 of a tile; `position` is that of the lane's key, negative when the row
// does not have it. Finishes the unit before.
__device__ void score_unit(const Query& query, const Tile& tile, int first_key, int32_t position,
                           Pending& pending, float* logits) {
  float sum[4] = {pending.sum[0], pending.sum[1], 0, 0};
  Products low;
  multiply(query, tile, first_key, low, pending.products, sum[2], sum[3]);
  finish(pending, sum, logits);
  pending.sum[0] = pending.sum[1] = 0;
  multiply(query, tile, first_key + 8, pending.products, low, pending.sum[0], pending.sum[1]);
  const int key = first_key + unit_key();
  pending.scale = tile.scale[key];
  pending.position = position;
  if (position >= 0 && tile.held[key] == 0) {
    logits[position] = kNegInf;
    pending.position = -1;
  }
}

// kPageUnits: pages of 16, 32, 64, 128 or 256 keys. A unit lies in one of them, because the chunks
// and tiles of paged rows begin at multiples of kTileKeys.
template <bool kPaged, int kBytes, bool kPageUnits>
__global__ void __launch_bounds__(kThreads, 1) score_rows(const __grid_constant__ Params params) {
  extern __shared__ uint4 shared_memory[];
  auto& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  __shared__ Window windows[kMaxGroupRows];

  const int64_t first_row = int64_t{blockIdx.x / params.num_chunks} * params.group_rows;
  const auto first_chunk = static_cast<int32_t>(blockIdx.x % params.num_chunks);
  const auto group_rows =
      static_cast<int>(min(int64_t{params.group_rows}, params.q_fp8.shape[0] - first_row));
  if (threadIdx.x < group_rows) {
    windows[threadIdx.x] = window_of<kPaged>(params, first_row + threadIdx.x);
  }
  __syncthreads();

  const int warp = threadIdx.x / 32;
  Query query;
  Run run;
  for (int first = 0; first < group_rows; first = run.next) {
    run = find_run(windows, group_rows, first);
    const int rows = run.next - run.first;
    const int slots = rows > 4 ? 8 : rows > 2 ? 4 : rows;
    // Slots neighbouring warps fetch as many units and score them for a row each: only they have to
    // wait for one another.
    const int slice = warp / slots;
    const int row = run.first + warp % slots;
    const Window own = row < run.next ? windows[row] : Window{0, 0, 0};
    const int64_t t = first_row + row;
    float* const to = params.logits.data + t * params.logits.stride[0] - own.begin;
    bool loaded = false;
    for (int64_t begin = run.keys.begin + int64_t{first_chunk} * params.chunk_keys;
         begin < run.keys.end; begin += int64_t{params.num_chunks} * params.chunk_keys) {
      const auto chunk_begin = static_cast<int32_t>(begin);
      const auto chunk_end =
          static_cast<int32_t>(min(begin + params.chunk_keys, int64_t{run.keys.end}));
      const int num_tiles = (chunk_end - chunk_begin + kTileKeys - 1) / kTileKeys;
      int32_t first_column = 0;
      __syncthreads();  // the tiles and page ids of the chunk before are no longer in use
      if constexpr (kPaged) {
        int32_t last_column, unused;
        split_position(params, chunk_begin, first_column, unused);
        split_position(params, chunk_end - 1, last_column, unused);
        for (int32_t i = threadIdx.x; i <= last_column - first_column; i += kThreads) {
          shared.page_ids[i] =
              static_cast<int32_t>(page_at(params, run.keys.request, first_column + i));
        }
        __syncthreads();
      }
      const auto fetch = [&](int i) {
        if (i < num_tiles) {
          const int32_t tile_begin = chunk_begin + i * kTileKeys;
          Tile& tile = shared.tiles[i % kStages];
          if constexpr (kPageUnits) {
            static_assert(kPaged && kBytes == 16);
            fetch_page_unit(params, shared.page_ids, first_column, tile_begin, chunk_end, tile);
          } else {
            fetch_tile<kPaged, kBytes>(params, shared.page_ids, first_column, tile_begin, chunk_end,
                                       tile);
          }
        }
        cuda::commit_copies();
      };
      for (int i = 0; i < kStages - 1; ++i) fetch(i);
      if (!loaded) load_query<kBytes>(params, t, own.begin < own.end, query);
      loaded = true;
      Pending pending;
      start(pending);
      const auto score = [&](int i) {
        const Tile& tile = shared.tiles[i % kStages];
        const int32_t tile_begin = chunk_begin + i * kTileKeys;
        for (int u = slice * slots; u < (slice + 1) * slots; ++u) {
          const int32_t unit_begin = tile_begin + u * kUnitKeys;
          if (unit_begin >= own.end || unit_begin + kUnitKeys <= own.begin) continue;
          const int32_t position = unit_begin + unit_key();
          const bool writes = writes_key() && position >= own.begin && position < own.end;
          score_unit(query, tile, u * kUnitKeys, writes ? position : -1, pending, to);
        }
      };
      for (int i = 0; i < num_tiles; ++i) {
        cuda::wait_copies<kStages - 2>();
        cuda::sync_some(1 + slice, 32 * slots);
        // Of the two warps of a scheduler one computes while the other finds addresses.
        if (warp < kWarps / 2) fetch(i + kStages - 1);
        score(i);
        if (warp >= kWarps / 2) fetch(i + kStages - 1);
      }
      finish(query, pending, to);
    }
  }
}

// A warp takes 16 keys at a time of one row.
template <bool kPaged, int kBytes>
__global__ void __launch_bounds__(kThreads) score_any(const __grid_constant__ Params params) {
  const int64_t t = blockIdx.x / params.num_chunks;
  const auto first_chunk = static_cast<int32_t>(blockIdx.x % params.num_chunks);
  const Window own = window_of<kPaged>(params, t);
  const int lane = threadIdx.x % 32;
  const auto locate = [&](int32_t position, const uint8_t** scale) -> const uint8_t* {
    *scale = nullptr;
    if (position >= own.end) return nullptr;
    if constexpr (!kPaged) {
      *scale = reinterpret_cast<const uint8_t*>(params.k_scale + position);
      return params.k_fp8.row(position);
    }
    int32_t column, offset;
    split_position(params, position, column, offset);
    const int64_t page = page_at(params, own.request, column);
    if (page < 0) return nullptr;
    *scale = params.pages.scale(page, offset);
    return params.pages.codes(page, offset);
  };
  const int32_t units_per_chunk = params.chunk_keys / kUnitKeys;
  const int32_t num_units = (own.end - own.begin + kUnitKeys - 1) / kUnitKeys;
  for (int64_t chunk = first_chunk; chunk * units_per_chunk < num_units;
       chunk += params.num_chunks) {
    const auto end_unit =
        static_cast<int32_t>(min((chunk + 1) * units_per_chunk, int64_t{num_units}));
    for (auto u = static_cast<int32_t>(chunk * units_per_chunk + threadIdx.x / 32); u < end_unit;
         u += kWarps) {
      const int32_t unit_begin = own.begin + u * kUnitKeys;
      const uint8_t* unused;
      const uint8_t* const keys[2] = {locate(unit_begin + lane / 4, &unused),
                                      locate(unit_begin + 8 + lane / 4, &unused)};
      float sum[4] = {0, 0, 0, 0};
      for (int32_t first_head = 0; first_head < params.num_heads; first_head += kHeads) {
        float weight[2 * kHeadTiles];
        load_weights(params, t, first_head, weight);
        Products products[2];
        clear(products[0]);
        clear(products[1]);
        for (int32_t channel = 16 * (lane % 4); channel - 16 * (lane % 4) < params.head_dim;
             channel += 64) {
          uint4 codes[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            codes[j] = make_uint4(0, 0, 0, 0);
            if (keys[j] != nullptr) {
              codes[j] = load_codes<kBytes>(keys[j], channel, params.head_dim);
            }
          }
#pragma unroll
          for (int m = 0; m < kHeadTiles; ++m) {
            uint4 heads[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int32_t h = first_head + 16 * m + 8 * i + lane / 4;
              heads[i] = make_uint4(0, 0, 0, 0);
              if (h < params.num_heads) {
                heads[i] = load_codes<kBytes>(params.q_fp8.row(t, h), channel, params.head_dim);
              }
            }
#pragma unroll
            for (int s = 0; s < 4; ++s) {
              const MmaA a = decode_a(word_of(heads[0], s), word_of(heads[1], s));
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                cuda::mma_f16(products[j][m], a, decode_b(word_of(codes[j], s)));
              }
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * kHeadTiles; ++i) {
          weigh(products[0], weight, i, sum[0], sum[1]);
          weigh(products[1], weight, i, sum[2], sum[3]);
        }
      }
      const float total = sum_lanes(sum);
      const int32_t position = unit_begin + unit_key();
      if (writes_key() && position < own.end) {
        const uint8_t* scale;
        const bool held = locate(position, &scale) != nullptr;
        params.logits(t, position - own.begin) =
            held ? cuda::load_float<kBytes != 1>(scale) * total : kNegInf;
      }
    }
  }
}

Params params_of(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors) {
  Params params(problem, tensors);
  const bool paged = problem.layout == IndexLayout::kPaged;
  const int64_t stride = paged ? params.pages.page_stride_bytes : params.k_fp8.stride[0];
  params.key_stride =
      stride <= std::numeric_limits<int32_t>::max() ? static_cast<int32_t>(stride) : -1;
  params.scale_offset = static_cast<int32_t>(problem.page_size * problem.head_dim);
  return params;
}

// Rows that a block takes: rows of one request read the same keys.
int64_t group_rows_of(const IndexLogitsProblem& problem, const Params& params) {
  const int64_t rows = problem.layout == IndexLayout::kRagged
                           ? params.q_fp8.shape[0]
                           : index_rows::rows_per_request(params);
  return std::clamp<int64_t>(rows, 1, kMaxGroupRows);
}

using Kernel = void (*)(const Params);

template <bool kPaged>
Kernel kernel_of(bool any, int unit, int32_t page_shift) {
  if (!any && unit == 4) return score_rows<kPaged, 4, false>;
  if (!any) {
    const bool page_units = kPaged && page_shift >= 0 && 1 << page_shift >= kUnitKeys;
    return page_units ? score_rows<kPaged, 16, kPaged> : score_rows<kPaged, 16, false>;
  }
  return unit == 16  ? score_any<kPaged, 16>
         : unit == 4 ? score_any<kPaged, 4>
                     : score_any<kPaged, 1>;
}

}  // namespace

void index_logits_cuda_portable(const IndexLogitsProblem& problem, const Device& device,
                                const IndexLogitsTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  Params params = params_of(problem, tensors);
  const int64_t rows = params.q_fp8.shape[0];
  const bool paged = problem.layout == IndexLayout::kPaged;
  int64_t width = params.logits.shape[1];
  if (!paged) width = std::min(width, params.k_fp8.shape[0]);
  if (rows == 0 || width == 0) return;

  const int unit = index_rows::address_unit(problem, params);
  const bool any =
      problem.num_heads > kHeads || problem.head_dim != kDim || unit == 1 || params.key_stride < 0;
  params.group_rows = static_cast<int32_t>(any ? 1 : group_rows_of(problem, params));
  const int64_t groups = (rows + params.group_rows - 1) / params.group_rows;
  const int64_t num_sms = cuda::device_facts(device.ordinal).num_sms;
  const int64_t blocks_wanted = kChunksPerSm * num_sms;
  const int64_t even_share = width * groups / blocks_wanted;
  const auto whole_tiles = [](int64_t keys) {
    return (keys + kTileKeys - 1) / kTileKeys * kTileKeys;
  };
  const bool long_chunks = paged && 2 * groups >= num_sms;
  int64_t chunk =
      std::clamp(even_share, kMinChunkKeys, long_chunks ? kMaxPagedChunkKeys : kMaxChunkKeys);
  if (paged) chunk = std::min(chunk, kMaxChunkPages * problem.page_size);
  chunk = whole_tiles(chunk);
  if (paged) {  // as many chunks of the same length
    const int64_t chunks = (width + chunk - 1) / chunk;
    chunk = whole_tiles((width + chunks - 1) / chunks);
  }
  const int64_t max_chunks = std::max<int64_t>(1, std::numeric_limits<int32_t>::max() / groups);
  params.chunk_keys = static_cast<int32_t>(chunk);
  params.num_chunks = static_cast<int32_t>(std::min((width + chunk - 1) / chunk, max_chunks));
  cuda::launch(kOp,
               paged ? kernel_of<true>(any, unit, params.page_shift)
                     : kernel_of<false>(any, unit, params.page_shift),
               {dim3(cuda::grid_blocks(groups * params.num_chunks, 1)), dim3(kThreads),
                any ? 0 : sizeof(SharedMemory)},
               stream, params);
}

}  // namespace fovea::internal
