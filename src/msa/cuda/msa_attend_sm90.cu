#include <algorithm>
#include <limits>

#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/f16.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/core/workspace.h"
#include "src/msa/cuda/msa_attend_kernels.cuh"

// Block by block: where many rows list the same blocks, a block of the cache is read once for the
// rows that list it, not once for each of them.
//
//   count_places    a warp per row and KV head reads its list; every block of it is a place, and
//                   gets a number among the places of its cell
//   cut_items       where the places of each cell begin; cells are cut into items
//   sort_places     the places of a cell side by side
//   attend_items    thread blocks take item after item: one block of the cache in shared memory,
//                   products of a warpgroup for 64 rows of queries at a time; the output over this
//                   block alone goes to memory as a partial result
//   fold_places     a warp per row and query head: its partial results become the output
//
// A cell is a block of a request, for a KV head and a slab of rows. The partial results of a slab
// are in memory at a time. The order of places in a cell, of items and of their cells is that of
// atomics; a partial result has the address and the bits that belong to its row and block, whatever
// that order is.
namespace fovea::internal::msa {
namespace {

using cuda::kPanelColumns;
using cuda::kPanelRowBytes;
using cuda::PanelMatrix;
using cuda::PanelSide;
using cuda::WgmmaA;
using cuda::WgmmaSums;

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroups = 2;  // of a thread block, tile by tile in turn
constexpr int kItemThreads = kWarpgroups * kWarpgroupThreads;
constexpr int kItemWarps = kItemThreads / kWarpThreads;
constexpr int kBlocksPerSm = 2;
constexpr int kTileRows = 64;  // of queries: those of a product
constexpr int kItemRows = 1024;
constexpr int kMaxItemPlaces = kItemThreads;
constexpr int kMaxBlockKeys = 128;
constexpr int kMaxDim = 128;
constexpr int kPassChannels = kPanelColumns;  // of the values, whose sums a warpgroup has at a time
constexpr int kFoldWarps = 4;
constexpr int kCutThreads = 1024;
constexpr int kListThreads = 256;
constexpr int64_t kMaxSlabBytes = int64_t{1152} << 20;

// A block in the list of a row.
struct Place {
  int32_t part;  // ((row of the slab) * KV heads + KV head) * topk + index in the sorted list
  int32_t seen;  // tokens of the block that the row sees
};
// Where a place goes: its cell, and its number there.
struct Target {
  int32_t cell;
  int32_t number;
};
struct Item {
  int32_t page;
  int32_t kv_head;
  int32_t first;  // place
  int32_t count;
};
// Of a partial result: logit and sum as in ChainState, and what the stored values of each pass are
// multiplied with.
struct alignas(16) PartState {
  float largest;
  float sum;
  float unit[kMaxDim / kPassChannels];
};
// Of a slab.
struct SlabCounts {
  int32_t places;  // given to cells
  int32_t items;   // made
  int32_t taken;   // items that a thread block has begun
};
constexpr int kSlabCounts = sizeof(SlabCounts) / sizeof(int32_t);

struct ByBlockParams {
  AttendParams attend;
  int64_t slab_rows;
  int32_t cells_per_slab;   // KV heads * requests * pages
  int32_t item_places;      // at most
  int32_t group_shift;      // a place has 1 << group_shift rows of a tile
  int64_t places_per_slab;  // at most
  int64_t items_per_slab;   // at most
  int32_t* num_places;      // [rows][KV heads]
  int32_t* row_end;         // [rows]: tokens that the row sees
  Target* targets;          // [rows][KV heads][topk]
  SlabCounts* slab_counts;  // [slabs], in front of `counts`
  int32_t* counts;          // [slabs][cells]
  int32_t* firsts;          // [slabs][cells]
  Place* places;            // [slabs][places_per_slab]
  Item* items;              // [slabs][items_per_slab]
  uint16_t* part_values;    // [rows of a slab][KV heads][topk][group][head_dim]
  PartState* part_state;    // [rows of a slab][KV heads][topk][group]
};

__global__ void __launch_bounds__(kListThreads) zero_counts(int32_t* counts, int64_t number) {
  const int64_t i = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  if (i < number) counts[i] = 0;
}

__global__ void __launch_bounds__(kRowWarps* kWarpThreads)
    count_places(const __grid_constant__ ByBlockParams params) {
  extern __shared__ __align__(16) uint8_t memory[];
  const AttendParams& attend = params.attend;
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t kv_head = blockIdx.x / static_cast<uint32_t>(attend.num_tiles);
  const int64_t tile = blockIdx.x % static_cast<uint32_t>(attend.num_tiles);
  const int64_t t = tile * kRowWarps + warp;
  if (t >= attend.num_rows) return;
  const ListMemory list(reinterpret_cast<int32_t*>(memory) + warp * 3 * attend.topk, attend.topk);
  const MsaRow row = find_msa_row(attend.rows, t);
  const int count = read_list(attend, row, t, kv_head, list);
  const int64_t pair = t * attend.num_kv_heads + kv_head;
  if (lane == 0) {
    params.num_places[pair] = count;
    if (kv_head == 0) {
      const bool to_end = !attend.causal || row.position >= row.kv_len;
      params.row_end[t] = to_end ? row.kv_len : static_cast<int32_t>(row.position) + 1;
    }
  }
  const auto pages = static_cast<int32_t>(attend.inputs.page_table.shape[1]);
  const auto slab = static_cast<int32_t>(t / params.slab_rows);
  const int32_t first_cell =
      slab * params.cells_per_slab +
      (static_cast<int32_t>(kv_head) * static_cast<int32_t>(attend.rows.batch.num_requests()) +
       row.request) *
          pages;
  for (int i = lane; i < count; i += kWarpThreads) {
    const int32_t cell = first_cell + list.blocks[i];
    params.targets[pair * attend.topk + i] = {cell, atomicAdd(&params.counts[cell], 1)};
  }
}

// A thread block per slab and kCutThreads of its cells.
__global__ void __launch_bounds__(kCutThreads)
    cut_items(const __grid_constant__ ByBlockParams params) {
  __shared__ int64_t sums[cuda::kWarpThreads + 1];
  __shared__ int32_t starts[2];
  constexpr int64_t kOneItem = int64_t{1} << 32;  // items in the upper half, places in the lower
  const AttendParams& attend = params.attend;
  const uint32_t slab = blockIdx.y;
  const uint32_t in_slab = blockIdx.x * kCutThreads + threadIdx.x;
  const bool present = in_slab < static_cast<uint32_t>(params.cells_per_slab);
  const int64_t cell = int64_t{slab} * params.cells_per_slab + in_slab;
  const int32_t count = present ? params.counts[cell] : 0;
  const int64_t own = count + (count + params.item_places - 1) / params.item_places * kOneItem;
  int64_t total;
  const int64_t before = cuda::block_inclusive_sum(own, sums, &total) - own;
  if (threadIdx.x == 0) {
    SlabCounts& counts = params.slab_counts[slab];
    starts[0] = atomicAdd(&counts.places, static_cast<int32_t>(total));
    starts[1] = atomicAdd(&counts.items, static_cast<int32_t>(total >> 32));
  }
  __syncthreads();
  if (count == 0) return;
  const auto first = static_cast<int32_t>(int64_t{slab} * params.places_per_slab + starts[0] +
                                          static_cast<int32_t>(before));
  params.firsts[cell] = first;
  const auto pages = static_cast<uint32_t>(attend.inputs.page_table.shape[1]);
  const auto requests = static_cast<uint32_t>(attend.rows.batch.num_requests());
  const uint32_t block = in_slab % pages;
  const uint32_t request = in_slab / pages % requests;
  const auto kv_head = static_cast<int32_t>(in_slab / pages / requests);
  const int32_t page = attend.inputs.page_table(request, block);
  Item* item = params.items + int64_t{slab} * params.items_per_slab + starts[1] + (before >> 32);
  for (int32_t i = 0; i < count; i += params.item_places) {
    *item++ = {page, kv_head, first + i, min(count - i, params.item_places)};
  }
}

__global__ void __launch_bounds__(kListThreads)
    sort_places(const __grid_constant__ ByBlockParams params) {
  const AttendParams& attend = params.attend;
  const auto topk = static_cast<uint32_t>(attend.topk);
  const auto kv_heads = static_cast<uint32_t>(attend.num_kv_heads);
  const auto i = static_cast<uint32_t>(blockIdx.x) * kListThreads + threadIdx.x;
  const uint32_t pair = i / topk;
  const uint32_t index = i % topk;
  if (pair >= attend.num_rows * attend.num_kv_heads) return;
  if (static_cast<int32_t>(index) >= params.num_places[pair]) return;
  const Target target = params.targets[i];
  const uint32_t t = pair / kv_heads;
  const auto block = static_cast<int32_t>(static_cast<uint32_t>(target.cell) %
                                          static_cast<uint32_t>(attend.inputs.page_table.shape[1]));
  const uint32_t row = t % static_cast<uint32_t>(params.slab_rows);
  params.places[params.firsts[target.cell] + target.number] = {
      static_cast<int32_t>((row * kv_heads + pair % kv_heads) * topk + index),
      min(params.row_end[t] - block * attend.block_size, attend.block_size)};
}

// What a thread block has in shared memory: panels as wgmma.cuh has them.
template <int kDim>
struct ItemMemory {
  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kKeyPanel = kMaxBlockKeys * kPanelRowBytes;
  static constexpr int kQueryPanel = kTileRows * kPanelRowBytes;
  struct ItemPlace {
    int32_t row;   // of the batch
    int32_t part;  // as in Place
    int32_t seen;
  };
  alignas(1024) uint8_t keys[kPanels * kKeyPanel];
  alignas(1024) uint8_t values[kPanels * kKeyPanel];
  // Those of an odd item's second warpgroup, which has nothing to do: a panel of finite values.
  static constexpr int kQueryBytes =
      kPanels * kQueryPanel > kKeyPanel ? kPanels* kQueryPanel : kKeyPanel;
  alignas(1024) uint8_t queries[kWarpgroups][kQueryBytes];
  ItemPlace places[kMaxItemPlaces];
  Item item;                    // that the thread block works on; count 0: none is left
  int32_t seen[kItemWarps];     // the most that places of a warp see
  bool not_finite[kItemWarps];  // among the values that a warp has copied
};

// A thread's share of an item.
//
// Rows of a tile are the heads of one place after another. All keys of the block are multiplied
// with all rows; what a row does not see gets no weight, and zero times a finite value is nothing.
// An item with a value that is not finite is *odd*: a tile is then one place, and its values are
// brought to shared memory anew, those that the row does not see as zeros.
template <int kDim>
class ItemWork {
 public:
  using Memory = ItemMemory<kDim>;

