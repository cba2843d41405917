#pragma once

#include <algorithm>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/f16.cuh"
#include "src/msa/cuda/msa_attend_sm90/config.h"

namespace fovea::internal::msa::by_block {

using cuda::kPanelColumns;
using cuda::kPanelRowBytes;
using cuda::PanelMatrix;
using cuda::PanelSide;
using cuda::WgmmaA;
using cuda::WgmmaSums;

// What a thread block has in shared memory: panels as wgmma.cuh has them.
template <int kDim>
struct ItemMemory {
  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kKeyPanel = kMaxBlockKeys * kPanelRowBytes;
  static constexpr int kQueryPanel = kTileRows * kPanelRowBytes;
  struct alignas(16) ItemPlace {
    const bf16_t* queries;
    int32_t part;  // as in Place; -1: there is none
    int32_t seen;
  };
  alignas(1024) uint8_t keys[kPanels * kKeyPanel];
  alignas(1024) uint8_t values[kPanels * kKeyPanel];
  alignas(1024) uint8_t queries[kWarpgroups][kPanels * kQueryPanel];
  ItemPlace places[kMaxItemPlaces + 1];  // none behind those of the item
  // That the thread block works on, and the one behind it, whose places are on their way; count 0:
  // none is left.
  Item item, next;
  Place next_places[kMaxItemPlaces];
  int32_t seen[kItemWarps];         // the most that places of a warp see
  uint32_t magnitudes[kItemWarps];  // bits of the largest value that a warp has copied
};

// A thread's share of an item.
//
// Rows of a tile are the heads of one place after another. All keys of the block are multiplied
// with all rows; what a row does not see gets no weight, and zero times a finite value is nothing.
// An item with a value that is not finite is *odd*: a tile is then one place, and its values are
// brought to shared memory anew, those that the row does not see as zeros.
//
// Sums of values are stored as halves, with 11 bits. Weights of an item have a power of two as a
// factor (a bf16 is as good with it), so that 128 times the largest value fits; values beyond
// 2^64, or of an item that has none above 2^-64, are multiplied with a power of two before.
template <int kDim>
class ItemWork {
 public:
  using Memory = ItemMemory<kDim>;
  using ItemPlace = typename Memory::ItemPlace;

  __device__ ItemWork(const ByBlockParams& params, int slab, Memory& shared)
      : params_(params), attend_(params.attend), slab_(slab), shared_(shared) {}

  // An item that no thread block has begun.
  __device__ static Item take_item(const ByBlockParams& params, int slab) {
    SlabCounts& counts = params.slab_counts[slab];
    const int32_t index = atomicAdd(&counts.taken, 1);
    return index < counts.items ? params.items[slab * params.items_per_slab + index] : Item{};
  }
  // Starts the copy of the thread's place.
  __device__ static void copy_place(const ByBlockParams& params, const Item& item, Memory& shared) {
    if (threadIdx.x >= item.count) return;
    static_assert(sizeof(Place) == 8);
    const auto* const from =
        reinterpret_cast<const int32_t*>(params.places + item.first + threadIdx.x);
    auto* const to = reinterpret_cast<int32_t*>(shared.next_places + threadIdx.x);
    cuda::copy_async<4>(to, from, true);
    cuda::copy_async<4>(to + 1, from + 1, true);
  }

