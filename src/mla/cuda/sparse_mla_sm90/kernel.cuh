#pragma once

#include <cstdint>
#include <limits>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/mbarrier.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/mla/cuda/latent_tiles.cuh"
#include "src/mla/cuda/listed_keys.cuh"
#include "src/mla/cuda/sparse_mla_sm90/config.h"

// A block takes 64 heads of one row and one part of its list, 64 slots at a time. Its warpgroups:
//
//   0, logits  Q K^T of a tile, softmax, weights as the sum of two bf16 (latent_tiles.cuh) to
//              shared memory, and its channels 0..255 of the values
//   1, values  channels 256..511. The rounded weights are multiplied beside warpgroup 0; what they
//              lack while that one takes the softmax of the next tile, when the tensor cores would
//              have nothing else
//   2, keys    looks the slots up, decodes their rows to bf16 and stores them. A warp has 16 keys
//              of a tile, whose addresses and scales its lanes hold for each other
//
// A tile comes by `full` and goes by `left_free` (channels 0..255, by warpgroup 0) and `right_free`
// (the others, by warpgroup 1), so that its place is filled while its right half is still in use.
// In the order of time, tile by tile:
//
//   logits  | Q K^T(i+1)        | softmax(i+1)    | P(i+1) V left, then Q K^T(i+2)
//   values  |  (rounded is done)| rest of P(i) V  | rounded P(i+1) V
//   keys    | left half(i+2) . . . . | right half(i+2) . . . .
namespace fovea::internal::sparse_sm90 {

using cuda::Mbarrier;
using cuda::PanelMatrix;
using cuda::PanelSide;
using cuda::WgmmaSums;
using latent::AskedScales;
using latent::kNegInf;
using latent::Outputs;
using latent::Queries;
using latent::RowLayout;
using latent::RowTurn;
using latent::Scores;

inline constexpr int kPanelBytes = kHeads * cuda::kPanelRowBytes;
inline constexpr int kTileBytes = kTilePanels * kPanelBytes;
inline constexpr float kLog2E = 1.44269504f;

struct Params {
  Queries queries;
  SparseMlaSegment segments[2];
  RowLayout layouts[2];
  Scores scores;
  Outputs outputs;
  InverseRotations rotations;
  int rope_dim;
  unsigned head_groups;
  bool wide_out;  // every eighth channel of the output at a multiple of 16 bytes

  __device__ RowParts parts(int64_t t) const {
    return {segments[0].length(t), segments[1].length(t), outputs.num_parts};
  }
};

// Sums on their way out, where the tiles were: a warpgroup's 64 heads x 256 channels. Rows are 264
// floats apart, for stores of two by eight rows at a time.
struct StagedValues {
  float x[kHeads][kHalfChannels + 8];
};

template <int kHeadDim>
struct SharedMemory {
  static constexpr int kPanels = kHeadDim / cuda::kPanelColumns;
  alignas(1024) uint8_t q[kPanels][kPanelBytes];
  alignas(1024) uint8_t tiles[kStages][kTilePanels][kPanelBytes];
  alignas(1024) uint8_t weights[kPanelBytes];
  float factors[kHeads];  // what is left of the old sums, and at the end of all
  alignas(8) uint16_t present[kStages][kKeyWarps];  // a bit a key
  alignas(4) uint8_t has_rests[4];                  // of the tile in hand, by warps of 16 heads
  Mbarrier full[kStages], left_free[kStages], right_free[kStages];