  __device__ ItemWork(const ByBlockParams& params, int slab, Memory& shared)
      : params_(params), attend_(params.attend), slab_(slab), shared_(shared) {}

  __device__ void run() {
    copy_block(attend_.inputs.k, shared_.keys, attend_.block_size);
    const int warp = threadIdx.x / kWarpThreads;
    const int own_seen = cuda::warp_max(take_place());
    if (lane() == 0) shared_.seen[warp] = own_seen;
    __syncthreads();
    int most_seen = 0;
#pragma unroll
    for (const int seen : shared_.seen) most_seen = max(most_seen, seen);
    copy_block(attend_.inputs.v, shared_.values, most_seen);
    copy_queries(warpgroup_);
    cuda::wait_for_copies();
    const bool not_finite = __any_sync(0xFFFFFFFF, copied_non_finite()) != 0;
    if (lane() == 0) shared_.not_finite[warp] = not_finite;
    cuda::shared_stores_before_wgmma();
    __syncthreads();
    bool odd = false;
#pragma unroll
    for (const bool found : shared_.not_finite) odd = odd || found;
    int tile = warpgroup_;
    if (odd) {
      odd_ = true;
      if (warpgroup_ == 0) {
        copy_queries(0);
      } else {
        tile = shared_.item.count;
      }
    }
#pragma unroll 1
    for (; has_tile(tile); tile = next_tile(tile)) attend_tile(tile);
  }