  __device__ void run() {
    cuda::wait_for_copies();  // of the thread's place
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
    if (threadIdx.x == 0) shared_.next = take_item(params_, slab_);
    cuda::wait_for_copies();
    uint32_t magnitude = largest_magnitude(kInfinityBits | 0x7F);
    int tile = warpgroup_;
    if (magnitude >= kInfinityBits) {
      odd_ = true;
      __syncthreads();
      magnitude = largest_magnitude(kInfinityBits - 1);
      if (warpgroup_ == 0) {
        copy_queries(0);
      } else {
        tile = shared_.item.count;
      }
    }
    choose_scale(magnitude);
    copy_place(params_, shared_.next, shared_);
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
    const auto* const q = static_cast<const bf16_t*>(attend_.q);
    const ItemPlace none{q, -1, 0};
    if (threadIdx.x == 0) shared_.places[kMaxItemPlaces] = none;
    if (threadIdx.x >= shared_.item.count) {
      shared_.places[threadIdx.x] = none;
      return 0;
    }
    const Place place = shared_.next_places[threadIdx.x];
    const uint32_t row = static_cast<uint32_t>(place.part) / static_cast<uint32_t>(attend_.topk) /
                         static_cast<uint32_t>(attend_.num_kv_heads);
    const int64_t t = slab_ * params_.slab_rows + row;
    shared_.places[threadIdx.x] = {
        q + t * attend_.q_row + int64_t{shared_.item.kv_head} * attend_.group * attend_.q_head,
        place.part, place.seen};
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

  // The bits of the largest magnitude among the values, those above `most` left out. A barrier of
  // the block.
  __device__ uint32_t largest_magnitude(uint32_t most) const {
    uint32_t largest = 0;
    for_pieces([&](int, int offset) {
      const uint4 eight = *reinterpret_cast<const uint4*>(shared_.values + offset);
      for (const uint32_t pair : {eight.x, eight.y, eight.z, eight.w}) {
        for (const uint32_t bits : {pair & 0x7FFF, pair >> 16 & 0x7FFF}) {
          if (bits <= most) largest = max(largest, bits);
        }
      }
    });
    largest = __reduce_max_sync(0xFFFFFFFF, largest);
    if (lane() == 0) shared_.magnitudes[threadIdx.x / kWarpThreads] = largest;
    cuda::shared_stores_before_wgmma();
    __syncthreads();
#pragma unroll
    for (const uint32_t other : shared_.magnitudes) largest = max(largest, other);
    return largest;
  }

  __device__ void choose_scale(uint32_t magnitude) {
    constexpr int kFar = 64;
    constexpr int kBias = 127;
    const int exponent =
        magnitude == 0 ? 0 : min(max(static_cast<int>(magnitude >> 7), 8), 254) - kBias;
    unit_ = __uint_as_float(static_cast<uint32_t>(exponent - 7 + kBias) << 23);
    const int turn = exponent > kFar ? -kFar : exponent < -kFar ? kFar : 0;
    shift_ = 7 - (exponent + turn);
    if (turn == 0) return;
    values_factor_ = __uint_as_float(static_cast<uint32_t>(turn + kBias) << 23);
    for_pieces([&](int, int offset) {
      auto* const eight = reinterpret_cast<uint4*>(shared_.values + offset);
      *eight = scaled(*eight);
    });
    cuda::shared_stores_before_wgmma();
    __syncthreads();
  }
  __device__ uint4 scaled(const uint4& eight) const {
    const auto pair = [&](uint32_t x) {
      return cuda::bf16_pair(__uint_as_float(x << 16) * values_factor_,
                             __uint_as_float(x & 0xFFFF0000) * values_factor_);
    };
    return make_uint4(pair(eight.x), pair(eight.y), pair(eight.z), pair(eight.w));
  }

  // Starts copies of the queries of a tile; rows that have no head get those of another. A thread
  // has a piece of every panel of four rows, of one head each.
  __device__ void copy_queries(int tile) const {
    // Not before the loop over tiles, where it would take registers.
    const int own_thread = cuda::computed_here(thread());
    const int piece = own_thread % 8;
    const int first_row = own_thread / 8;
    const int head = head_of(first_row);
    const int64_t own = (head < attend_.group ? head * attend_.q_head : 0) + 8 * piece;
    uint8_t* const to = shared_.queries[warpgroup_] + cuda::panel_offset(first_row, piece);
    constexpr int kRowStep = kWarpgroupThreads / 8;
    static_assert(kRowStep % 8 == 0 && kRowStep >= kMaxGroup);  // the order of pieces, the head
#pragma unroll
    for (int i = 0; i < kTileRows / kRowStep; ++i) {
      const bf16_t* const from =
          shared_.places[place_of(tile, first_row + i * kRowStep)].queries + own;
#pragma unroll
      for (int panel = 0; panel < Memory::kPanels; ++panel) {
        cuda::copy_async<16>(to + panel * Memory::kQueryPanel + i * kRowStep * kPanelRowBytes,
                             from + panel * kPanelColumns,
                             panel * kPanelColumns + 8 * piece < attend_.head_dim);
      }
    }
  }

  // The place of a tile's row.
  __device__ int place_of(int tile, int row) const {
    const int in_tile = row >> params_.group_shift;
    return in_tile < places_per_tile() ? tile * places_per_tile() + in_tile : kMaxItemPlaces;
  }
  __device__ int head_of(int row) const { return row & ((1 << params_.group_shift) - 1); }

  // The thread has rows g and g + 8 of its warp's 16.
  struct OwnRow {
    int head;
    int part;  // -1: there is no such place or head
    int seen;
  };
  __device__ OwnRow own_row(int tile, int half) const {
    const int row = thread() / kWarpThreads * 16 + lane() / 4 + 8 * half;
    const ItemPlace& place = shared_.places[place_of(tile, row)];
    const int head = head_of(row);
    return {head, head < attend_.group ? place.part : -1, place.seen};
  }

  __device__ void attend_tile(int tile) {
    cuda::wait_for_copies();
    cuda::shared_stores_before_wgmma();
    sync();
    WgmmaSums<kMaxBlockKeys> logits;
    multiply_keys(logits);
    sync();
    if (has_tile(next_tile(tile))) copy_queries(next_tile(tile));

    weigh(tile, logits);
    WgmmaA weights[kMaxBlockKeys / 16];
#pragma unroll
    for (int s = 0; s < kMaxBlockKeys / 16; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[s].x[i] = cuda::bf16_pair(logits.x[8 * s + 2 * i], logits.x[8 * s + 2 * i + 1]);
      }
    }
    if (odd_) bring_values(tile);
    WgmmaSums<kDim> out;
    multiply_values(weights, out);
    store(tile, out);
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
  __device__ void weigh(int tile, WgmmaSums<kMaxBlockKeys>& weights) const {
    const OwnRow rows[2] = {own_row(tile, 0), own_row(tile, 1)};
    const int c = lane() % 4;
    if (__any_sync(0xFFFFFFFF, min(rows[0].seen, rows[1].seen) < kMaxBlockKeys)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int end = rows[half].seen - 2 * c;
#pragma unroll
        for (int i = 2 * half; i < kMaxBlockKeys / 2; i += 4) {
          if (2 * i - 4 * half >= end) weights.x[i] = kNegInf;
          if (2 * i - 4 * half + 1 >= end) weights.x[i + 1] = kNegInf;
        }
      }
    }
    const float scale = attend_.softmax_scale * 1.44269504f;
    const float to_sum = __uint_as_float(static_cast<uint32_t>(127 - shift_) << 23);
    // Chains of both rows side by side, two each.
    float largest[2][2] = {{kNegInf, kNegInf}, {kNegInf, kNegInf}};
#pragma unroll
    for (int i = 0; i < kMaxBlockKeys / 2; ++i) {
      float& x = largest[i / 2 % 2][i % 2];
      x = fmaxf(x, weights.x[i]);
    }
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& x = largest[half][0];
      x = fmaxf(x, largest[half][1]);
      x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
      x *= scale;
      base[half] = (x == kNegInf ? 0.0f : x) - static_cast<float>(shift_);
    }
    float sums[2][2] = {};
#pragma unroll
    for (int i = 0; i < kMaxBlockKeys / 2; ++i) {
      float& x = weights.x[i];
      x = cuda::exp2_fast(fmaf(x, scale, -base[i / 2 % 2]));
      sums[i / 2 % 2][i % 2] += x;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums[half][0] + sums[half][1];
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
      if (rows[half].part < 0 || c != 0) continue;
      const int64_t at = (int64_t{rows[half].part} << params_.group_shift) + rows[half].head;
      *reinterpret_cast<float4*>(&params_.part_state[at]) =
          make_float4(largest[half][0], sum * to_sum, unit_, 0);
    }
  }