  // Where the tiles were, once all of them are used up.
  __device__ StagedValues& staged(int group) {
    static_assert(2 * sizeof(StagedValues) <= sizeof(tiles));
    return reinterpret_cast<StagedValues*>(tiles)[group];
  }
};

// The place of 8 channels of a tile's key: piece `piece` of panel `panel`.
__device__ inline uint4* tile_piece(uint8_t (&tile)[kTilePanels][kPanelBytes], int panel, int key,
                                    int piece) {
  return reinterpret_cast<uint4*>(tile[panel] + cuda::panel_offset(key, piece));
}

// ---- keys ----

// The rows of 16 keys of a tile: lane l knows key l % 16.
struct LaneRow {
  const uint8_t* row = nullptr;  // null: absent
  // v32: the scales of channels 128 (l / 16) .. and 256 + 128 (l / 16) ..; r512 and f576: twice
  // that of the row; v4: its 7 bytes. 0 where absent.
  uint32_t scales[2] = {0, 0};
};

template <class T>
__device__ inline T load(const uint8_t* from) {
  return __ldg(reinterpret_cast<const T*>(from));
}

// The row of a key of the warp.
__device__ inline const uint8_t* row_of(const LaneRow& own, int key) {
  return reinterpret_cast<const uint8_t*>(
      __shfl_sync(0xFFFFFFFF, reinterpret_cast<unsigned long long>(own.row), key));
}

// The scales of a row that nobody waits for so far, as `LaneRow` has them after keep().
__device__ inline AskedScales ask(const RowLayout& layout, const LatentAddress& found) {
  AskedScales asked;
  if (found.row == nullptr) return asked;
  if (layout.format != RowFormat::kV32) return latent::ask_scales(layout, found.scales);
  const uint8_t* const from = found.row + kV32ScaleOffset + threadIdx.x / 16 % 2 * 4;
  if (layout.aligned) {
    asked.low = load<uint32_t>(from);
    asked.middle = load<uint32_t>(from + 8);
  } else {
    asked.low = __float_as_uint(cuda::load_float<false>(from));
    asked.middle = __float_as_uint(cuda::load_float<false>(from + 8));
  }
  return asked;
}

__device__ inline LaneRow keep(const RowLayout& layout, const uint8_t* row,
                               const AskedScales& asked) {
  if (row == nullptr) return {};
  const uint32_t one = __float_as_uint(1.0f);
  if (layout.format == RowFormat::kF576) return {row, {one, one}};
  if (layout.format == RowFormat::kV32) return {row, {asked.low, asked.middle}};
  const uint64_t joined = latent::joined_scales(layout, asked);
  const auto low = static_cast<uint32_t>(joined);
  const bool is_v4 = layout.format == RowFormat::kV4;
  return {row, {low, is_v4 ? static_cast<uint32_t>(joined >> 32) : low}};
}

// Asks for the lines of a row that will be read, half of them by each lane that knows it.
__device__ inline void prefetch_row(const RowLayout& layout, const uint8_t* row) {
  if (row == nullptr) return;
  const int bytes = static_cast<int>(layout.row_bytes);
  for (int at = threadIdx.x / 16 % 2 * 128; at < bytes; at += 256) cuda::prefetch_l2(row + at);
}

// The scale of the lane's 8 channels of half `half` of key `key`.
__device__ __forceinline__ float scale_of(bool is_v4, const LaneRow& own, int half, int key) {
  const int lane = threadIdx.x % 32;
  const uint32_t word = __shfl_sync(0xFFFFFFFF, half == 0 ? own.scales[0] : own.scales[1],
                                    key + (is_v4 ? 0 : lane / 16 * 16));
  // Of v4 a byte: 2^(byte - 127); 0 is below the normal range, 255 is NaN. No branch, no call. An
  // absent row has zeros for codes, which any finite scale keeps.
  const uint32_t bits = max((word >> (lane / 8 * 8) & 0xFF) << 23, 0x00400000u);
  return __uint_as_float(!is_v4 ? word : bits == 0x7F800000u ? 0x7FC00000u : bits);
}

// Eight keys' codes of one half of the channels, 8 a lane.
struct HalfRows {
  uint2 codes[8];
};

// Unit u of a tile of packed rows: keys 8 (u % 2) .. of the warp, half u / 2 of the channels.
__device__ __forceinline__ HalfRows load_unit(const LaneRow& own, int unit) {
  HalfRows half;
  const int offset = unit / 2 * 256 + 8 * static_cast<int>(threadIdx.x % 32);
  const uint8_t* row[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) row[n] = row_of(own, unit % 2 * 8 + n);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    half.codes[n] = make_uint2(0, 0);
    if (row[n] != nullptr) half.codes[n] = load<uint2>(row[n] + offset);
  }
  return half;
}

__device__ __forceinline__ void store_unit(bool is_v4, const LaneRow& own, int unit,
                                           const HalfRows& half, int first_key,
                                           uint8_t (&tile)[kTilePanels][kPanelBytes]) {
  const int lane = threadIdx.x % 32;
  const int panel = unit / 2 * kHalfPanels + lane / 8;
  float scale[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) scale[n] = scale_of(is_v4, own, unit / 2, unit % 2 * 8 + n);
  // The last channels of v4 are no codes.
  const bool is_code = !is_v4 || panel < kV4LatentDim / cuda::kPanelColumns;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const uint4 values = latent::decode8(half.codes[n], scale[n]);
    if (is_code) *tile_piece(tile, panel, first_key + unit % 2 * 8 + n, lane % 8) = values;
  }
}