 private:
  __device__ static int thread() { return threadIdx.x % kWarpgroupThreads; }  // of a warpgroup
  __device__ static int lane() { return threadIdx.x % kWarpThreads; }

  __device__ int places_per_tile() const { return odd_ ? 1 : kTileRows >> params_.group_shift; }
  __device__ int next_tile(int tile) const { return tile + (odd_ ? 1 : kWarpgroups); }
  __device__ bool has_tile(int tile) const { return tile * places_per_tile() < shared_.item.count; }

  // Of a warpgroup.
  __device__ void sync() const { cuda::sync_some(1 + warpgroup_, kWarpgroupThreads); }

  // The thread's place goes to shared memory; returns what it sees.
  __device__ int take_place() const {
    if (threadIdx.x >= shared_.item.count) return 0;
    const Place place = params_.places[shared_.item.first + threadIdx.x];
    const uint32_t row = static_cast<uint32_t>(place.part) / static_cast<uint32_t>(attend_.topk) /
                         static_cast<uint32_t>(attend_.num_kv_heads);
    const int64_t first_row = slab_ * params_.slab_rows;
    shared_.places[threadIdx.x] = {static_cast<int32_t>(first_row + row), place.part, place.seen};
    return place.seen;
  }

  // Calls f(token, offset in the panels) for the thread's pieces of a block, all of the same
  // channels.
  template <class F>
  __device__ static void for_pieces(F f) {
    const int piece = channel() / 8;
    int token = threadIdx.x / kPieces;
    int offset = piece / 8 * Memory::kKeyPanel + cuda::panel_offset(token, piece % 8);
    static_assert(kTokenStep % 8 == 0);  // the order of pieces in a row stays
#pragma unroll 1
    for (int i = 0; i < kMaxBlockKeys / kTokenStep; ++i) {
      f(token, offset);
      token += kTokenStep;
      offset += kTokenStep * kPanelRowBytes;
    }
  }
  static constexpr int kPieces = kDim / 8;
  static constexpr int kTokenStep = kItemThreads / kPieces;
  __device__ static int channel() { return threadIdx.x % kPieces * 8; }

  // Starts copies of the first `tokens` tokens, zeros behind them.
  __device__ void copy_block(const MsaPool& pool, uint8_t* to, int tokens) const {
    const auto* const data = static_cast<const bf16_t*>(pool.data);
    const bool in_row = channel() < attend_.head_dim;
    const bf16_t* const block =
        data + pool.offset(shared_.item.page, shared_.item.kv_head, 0) + (in_row ? channel() : 0);
    for_pieces([&](int token, int offset) {
      const bool present = in_row && token < tokens;
      cuda::copy_async<16>(to + offset, block + (present ? token * pool.token_stride : 0), present);
    });
  }

  __device__ static bool has_non_finite(const uint4& eight) {
    // Adding one to an exponent of all ones carries.
    const auto carry = [](uint32_t pair) {
      return ((pair & 0x7F80) + 0x80) | ((pair >> 16 & 0x7F80) + 0x80);
    };
    return ((carry(eight.x) | carry(eight.y) | carry(eight.z) | carry(eight.w)) & 0x8000) != 0;
  }