  // Weights are rounded to bf16 once; their sum is not.
  __device__ void multiply_values(const WgmmaA (&weights)[kMaxBlockKeys / 16],
                                  WgmmaSums<kDim>& out) const {
    const PanelMatrix values = cuda::panel_matrix(shared_.values, Memory::kKeyPanel);
    cuda::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kMaxBlockKeys / 16; ++s) {
      cuda::wgmma<PanelSide::kColumns>(out, weights[s], values.advanced(s * 16 * kPanelRowBytes),
                                       s > 0);
    }
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
  }

  // The values of an odd item that place `place` sees, to where the item's values were.
  __device__ void bring_values(int place) const {
    const MsaPool& pool = attend_.inputs.v;
    const auto* const from = static_cast<const bf16_t*>(pool.data) +
                             pool.offset(shared_.item.page, shared_.item.kv_head, 0);
    const int piece = thread() % (kDim / 8);
    const int seen = 8 * piece < attend_.head_dim ? shared_.places[place].seen : 0;
    sync();
#pragma unroll 1
    for (int token = thread() / (kDim / 8); token < kMaxBlockKeys;
         token += kWarpgroupThreads / (kDim / 8)) {
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (token < seen) {
        eight = *reinterpret_cast<const uint4*>(from + token * pool.token_stride + 8 * piece);
        if (values_factor_ != 1) eight = scaled(eight);
      }
      *reinterpret_cast<uint4*>(shared_.values + piece / 8 * Memory::kKeyPanel +
                                cuda::panel_offset(token, piece % 8)) = eight;
    }
    cuda::shared_stores_before_wgmma();
    sync();
  }

  __device__ void store(int tile, const WgmmaSums<kDim>& out) const {
    const int shift = params_.group_shift;
    const int step = 4 * PartUnit::heads_side_by_side(shift);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const OwnRow row = own_row(tile, half);
      if (row.part < 0) continue;
      uint4* const to = params_.part_values + (int64_t{row.part} << shift) * (kDim / 8) +
                        PartUnit{row.head, 0, lane() % 4}.template index<kDim>(shift);
#pragma unroll
      for (int turn = 0; turn < kDim / 32; ++turn) {
        const auto pair = [&](int i) {
          const float* const x = out.x + 4 * (4 * turn + i) + 2 * half;
          return cuda::f16_pair(x[0], x[1]);
        };
        to[turn * step] = make_uint4(pair(0), pair(1), pair(2), pair(3));
      }
    }
  }

  static constexpr uint32_t kInfinityBits = 0x7F80;  // of bf16

  const ByBlockParams& params_;
  const AttendParams& attend_;
  const int slab_;
  Memory& shared_;
  // The exchange tells the compiler that it is the same in all lanes.
  const int warpgroup_ = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarpgroupThreads, 0);
  bool odd_ = false;
  int shift_ = 0;   // log2 of the factor of weights
  float unit_ = 1;  // as in PartState
  float values_factor_ = 1;
};

template <int kDim>
__global__ void __launch_bounds__(kItemThreads, kBlocksPerSm)
    attend_items(const __grid_constant__ ByBlockParams params, int slab) {
// Nothing but code for sm_90a has the products; supports() refuses other devices.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t item_memory[];
  auto& shared = *reinterpret_cast<ItemMemory<kDim>*>(item_memory);
  using Work = ItemWork<kDim>;
  if (threadIdx.x == 0) shared.item = Work::take_item(params, slab);
  __syncthreads();
  Work::copy_place(params, shared.item, shared);
#pragma unroll 1
  while (shared.item.count > 0) {
    Work(params, slab, shared).run();
    __syncthreads();
    if (threadIdx.x == 0) shared.item = shared.next;
    __syncthreads();
  }
#endif
}

}  // namespace fovea::internal::msa::by_block