// The rope channels of 16 keys: a lane has 8 channels of key 4 n + lane / 8. Those of f576 are
// codes; the others travel by themselves. `readable`: any address that may be named for what is
// absent.
__device__ __forceinline__ void bring_rope(RowFormat format, const LaneRow& own,
                                           const uint8_t* readable, int first_key,
                                           uint8_t (&tile)[kTilePanels][kPanelBytes]) {
  const int lane = threadIdx.x % 32;
  const int panel = format == RowFormat::kV4 ? kRestPanel - 1 : kRestPanel;
  const int64_t offset = format == RowFormat::kV4    ? kV4LatentDim
                         : format == RowFormat::kV32 ? kV32RopeOffset
                                                     : 2 * kLatentDim;  // bf16
#pragma unroll
  for (int n = 0; n < kWarpKeys / 4; ++n) {
    const uint8_t* const row = row_of(own, 4 * n + lane / 8);
    uint4* const to = tile_piece(tile, panel, first_key + 4 * n + lane / 8, lane % 8);
    if (format == RowFormat::kF576) {
      uint2 codes = make_uint2(0, 0);
      if (row != nullptr) codes = load<uint2>(row + kLatentDim + 8 * (lane % 8));
      *to = latent::decode8(codes, 1);
    } else {
      cuda::copy_async<16>(to, row == nullptr ? readable : row + offset + 16 * (lane % 8),
                           row != nullptr);
    }
  }
}

// Two units that are on their way.
struct ComingRows {
  HalfRows first, second;
};

__device__ __forceinline__ ComingRows load_units(const LaneRow& own) {
  return {load_unit(own, 0), load_unit(own, 1)};
}

// Aligned packed rows, whose first two units are on their way. While one is decoded the last but
// one of those that follow is asked for, at the end those of `next`, the rows of the next tile,
// where `next_is_packed`. `wait(half)` is called before the first store to a half.
template <int kHeadDim, class Wait>
__device__ __forceinline__ void store_packed(RowFormat format, const LaneRow& own,
                                             const LaneRow& next, bool next_is_packed,
                                             ComingRows& coming, const uint8_t* readable,
                                             int first_key, const Wait& wait,
                                             uint8_t (&tile)[kTilePanels][kPanelBytes]) {
#pragma unroll 1
  for (int unit = 0; unit < 4; ++unit) {
    const HalfRows half = coming.first;
    coming.first = coming.second;
    if (unit < 2) {
      coming.second = load_unit(own, unit + 2);
    } else if (next_is_packed) {
      coming.second = load_unit(next, unit - 2);
    }
    if (unit % 2 == 0) wait(unit / 2);
    // Both halves have left the panels behind them.
    if (unit == 2 && format != RowFormat::kR512) bring_rope(format, own, readable, first_key, tile);
    store_unit(kHeadDim == kValueDim && format == RowFormat::kV4, own, unit, half, first_key, tile);
  }
}

// Aligned bf16 rows travel by themselves: half `half` of their first 512 channels. `readable`: any
// address that may be named for what is absent.
__device__ __forceinline__ void copy_half(const LaneRow& own, const uint8_t* readable, int half,
                                          int first_key,
                                          uint8_t (&tile)[kTilePanels][kPanelBytes]) {
  const int lane = threadIdx.x % 32;
  const uint8_t* row[kWarpKeys];  // before the copies, past which no read moves
#pragma unroll
  for (int key = 0; key < kWarpKeys; ++key) row[key] = row_of(own, key);
#pragma unroll
  for (int key = 0; key < kWarpKeys; ++key) {
    const bool is_there = row[key] != nullptr;
    cuda::copy_async<16>(tile_piece(tile, half * kHalfPanels + lane / 8, first_key + key, lane % 8),
                         is_there ? row[key] + 512 * half + 16 * lane : readable, is_there);
  }
}