  __device__ bool copied_non_finite() const {
    bool found = false;
    for_pieces([&](int, int offset) {
      found = has_non_finite(*reinterpret_cast<const uint4*>(shared_.values + offset)) || found;
    });
    return found;
  }

  // Starts copies of the queries of a tile, zeros where there are none. A thread has a piece of
  // every panel of four rows.
  __device__ void copy_queries(int tile) const {
    const int piece = thread() % 8;
    const auto* const q = static_cast<const bf16_t*>(attend_.q);
#pragma unroll 1
    for (int i = 0; i < kTileRows; i += kWarpgroupThreads / 8) {
      const int row = thread() / 8 + i;
      const int place = place_of(tile, row);
      const int head = head_of(row);
      const bool present = place < shared_.item.count && head < attend_.group;
      const bf16_t* const from =
          present ? q + shared_.places[place].row * attend_.q_row +
                        (int64_t{shared_.item.kv_head} * attend_.group + head) * attend_.q_head +
                        8 * piece
                  : q;
      uint8_t* const to = shared_.queries[warpgroup_] + cuda::panel_offset(row, piece);
#pragma unroll
      for (int panel = 0; panel < Memory::kPanels; ++panel) {
        const bool here = present && panel * kPanelColumns + 8 * piece < attend_.head_dim;
        cuda::copy_async<16>(to + panel * Memory::kQueryPanel,
                             here ? from + panel * kPanelColumns : q, here);
      }
    }
  }

  // The place of a tile's row; a number behind all places where there is none.
  __device__ int place_of(int tile, int row) const {
    const int in_tile = row >> params_.group_shift;
    return in_tile < places_per_tile() ? tile * places_per_tile() + in_tile : kMaxItemPlaces;
  }
  __device__ int head_of(int row) const { return row & ((1 << params_.group_shift) - 1); }

  // Of the thread's rows, g and g + 8 of its warp's 16: what the row sees, and its partial result,
  // -1 where there is none.
  __device__ static int own_row(int half) {
    return thread() / kWarpThreads * 16 + lane() / 4 + 8 * half;
  }
  __device__ int seen_by(int tile, int half) const {
    const int place = place_of(tile, own_row(half));
    return place < shared_.item.count ? shared_.places[place].seen : 0;
  }
  __device__ int part_of(int tile, int half) const {
    const int row = own_row(half);
    const int place = place_of(tile, row);
    const int head = head_of(row);
    return place < shared_.item.count && head < attend_.group
               ? shared_.places[place].part * attend_.group + head
               : -1;
  }

  __device__ void attend_tile(int tile) const {
    cuda::wait_for_copies();
    cuda::shared_stores_before_wgmma();
    sync();
    WgmmaSums<kMaxBlockKeys> logits;
    multiply_keys(logits);
    sync();
    if (has_tile(next_tile(tile))) copy_queries(next_tile(tile));

    float sum[2];
    weigh(tile, logits, sum);
    WgmmaA rounded[kMaxBlockKeys / 16], rest[kMaxBlockKeys / 16];
#pragma unroll
    for (int s = 0; s < kMaxBlockKeys / 16; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const cuda::SplitPair pair(logits.x[8 * s + 2 * i], logits.x[8 * s + 2 * i + 1]);
        rounded[s].x[i] = pair.rounded;
        rest[s].x[i] = pair.rest;
      }
    }
#pragma unroll 1
    for (int panel = 0; panel < Memory::kPanels; ++panel) {
      WgmmaSums<kPassChannels> out;
      multiply_values(tile, panel, rounded, rest, out);
      store(tile, panel, sum, out);
    }
  }

  __device__ void multiply_keys(WgmmaSums<kMaxBlockKeys>& logits) const {
    const PanelMatrix queries =
        cuda::panel_matrix(shared_.queries[warpgroup_], Memory::kQueryPanel);
    const PanelMatrix keys = cuda::panel_matrix(shared_.keys, Memory::kKeyPanel);
    cuda::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s) {
      cuda::wgmma<PanelSide::kRows>(logits,
                                    queries.advanced(s / 4 * Memory::kQueryPanel + s % 4 * 32),
                                    keys.advanced(s / 4 * Memory::kKeyPanel + s % 4 * 32), s > 0);
    }
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
  }

