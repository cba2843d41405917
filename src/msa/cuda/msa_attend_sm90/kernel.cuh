#pragma once

#include <algorithm>

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

}  // namespace fovea::internal::msa::by_block