// Rows at any address, byte by byte: 8 channels a lane and step.
template <int kHeadDim>
__device__ __forceinline__ void store_unaligned(RowFormat format, const LaneRow& own, int first_key,
                                                uint8_t (&tile)[kTilePanels][kPanelBytes]) {
  const int lane = threadIdx.x % 32;
  const bool is_v4 = format == RowFormat::kV4;
#pragma unroll 1
  for (int key = 0; key < kWarpKeys; ++key) {
    const uint8_t* const row = row_of(own, key);
#pragma unroll 1
    for (int piece = lane; piece < kHeadDim / 8; piece += 32) {
      uint4 values = make_uint4(0, 0, 0, 0);
      const bool is_rope = piece >= kLatentDim / 8;
      // Rope channels are the last pass, of a few lanes: their scale is 1 or none.
      float scale = 1;
      if (piece - lane < kLatentDim / 8) {
        const int half = (piece - lane) / 32;
        scale = scale_of(is_v4, own, half, key);
      }
      if (row == nullptr) {
      } else if (format == RowFormat::kBf16) {
        values = latent::load_bf16<false>(row, piece);
      } else if (format == RowFormat::kV32 && is_rope) {
        values = latent::load_bf16<false>(row + kV32RopeOffset, piece - kLatentDim / 8);
      } else if (is_v4 && piece >= kV4LatentDim / 8) {
        values = latent::load_bf16<false>(row + kV4LatentDim, piece - kV4LatentDim / 8);
      } else {
        values = latent::decode8(latent::load_codes<false>(row + 8 * piece), scale);
      }
      *tile_piece(tile, piece / 8, first_key + key, piece % 8) = values;
    }
  }
}

template <int kHeadDim>
__device__ __forceinline__ void bring_keys(const Params& params, const ListedKeys& keys,
                                           int64_t begin, int64_t end,
                                           SharedMemory<kHeadDim>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kKeyWarps;
  const int first_key = kWarpKeys * warp, own_key = first_key + lane % kWarpKeys;
  const auto layout = [&](int64_t tile) -> const RowLayout& {
    return params.layouts[keys.is_primary(tile) ? 0 : 1];
  };
  if (begin >= end) return;
  const int32_t first_place = keys.place(begin, own_key);
  int32_t next_place = begin + 1 < end ? keys.place(begin + 1, own_key) : -1;
  LaneRow own;
  {
    const LatentAddress found = keys.address(begin, own_key, first_place);
    prefetch_row(layout(begin), found.row);
    own = keep(layout(begin), found.row, ask(layout(begin), found));
  }
  const auto is_packed = [&](int64_t tile) {
    return tile < end && layout(tile).aligned && layout(tile).format != RowFormat::kBf16;
  };
  const auto* const readable = static_cast<const uint8_t*>(params.queries.data);
  ComingRows coming;
  if (is_packed(begin)) coming = load_units(own);
#pragma unroll 1
  for (int64_t tile = begin; tile < end; ++tile) {
    const int stage = static_cast<int>((tile - begin) % kStages);
    const int64_t use = (tile - begin) / kStages;
    const auto wait = [&](int half) {
      if (use > 0) {
        cuda::mbarrier_wait(half == 0 ? shared.left_free[stage] : shared.right_free[stage],
                            use - 1);
      }
    };
    const RowLayout& of_tile = layout(tile);
    const uint32_t present = __ballot_sync(0xFFFFFFFF, own.row != nullptr);
    const bool travels = of_tile.aligned && of_tile.format == RowFormat::kBf16;
    if (travels) {
      wait(0);
      copy_half(own, readable, 0, first_key, shared.tiles[stage]);
    }
    // While the first rows are on their way.
    LaneRow next;  // its scales come at the end
    AskedScales asked;
    if (tile + 1 < end) {
      const LatentAddress found = keys.address(tile + 1, own_key, next_place);
      next.row = found.row;
      asked = ask(layout(tile + 1), found);
      prefetch_row(layout(tile + 1), found.row);
    }
    next_place = tile + 2 < end ? keys.place(tile + 2, own_key) : -1;
    const bool next_is_packed = is_packed(tile + 1);
    if (!of_tile.aligned) {
      wait(0);
      wait(1);
      store_unaligned<kHeadDim>(of_tile.format, own, first_key, shared.tiles[stage]);
    } else if (travels) {
      wait(1);
      copy_half(own, readable, 1, first_key, shared.tiles[stage]);
      if (kHeadDim > kValueDim)
        bring_rope(RowFormat::kBf16, own, readable, first_key, shared.tiles[stage]);
    } else {
      store_packed<kHeadDim>(of_tile.format, own, next, next_is_packed, coming, readable, first_key,
                             wait, shared.tiles[stage]);
    }
    cuda::wait_for_copies();
    if (lane == 0) shared.present[stage][warp] = static_cast<uint16_t>(present);
    cuda::shared_stores_before_wgmma();
    __syncwarp();
    if (lane == 0) cuda::mbarrier_arrive(shared.full[stage]);
    if (tile + 1 == end) break;
    own = keep(layout(tile + 1), next.row, asked);
    if (next_is_packed && !is_packed(tile)) coming = load_units(own);
  }
}