  // Logits become weights, zero where not seen.
  __device__ void weigh(int tile, WgmmaSums<kMaxBlockKeys>& weights, float (&all)[2]) const {
    const int c = lane() % 4;
    const int seen[2] = {seen_by(tile, 0), seen_by(tile, 1)};
    if (__any_sync(0xFFFFFFFF, min(seen[0], seen[1]) < kMaxBlockKeys)) {
#pragma unroll
      for (int i = 0; i < kMaxBlockKeys / 2; ++i) {
        const int key = 8 * (i / 4) + 2 * c + i % 2;
        if (key >= seen[i / 2 % 2]) weights.x[i] = kNegInf;
      }
    }
    const float scale = attend_.softmax_scale * 1.44269504f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = kNegInf;
#pragma unroll
      for (int i = 2 * half; i < kMaxBlockKeys / 2; i += 4) {
        largest = fmaxf(largest, fmaxf(weights.x[i], weights.x[i + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
      largest *= scale;
      const float base = largest == kNegInf ? 0.0f : largest;
      float sum = 0;
#pragma unroll
      for (int i = 2 * half; i < kMaxBlockKeys / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = weights.x[i + e];
          x = cuda::exp2_fast(fmaf(x, scale, -base));
          sum += x;
        }
      }
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
      all[half] = sum;
      const int to = part_of(tile, half);
      if (to >= 0 && c == 0) {
        *reinterpret_cast<float2*>(&params_.part_state[to]) = make_float2(largest, sum);
      }
    }
  }

  // Sums over channels `panel` of the values. A weight is the sum of two bf16: one alone would cost
  // the output its last bit where few keys carry the weight. The second one leaves out values that
  // are not finite, as in a chain.
  __device__ void multiply_values(int tile, int panel, const WgmmaA (&rounded)[kMaxBlockKeys / 16],
                                  const WgmmaA (&rest)[kMaxBlockKeys / 16],
                                  WgmmaSums<kPassChannels>& out) const {
    const uint8_t* const own = shared_.values + panel * Memory::kKeyPanel;
    if (odd_) bring_values(tile, panel);
    const PanelMatrix values = cuda::panel_matrix(own, Memory::kKeyPanel);
    const PanelMatrix finite =
        cuda::panel_matrix(odd_ ? shared_.queries[1] : own, Memory::kKeyPanel);
    cuda::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kMaxBlockKeys / 16; ++s) {
      constexpr int kStep = 16 * kPanelRowBytes;
      cuda::wgmma<PanelSide::kColumns>(out, rounded[s], values.advanced(s * kStep), s > 0);
      cuda::wgmma<PanelSide::kColumns>(out, rest[s], finite.advanced(s * kStep), true);
    }
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
  }

  // The values of an odd item that place `place` sees, to where the item's values were, and the
  // finite ones of them.
  __device__ void bring_values(int place, int panel) const {
    const MsaPool& pool = attend_.inputs.v;
    const auto* const from = static_cast<const bf16_t*>(pool.data) +
                             pool.offset(shared_.item.page, shared_.item.kv_head, 0);
    const int piece = thread() % 8;
    const int channel = panel * kPanelColumns + 8 * piece;
    const int seen = channel < attend_.head_dim ? shared_.places[place].seen : 0;
    sync();
#pragma unroll 1
    for (int token = thread() / 8; token < kMaxBlockKeys; token += kWarpgroupThreads / 8) {
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (token < seen) {
        eight = *reinterpret_cast<const uint4*>(from + token * pool.token_stride + channel);
      }
      const int at = cuda::panel_offset(token, piece);
      *reinterpret_cast<uint4*>(shared_.values + panel * Memory::kKeyPanel + at) = eight;
      *reinterpret_cast<uint4*>(shared_.queries[1] + at) = make_uint4(
          finite_pair(eight.x), finite_pair(eight.y), finite_pair(eight.z), finite_pair(eight.w));
    }
    cuda::shared_stores_before_wgmma();
    sync();
  }

  // Sums become means, and those multiples of `unit`, a power of two, with the largest finite one
  // in [1, 4): halves keep 11 bits of them.
  __device__ void store(int tile, int panel, const float (&sum)[2],
                        const WgmmaSums<kPassChannels>& out) const {
    const int c = lane() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = sum[half] == 0 ? 0.0f : 1.0f / sum[half];
      constexpr float kInfinity = std::numeric_limits<float>::infinity();
      float largest = 0;
#pragma unroll
      for (int i = 2 * half; i < kPassChannels / 2; i += 4) {
        largest = fmaxf(largest, fmaxf(fabsf(out.x[i]), fabsf(out.x[i + 1])));
      }
      if (largest == kInfinity) {
        largest = 0;
#pragma unroll
        for (int i = 2 * half; i < kPassChannels / 2; i += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float size = fabsf(out.x[i + e]);
            if (size < kInfinity) largest = fmaxf(largest, size);
          }
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
      largest *= inverse;
      const uint32_t exponent =
          largest == 0 ? 127 : min(max(__float_as_uint(largest) >> 23, 1u), 253u);
      const float factor = inverse * __uint_as_float((254 - exponent) << 23);
      const int to = part_of(tile, half);
      const bool present = to >= 0;
      if (present && c == 0) {
        params_.part_state[to].unit[panel] = __uint_as_float(exponent << 23);
      }
      // Lanes c and c ^ 1 exchange, so that the even one has four channels on end of eight columns,
      // the odd one of the next eight, and four lanes store 32 bytes.
      const int odd = c % 2;
      const int channel = panel * kPanelColumns + 8 * odd + c / 2 * 4;
      uint16_t* const values = params_.part_values + int64_t{to} * attend_.head_dim + channel;
#pragma unroll
      for (int n = 0; n < kPassChannels / 8; n += 2) {
        const float* const x = out.x + 4 * n + 2 * half;
        const uint32_t even_pair = cuda::f16_pair(x[0] * factor, x[1] * factor);
        const uint32_t odd_pair = cuda::f16_pair(x[4] * factor, x[5] * factor);
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, odd ? even_pair : odd_pair, 1);
        if (!present || channel + 8 * n >= attend_.head_dim) continue;
        *reinterpret_cast<uint2*>(values + 8 * n) =
            odd ? make_uint2(other, odd_pair) : make_uint2(even_pair, other);
      }
    }
  }