// ---- logits and values ----

// Rows of the thread's sums: heads `low` and low + 8 of the block.
__device__ inline int low_head() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// Queries of `heads` heads of row t, zeros past them, by the threads of both consumers; they are
// there after wait_for_queries().
template <int kHeadDim>
__device__ __forceinline__ void ask_queries(const Queries& queries, int64_t t, int64_t first_head,
                                            int heads, SharedMemory<kHeadDim>& shared) {
  constexpr int kPieces = kHeadDim / 8;
  const int64_t start = t * queries.row_stride + first_head * queries.head_stride;
  const auto place = [&](int head, int piece) {
    return shared.q[piece / 8] + cuda::panel_offset(head, piece % 8);
  };
  if (queries.aligned) {
    const auto* const from = static_cast<const bf16_t*>(queries.data) + start;
#pragma unroll 6
    for (int i = threadIdx.x; i < kHeads * kPieces; i += 2 * kGroupThreads) {
      const int head = i / kPieces, piece = i % kPieces;
      const bool is_there = head < heads;
      cuda::copy_async<16>(place(head, piece),
                           is_there ? from + head * queries.head_stride + 8 * piece : from,
                           is_there);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kHeads * kHeadDim; i += 2 * kGroupThreads) {
      const int head = i / kHeadDim, d = i % kHeadDim;
      bf16_t value{0};
      if (head < heads) {
        const int64_t at = start + head * queries.head_stride + d;
        value = queries.is_fp8
                    ? bf16_from_float(e4m3_to_float(static_cast<const uint8_t*>(queries.data)[at]))
                    : static_cast<const bf16_t*>(queries.data)[at];
      }
      reinterpret_cast<bf16_t*>(place(head, d / 8))[d % 8] = value;
    }
  }
}

__device__ __forceinline__ void wait_for_queries() {
  cuda::wait_for_copies();
  cuda::shared_stores_before_wgmma();
  cuda::sync_roles(kConsumers, 2 * kGroupThreads);
}

// Asks for Q K^T of a tile.
template <int kHeadDim>
__device__ __forceinline__ void multiply_keys(SharedMemory<kHeadDim>& shared, int stage,
                                              WgmmaSums<kKeys>& dots) {
  const PanelMatrix q = cuda::panel_matrix(shared.q, kPanelBytes);
  const PanelMatrix k = cuda::panel_matrix(shared.tiles[stage], kPanelBytes);
  cuda::wgmma_fence();
  // A loop, for the sake of code that is fetched once and used 9 times.
#pragma unroll 1
  for (int panel = 0; panel < kHeadDim / cuda::kPanelColumns; ++panel) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int at = panel * kPanelBytes + 32 * step;
      cuda::wgmma<PanelSide::kRows>(dots, q.advanced(at), k.advanced(at), panel + step);
    }
  }
  cuda::wgmma_commit();
}

// Asks for weights times the 256 channels from panel `first_panel` on.
__device__ __forceinline__ void multiply_values(const void* weights,
                                                uint8_t (&tile)[kTilePanels][kPanelBytes],
                                                int first_panel, WgmmaSums<256>& values) {
  const PanelMatrix p = cuda::panel_matrix(weights, kPanelBytes);
  const PanelMatrix v = cuda::panel_matrix(tile[first_panel], kPanelBytes);
#pragma unroll
  for (int key = 0; key < kKeys; key += 16) {
    cuda::wgmma<PanelSide::kColumns>(values, p.advanced(2 * key),
                                     v.advanced(key * cuda::kPanelRowBytes), 1);
  }
}

// Sums of the low head by `low`, of the other by `high`.
__device__ __forceinline__ void shrink_values(float low, float high, WgmmaSums<256>& values) {
  // Mostly no maximum has changed.
  if (__all_sync(0xFFFFFFFF, low == 1 && high == 1)) return;
#pragma unroll
  for (int n = 0; n < 128; n += 4) {
    values.x[n] *= low;
    values.x[n + 1] *= low;
    values.x[n + 2] *= high;
    values.x[n + 3] *= high;
  }
}

// cap * tanh(x), without a branch.
__device__ inline float capped(float x, float cap) {
  const float size = fabsf(x);
  const float large = 1 - __fdividef(2, cuda::exp2_fast(2 * kLog2E * size) + 1);
  const float square = x * x;
  float p = fmaf(1.643758067e-2f, square, -5.267181328e-2f);
  p = fmaf(p, square, 1.332072505e-1f);
  p = fmaf(p, square, -3.333294664e-1f);
  const float small = fmaf(p * square, x, x);
  // NaN compares as small and stays.
  return cap * (size > 0.55f ? copysignf(large, x) : small);
}

// The softmax of two heads of a thread; the four lanes of a head have the same.
struct HeadState {
  float largest[2] = {kNegInf, kNegInf};  // in units of the dots, or of the capped logits
  float sum[2] = {0, 0};
  float shrink[2];
};

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Weights of a tile and the state of each head. A NaN logit does not become the maximum; it makes
// its own weight NaN, and with it the head's sum. A head's rests count where a weight of the tile
// is above a 32nd of the sum so far; elsewhere what one bf16 lacks is below the rounding of the
// output. Returns whether any of the warp's do.
__device__ __forceinline__ bool softmax(const Scores& scores, uint64_t present,
                                        WgmmaSums<kKeys>& dots, HeadState& state, uint8_t* weights,
                                        uint8_t* rests) {
  const int lane = threadIdx.x % 32, low = low_head();
  bool has_rests[2];
  float unit = scores.logit_scale * kLog2E;
  if (scores.logit_cap > 0) {
    unit = kLog2E;
    const float scale = scores.logit_scale / scores.logit_cap;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) dots.x[i] = capped(scale * dots.x[i], scores.logit_cap);
  }
  if (present != ~uint64_t{0}) {
    const uint64_t own = present >> (2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if ((own >> (i / 4 * 8 + i % 2) & 1) == 0) dots.x[i] = kNegInf;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float tile_max = kNegInf;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      tile_max = fmaxf(tile_max, fmaxf(dots.x[4 * n + 2 * half], dots.x[4 * n + 2 * half + 1]));
    }
    tile_max = quad_max(tile_max);
    const float before = state.largest[half];
    const float largest = fmaxf(before, tile_max);
    // Without any weight so far, -inf - -inf must not become NaN; a NaN logit must stay one.
    const float reference = largest == kNegInf ? 0.0f : largest;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      float& first = dots.x[4 * n + 2 * half];
      float& second = dots.x[4 * n + 2 * half + 1];
      first = cuda::exp2_fast((first - reference) * unit);
      second = cuda::exp2_fast((second - reference) * unit);
      sum += first + second;
    }
    state.shrink[half] = before == largest ? 1.0f : exp2f((before - largest) * unit);
    state.largest[half] = largest;
    state.sum[half] = fmaf(state.sum[half], state.shrink[half], quad_sum(sum));
    const float heaviest = cuda::exp2_fast((tile_max - reference) * unit);
    has_rests[half] = !(32 * heaviest <= state.sum[half]);
  }
  const bool any_rests = __any_sync(0xFFFFFFFF, has_rests[0] || has_rests[1]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t mask = has_rests[half] ? ~uint32_t{0} : 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const cuda::SplitPair pair(dots.x[4 * n + 2 * half], dots.x[4 * n + 2 * half + 1]);
      const int at = cuda::panel_offset(low + 8 * half, n) + 4 * (lane % 4);
      *reinterpret_cast<uint32_t*>(weights + at) = pair.rounded;
      *reinterpret_cast<uint32_t*>(rests + at) = pair.rest & mask;
    }
  }
  return any_rests;
}

// The block's heads, one part of row t: its place in the results.
struct Target {
  const Params& params;
  int64_t t;
  int64_t part;
  int64_t first_head;
  bool is_result;  // the row has no other part

  __device__ int64_t head(int in_block) const { return first_head + in_block; }
  __device__ bool has(int in_block) const { return head(in_block) < params.outputs.num_heads; }
};

// Finishes the heads; factors of their sums to shared memory.
template <int kHeadDim>
__device__ __forceinline__ void store_heads(const Target& to, HeadState& state,
                                            SharedMemory<kHeadDim>& shared) {
  const Outputs& outputs = to.params.outputs;
  const float natural = to.params.scores.logit_cap > 0 ? 1.0f : to.params.scores.logit_scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int in_block = low_head() + 8 * half;
    const float sum = state.sum[half];
    const float largest = natural * state.largest[half];
    if (threadIdx.x % 4 != 0 || !to.has(in_block)) continue;
    if (to.is_result) {
      const latent::HeadResult result =
          latent::finish_head(outputs, to.head(in_block), largest, sum);
      latent::store_head(outputs, to.t, to.head(in_block), result);
      shared.factors[in_block] = result.factor;
    } else {
      outputs.part_state[outputs.part_index(to.t, to.part, to.head(in_block))] =
          make_float2(largest, sum);
    }
  }
}