  const ByBlockParams& params_;
  const AttendParams& attend_;
  const int slab_;
  Memory& shared_;
  // The exchange tells the compiler that it is the same in all lanes.
  const int warpgroup_ = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarpgroupThreads, 0);
  bool odd_ = false;
};

template <int kDim>
__global__ void __launch_bounds__(kItemThreads, kBlocksPerSm)
    attend_items(const __grid_constant__ ByBlockParams params, int slab) {
// Nothing but code for sm_90a has the products; supports() refuses other devices.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t item_memory[];
  auto& shared = *reinterpret_cast<ItemMemory<kDim>*>(item_memory);
  SlabCounts& counts = params.slab_counts[slab];
#pragma unroll 1
  for (;;) {
    if (threadIdx.x == 0) {
      const int32_t index = atomicAdd(&counts.taken, 1);
      shared.item =
          index < counts.items ? params.items[slab * params.items_per_slab + index] : Item{};
    }
    __syncthreads();
    if (shared.item.count == 0) return;
    ItemWork<kDim>(params, slab, shared).run();
    __syncthreads();
  }
#endif
}

__global__ void __launch_bounds__(kFoldWarps* kWarpThreads)
    fold_places(const __grid_constant__ ByBlockParams params, int slab) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFF;
  constexpr int kHalfWarp = kWarpThreads / 2;  // has the channels of a partial result
  static_assert(kHalfWarp * kEight == kMaxDim);
  const AttendParams& attend = params.attend;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t heads = int64_t{attend.num_kv_heads} * attend.group;
  const int64_t at = int64_t{blockIdx.x} * kFoldWarps + threadIdx.x / kWarpThreads;
  const auto row = static_cast<int64_t>(static_cast<uint32_t>(at) / static_cast<uint32_t>(heads));
  const auto head = static_cast<int64_t>(static_cast<uint32_t>(at) % static_cast<uint32_t>(heads));
  const int64_t t = slab * params.slab_rows + row;
  if (row >= params.slab_rows || t >= attend.num_rows) return;
  const auto group = static_cast<uint32_t>(attend.group);
  const auto kv_head = static_cast<int64_t>(static_cast<uint32_t>(head) / group);
  const auto own = static_cast<int64_t>(static_cast<uint32_t>(head) % group);
  const int count = params.num_places[t * attend.num_kv_heads + kv_head];
  const int64_t first = (row * attend.num_kv_heads + kv_head) * attend.topk * group + own;
  const PartState* const states = params.part_state + first;
  const auto weight_of = [&](const PartState& state, float base) {
    return state.sum * cuda::exp2_fast(state.largest - base);
  };

  float largest = kNegInf;
  for (int i = lane; i < count; i += kWarpThreads) {
    largest = fmaxf(largest, states[int64_t{i} * group].largest);
  }
  largest = cuda::warp_max(largest);
  const float base = largest == kNegInf ? 0.0f : largest;
  float sum = 0;
  for (int i = lane; i < count; i += kWarpThreads) {
    sum += weight_of(states[int64_t{i} * group], base);
  }
  for (int step = kHalfWarp; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  const HeadResult result = finish_head(attend, kv_head, head, largest, sum);
  if (attend.inputs.lse && lane == 0) attend.inputs.lse(t, head) = result.lse;

  // Half a warp adds up every other partial result.
  const int half = lane / kHalfWarp;
  const int channel = lane % kHalfWarp * kEight;
  const bool present = channel < attend.head_dim;
  const int64_t stride = int64_t{group} * attend.head_dim;
  const uint16_t* const values = params.part_values + first * attend.head_dim + channel;
  float total[kEight] = {};
  for (int base_part = 0; base_part < count; base_part += kWarpThreads) {
    const int parts = min(count - base_part, kWarpThreads);
    float weight = 0, units[2] = {};
    if (lane < parts) {
      const PartState state = states[int64_t{base_part + lane} * group];
      weight = weight_of(state, base) * result.factor;
      units[0] = weight * state.unit[0];
      units[1] = weight * state.unit[1];
    }
    // A block without weight counts for nothing, whatever its values are.
    const uint32_t weighty = __ballot_sync(kAllLanes, weight != 0);
    const uint16_t* const from = values + base_part * stride;
#pragma unroll 8
    for (int j = 0; j < parts; j += 2) {
      const int part = j + half;
      const float low_channels = __shfl_sync(kAllLanes, units[0], part);
      const float high_channels = __shfl_sync(kAllLanes, units[1], part);
      const float unit = channel < kPassChannels ? low_channels : high_channels;
      uint4 stored = make_uint4(0, 0, 0, 0);
      if (present && (weighty >> part & 1) != 0) {
        stored = *reinterpret_cast<const uint4*>(from + part * stride);
      }
      const uint32_t pairs[] = {stored.x, stored.y, stored.z, stored.w};
#pragma unroll
      for (int i = 0; i < kEight / 2; ++i) {
        const float2 two = cuda::f16_values(pairs[i]);
        total[2 * i] = fmaf(unit, two.x, total[2 * i]);
        total[2 * i + 1] = fmaf(unit, two.y, total[2 * i + 1]);
      }
    }
  }
#pragma unroll
  for (float& x : total) x += __shfl_xor_sync(kAllLanes, x, kHalfWarp);
  if (!present || half != 0) return;
  store_channels({result.lse, 1.0f, result.empty}, total, attend.inputs.out.row(t, head) + channel);
}