// The 256 channels from `first_channel` on. A warp has 16 heads for itself; a lane puts out 8
// neighbouring channels of one head after the other.
__device__ __forceinline__ void store_values(const Target& to, int first_channel,
                                             const WgmmaSums<256>& values, const float* factors,
                                             StagedValues& staged) {
  const Outputs& outputs = to.params.outputs;
  const int lane = threadIdx.x % 32, warp_head = threadIdx.x / 32 % 4 * 16;
#pragma unroll
  for (int i = 0; i < 128; i += 2) {
    *reinterpret_cast<float2*>(&staged.x[low_head() + i % 4 / 2 * 8][i / 4 * 8 + 2 * (lane % 4)]) =
        make_float2(values.x[i], values.x[i + 1]);
  }
  __syncwarp();
  const RowTurn turn{to.params.rotations.row(to.t), to.params.rope_dim};
  const int channel = first_channel + 8 * lane;
#pragma unroll 2
  for (int h = warp_head; h < warp_head + 16; ++h) {
    if (!to.has(h)) break;
    const auto* const from = reinterpret_cast<const float4*>(&staged.x[h][8 * lane]);
    const float4 low = from[0], high = from[1];
    if (!to.is_result) {
      const int64_t at = outputs.part_index(to.t, to.part, to.head(h)) * kValueDim + channel;
      auto* const row = reinterpret_cast<float4*>(outputs.part_values + at);
      row[0] = low;
      row[1] = high;
      continue;
    }
    const float factor = factors[h];
    float2 pair[4] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pair[i] = make_float2(factor * pair[i].x, factor * pair[i].y);
      if (turn.rotation != nullptr) pair[i] = turn(channel + 2 * i, pair[i].x, pair[i].y);
      word[i] = factor == 0 ? 0 : cuda::bf16_pair(pair[i].x, pair[i].y);
    }
    bf16_t* const row = outputs.out.row(to.t, to.head(h)) + channel;
    if (to.params.wide_out) {
      *reinterpret_cast<uint4*>(row) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) row[i].bits = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
    }
  }
}

// Warpgroup 0. The tiles [0, num_tiles) of the part.
template <int kHeadDim>
__device__ __forceinline__ void attend_left(const Target& to, int64_t num_tiles,
                                            SharedMemory<kHeadDim>& shared) {
  const bool leads = threadIdx.x % 32 == 0;
  WgmmaSums<256> values = {};
  HeadState state;
#pragma unroll 1
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int stage = static_cast<int>(i % kStages);
    auto& tile = shared.tiles[stage];
    WgmmaSums<kKeys> dots;
    // The values of the last tile are there.
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(values);
    if (i > 0 && leads) cuda::mbarrier_arrive(shared.left_free[1 - stage]);
    cuda::mbarrier_wait(shared.full[stage], i / kStages);
    multiply_keys(shared, stage, dots);
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(dots);
    // The other warpgroup has read the last weights, and now takes their rests.
    if (i > 0) cuda::sync_roles(kWeightsRead, 2 * kGroupThreads);
    const uint64_t present = *reinterpret_cast<const uint64_t*>(shared.present[stage]);
    const bool any_rests =
        softmax(to.params.scores, present, dots, state, shared.weights, tile[kRestPanel]);
    if (threadIdx.x % 4 == 0) {
      shared.factors[low_head()] = state.shrink[0];
      shared.factors[low_head() + 8] = state.shrink[1];
    }
    if (leads) shared.has_rests[threadIdx.x / 32] = any_rests ? 1 : 0;
    cuda::shared_stores_before_wgmma();
    cuda::arrive_some(kWeightsReady, 2 * kGroupThreads);
    cuda::sync_some(kLogitGroup, kGroupThreads);
    const bool has_rests = *reinterpret_cast<const uint32_t*>(shared.has_rests) != 0;
    shrink_values(state.shrink[0], state.shrink[1], values);
    cuda::wgmma_fence();
    multiply_values(shared.weights, tile, 0, values);
    if (has_rests) multiply_values(tile[kRestPanel], tile, 0, values);
    cuda::wgmma_commit();
  }
  cuda::wgmma_wait<0>();
  cuda::wgmma_pin(values);
  if (num_tiles > 0) cuda::sync_roles(kWeightsRead, 2 * kGroupThreads);
  store_heads(to, state, shared);
  cuda::sync_roles(kConsumers, 2 * kGroupThreads);
  store_values(to, 0, values, shared.factors, shared.staged(0));
}