// What follows from the problem.
struct Slabs {
  int64_t rows;
  int64_t number;

  explicit Slabs(const MsaAttendProblem& problem) {
    const int64_t heads = problem.num_heads * problem.topk;
    const int64_t row_bytes =
        heads * (problem.head_dim * static_cast<int64_t>(sizeof(uint16_t)) + sizeof(PartState));
    const int64_t bound = std::max<int64_t>(1, problem.max_rows);
    const int64_t most = std::clamp<int64_t>(kMaxSlabBytes / row_bytes, 1, bound);
    number = (bound + most - 1) / most;
    rows = (bound + number - 1) / number;
  }
};

int64_t places_of(const MsaAttendProblem& problem, int64_t rows) {
  return rows * problem.num_kv_heads * problem.topk;
}
int64_t cells_of(const MsaAttendProblem& problem) {
  return problem.num_kv_heads * problem.max_requests * problem.max_pages;
}
// Heads of a place take a power of two of a tile's rows.
int group_shift_of(const MsaAttendProblem& problem) {
  int shift = 0;
  while (int64_t{1} << shift < problem.num_heads / problem.num_kv_heads) ++shift;
  return shift;
}
int64_t item_places_of(const MsaAttendProblem& problem) {
  return std::min(kItemRows >> group_shift_of(problem), kMaxItemPlaces);
}
// Every cell with places has an item that is not full.
int64_t items_of(const MsaAttendProblem& problem, const Slabs& slabs) {
  const int64_t places = places_of(problem, slabs.rows);
  return places / item_places_of(problem) + std::min(places, cells_of(problem));
}

struct ByBlockMemory {
  int32_t *offsets, *num_places, *row_end, *slab_counts, *firsts;
  int64_t num_slab_counts;
  Target* targets;
  Place* places;
  Item* items;
  PartState* part_state;
  uint16_t* part_values;

  ByBlockMemory(const MsaAttendProblem& problem, const Slabs& slabs, WorkspaceCutter& cutter) {
    const int64_t places_all = places_of(problem, problem.max_rows);
    const int64_t parts = slabs.rows * problem.num_heads * problem.topk;
    offsets = cutter.take<int32_t>(problem.max_requests + 1);
    num_places = cutter.take<int32_t>(problem.max_rows * problem.num_kv_heads);
    row_end = cutter.take<int32_t>(problem.max_rows);
    num_slab_counts = slabs.number * kSlabCounts;
    slab_counts = cutter.take<int32_t>(num_slab_counts + slabs.number * cells_of(problem));
    firsts = cutter.take<int32_t>(slabs.number * cells_of(problem));
    targets = cutter.take<Target>(places_all);
    places = cutter.take<Place>(slabs.number * places_of(problem, slabs.rows));
    items = cutter.take<Item>(slabs.number * items_of(problem, slabs));
    part_state = cutter.take<PartState>(parts);
    part_values = cutter.take<uint16_t>(parts * problem.head_dim);
  }
};

template <int kDim>
void launch_items(const ByBlockParams& params, int slab, int64_t num_blocks, Stream stream) {
  cuda::launch(kAttendOp, attend_items<kDim>,
               {dim3(static_cast<unsigned>(std::min(num_blocks, params.items_per_slab))),
                dim3(kItemThreads), sizeof(ItemMemory<kDim>)},
               stream, params, slab);
}

}  // namespace
}  // namespace fovea::internal::msa

namespace fovea::internal {

Refusal msa_attend_cuda_sm90_supports(const MsaAttendProblem& problem) {
  if (problem.kv_mode != MsaKvMode::kBf16) return "takes kv_mode bf16 only";
  const int64_t group = problem.num_heads / problem.num_kv_heads;
  if (group > msa::kMaxGroup) {
    return "needs at most " + std::to_string(msa::kMaxGroup) + " query heads per KV head, got " +
           std::to_string(group);
  }
  if (problem.head_dim > msa::kMaxDim) {
    return "takes head_dim up to " + std::to_string(msa::kMaxDim) + ", got " +
           std::to_string(problem.head_dim);
  }
  if (problem.block_size > msa::kMaxBlockKeys) {
    return "takes blocks of at most " + std::to_string(msa::kMaxBlockKeys) + " tokens, got " +
           std::to_string(problem.block_size);
  }
  if (problem.topk < 1 || problem.topk > 1024) {
    return "takes lists of 1 to 1024 blocks, got topk = " + std::to_string(problem.topk);
  }
  constexpr int64_t kMaxEntries = int64_t{1} << 30;
  const int64_t pairs = problem.max_rows * problem.num_kv_heads;
  const int64_t columns = problem.max_requests * problem.max_pages;
  if (problem.max_rows * problem.num_heads > kMaxEntries || pairs > kMaxEntries / problem.topk) {
    return "takes at most 2^30 rows times heads and rows times list entries";
  }
  if (columns > kMaxEntries / problem.num_kv_heads ||
      msa::Slabs(problem).number >
          kMaxEntries / std::max<int64_t>(1, columns * problem.num_kv_heads)) {
    return "takes at most 2^30 blocks of requests times KV heads times slabs of rows";
  }
  return {};
}

Refusal msa_attend_cuda_sm90_preferred(const MsaAttendProblem& problem) {
  constexpr int64_t kMinPairs = 2048;  // rows times KV heads that fill a GPU
  constexpr int64_t kMinSharing = 2;   // rows that list a block, by the bounds
  if (2 * problem.block_size <= msa::kMaxBlockKeys) return "multiplies every block as 128 tokens";
  // Plans of few rows have to choose as those of many do.
  if (problem.batch_invariant) return {};
  if (problem.max_rows * problem.num_kv_heads < kMinPairs) {
    return "pays from " + std::to_string(kMinPairs) + " rows times KV heads on";
  }
  if (problem.max_rows * problem.topk < kMinSharing * problem.max_requests * problem.max_pages) {
    return "pays where " + std::to_string(kMinSharing) + " rows list a block on average";
  }
  return {};
}

size_t msa_attend_cuda_sm90_workspace(const MsaAttendProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  const msa::ByBlockMemory memory(problem, msa::Slabs(problem), cutter);
  return cutter.used_bytes();
}

void msa_attend_cuda_sm90(const MsaAttendProblem& problem, const Device& device,
                          const MsaAttendTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const msa::Slabs slabs(problem);
  WorkspaceCutter cutter(workspace);
  const msa::ByBlockMemory memory(problem, slabs, cutter);
  if (tensors.q.shape[0] == 0) return;
  msa::ByBlockParams params{};
  msa::AttendParams& attend = params.attend;
  attend = msa::attend_params(problem, tensors, memory.offsets, stream);
  const int64_t rows = attend.num_rows;
  const auto num_slabs = static_cast<int>((rows + slabs.rows - 1) / slabs.rows);
  const int64_t cells =
      problem.num_kv_heads * attend.rows.batch.num_requests() * attend.inputs.page_table.shape[1];
  params.slab_rows = slabs.rows;
  params.cells_per_slab = static_cast<int32_t>(cells);
  params.item_places = static_cast<int32_t>(msa::item_places_of(problem));
  params.group_shift = msa::group_shift_of(problem);
  params.places_per_slab = msa::places_of(problem, slabs.rows);
  params.items_per_slab = msa::items_of(problem, slabs);
  params.num_places = memory.num_places;
  params.row_end = memory.row_end;
  params.targets = memory.targets;
  params.slab_counts = reinterpret_cast<msa::SlabCounts*>(memory.slab_counts);
  params.counts = memory.slab_counts + memory.num_slab_counts;
  params.firsts = memory.firsts;
  params.places = memory.places;
  params.items = memory.items;
  params.part_values = memory.part_values;
  params.part_state = memory.part_state;

  const int64_t counters = memory.num_slab_counts + cells * num_slabs;
  cuda::launch(msa::kAttendOp, msa::zero_counts,
               {dim3(cuda::grid_blocks(counters, msa::kListThreads)), dim3(msa::kListThreads)},
               stream, memory.slab_counts, counters);
  cuda::launch(msa::kAttendOp, msa::count_places,
               {dim3(static_cast<unsigned>(attend.num_tiles * problem.num_kv_heads)),
                dim3(msa::kRowWarps * msa::kWarpThreads),
                msa::kRowWarps * msa::ListMemory::bytes(problem.topk)},
               stream, params);
  cuda::launch(msa::kAttendOp, msa::cut_items,
               {dim3(cuda::grid_blocks(cells, msa::kCutThreads), static_cast<unsigned>(num_slabs)),
                dim3(msa::kCutThreads)},
               stream, params);
  cuda::launch(msa::kAttendOp, msa::sort_places,
               {dim3(cuda::grid_blocks(msa::places_of(problem, rows), msa::kListThreads)),
                dim3(msa::kListThreads)},
               stream, params);
  const int64_t num_blocks = cuda::device_facts(device.ordinal).num_sms * msa::kBlocksPerSm;
  for (int slab = 0; slab < num_slabs; ++slab) {
    if (problem.head_dim <= 64) {
      msa::launch_items<64>(params, slab, num_blocks, stream);
    } else {
      msa::launch_items<128>(params, slab, num_blocks, stream);
    }
    const int64_t here = std::min(slabs.rows, rows - slab * slabs.rows);
    cuda::launch(msa::kAttendOp, msa::fold_places,
                 {dim3(cuda::grid_blocks(here * problem.num_heads, msa::kFoldWarps)),
                  dim3(msa::kFoldWarps * msa::kWarpThreads)},
                 stream, params, slab);
  }
}

}  // namespace fovea::internal