// Warpgroup 1.
template <int kHeadDim>
__device__ __forceinline__ void attend_right(const Target& to, int64_t num_tiles,
                                             SharedMemory<kHeadDim>& shared) {
  const bool leads = threadIdx.x % 32 == 0;
  WgmmaSums<256> values = {};
#pragma unroll 1
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int stage = static_cast<int>(i % kStages);
    auto& tile = shared.tiles[stage];
    cuda::mbarrier_wait(shared.full[stage], i / kStages);
    cuda::sync_roles(kWeightsReady, 2 * kGroupThreads);
    const bool has_rests = *reinterpret_cast<const uint32_t*>(shared.has_rests) != 0;
    shrink_values(shared.factors[low_head()], shared.factors[low_head() + 8], values);
    cuda::wgmma_fence();
    multiply_values(shared.weights, tile, kHalfPanels, values);
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(values);
    if (!has_rests && leads) cuda::mbarrier_arrive(shared.right_free[stage]);
    cuda::sync_roles(kWeightsRead, 2 * kGroupThreads);
    if (!has_rests) continue;
    cuda::wgmma_fence();
    multiply_values(tile[kRestPanel], tile, kHalfPanels, values);
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(values);
    if (leads) cuda::mbarrier_arrive(shared.right_free[stage]);
  }
  cuda::sync_roles(kConsumers, 2 * kGroupThreads);
  store_values(to, kHalfChannels, values, shared.factors, shared.staged(1));
}

template <int kHeadDim>
__device__ __forceinline__ void attend_block(const Params& params, SharedMemory<kHeadDim>& shared) {
  const int64_t t = blockIdx.x / params.head_groups, part = blockIdx.y;
  const int64_t first_head = blockIdx.x % params.head_groups * kHeads;
  const int group = threadIdx.x / kGroupThreads;
  // An empty row has no part; its first block writes the zeros.
  if (part > 0 && part >= params.parts(t).num_parts) return;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      cuda::mbarrier_init(shared.full[stage], kKeyWarps);
      cuda::mbarrier_init(shared.left_free[stage], 4);  // by the warps of a consumer
      cuda::mbarrier_init(shared.right_free[stage], 4);
    }
  }
  // Nothing is known of the row yet, but the start of its list and the queries are wanted soon.
  const int64_t heads_left = params.outputs.num_heads - first_head;
  const int heads = static_cast<int>(heads_left < kHeads ? heads_left : kHeads);
  if (group < 2) {
    ask_queries(params.queries, t, first_head, heads, shared);
  } else if (params.segments[0].indices && threadIdx.x % kGroupThreads < 8) {
    const int slot = threadIdx.x % 8 * 32;
    if (slot < params.segments[0].indices.shape[1])
      cuda::prefetch_l2(&params.segments[0].indices(t, slot));
  }
  const RowParts parts = params.parts(t);
  const bool is_result = parts.num_parts <= 1;
  const int64_t begin = is_result ? 0 : parts.first_block(part);
  const int64_t end = is_result ? parts.num_blocks : parts.first_block(part + 1);
  const Target to{params, t, part, first_head, is_result};
  __syncthreads();
  if (group == 2) {
    cuda::give_registers<kKeyRegisters>();
    bring_keys(params, ListedKeys{params.segments, parts, t}, begin, end, shared);
  } else if (group == 0) {
    cuda::take_registers<kLogitRegisters>();
    wait_for_queries();
    attend_left(to, end - begin, shared);
  } else {
    cuda::give_registers<kValueRegisters>();
    wait_for_queries();
    attend_right(to, end - begin, shared);
  }
}

// Without these instructions the body is empty; supports() refuses such devices.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#define FOVEA_SM90_BODY(...) __VA_ARGS__
#else
#define FOVEA_SM90_BODY(...)
#endif

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ Params params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    attend_block(params, *reinterpret_cast<SharedMemory<kHeadDim>*>(memory));
  })
}

#undef FOVEA_SM90_BODY

}  // namespace fovea::internal::sparse_sm90
