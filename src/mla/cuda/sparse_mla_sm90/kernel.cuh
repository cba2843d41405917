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

// A block takes 64 heads of one row and one part of its list, 64 slots at a time:
//
//   warpgroup 0, logits  Q K^T of a tile, softmax, weights as the sum of two bf16
//   (latent_tiles.cuh)
//                        to shared memory, and its channels 0..255 of the values
//   warpgroup 1, values  channels 256..511. The rounded weights are multiplied beside warpgroup 0;
//                        what they lack while that one takes the softmax of the next tile, when the
//                        tensor cores would have nothing else
//   warpgroup 2, keys    looks the slots up, decodes their rows to bf16 and stores them. A warp has
//                        16 keys of a tile, whose addresses and scales its lanes hold for each
//                        other
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
  int64_t head_groups;

  __device__ RowParts parts(int64_t t) const {
    return {segments[0].length(t), segments[1].length(t), outputs.num_parts};
  }
};

template <int kHeadDim>
struct SharedMemory {
  static constexpr int kPanels = kHeadDim / cuda::kPanelColumns;
  alignas(1024) uint8_t q[kPanels][kPanelBytes];
  alignas(1024) uint8_t tiles[kStages][kTilePanels][kPanelBytes];
  alignas(1024) uint8_t weights[kPanelBytes];
  float factors[kHeads];                    // what is left of the old sums, and at the end of all
  alignas(8) uint16_t present[kStages][4];  // a bit a key, 16 keys of each warp
  Mbarrier full[kStages], left_free[kStages], right_free[kStages];
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
  // that of the row; v4: its 7 bytes.
  uint32_t scales[2] = {0, 0};
};

__device__ inline const uint8_t* row_of(const LaneRow& own, int key) {
  return reinterpret_cast<const uint8_t*>(
      __shfl_sync(0xFFFFFFFF, reinterpret_cast<unsigned long long>(own.row), key));
}

// The scales of a row that nobody waits for so far, as `LaneRow` has them after keep().
__device__ inline AskedScales ask(const RowLayout& layout, const LatentAddress& from) {
  AskedScales asked;
  if (from.row == nullptr) return asked;
  if (layout.format == RowFormat::kV32) {
    const uint8_t* const own = from.row + kV32ScaleOffset + threadIdx.x / 16 % 2 * 4;
    if (layout.aligned) {
      asked.low = *reinterpret_cast<const uint32_t*>(own);
      asked.middle = *reinterpret_cast<const uint32_t*>(own + 8);
    } else {
      asked.low = __float_as_uint(cuda::load_float<false>(own));
      asked.middle = __float_as_uint(cuda::load_float<false>(own + 8));
    }
    return asked;
  }
  return latent::ask_scales(layout, from.scales);
}

__device__ inline LaneRow keep(const RowLayout& layout, const uint8_t* row,
                               const AskedScales& asked) {
  LaneRow own;
  own.row = row;
  if (row == nullptr) return own;  // scale 0: zeros
  if (layout.format == RowFormat::kV32) {
    own.scales[0] = asked.low;
    own.scales[1] = asked.middle;
  } else if (layout.format == RowFormat::kF576) {
    own.scales[0] = own.scales[1] = __float_as_uint(1.0f);
  } else {
    const uint64_t joined = latent::joined_scales(layout, asked);
    own.scales[0] = static_cast<uint32_t>(joined);
    own.scales[1] =
        layout.format == RowFormat::kV4 ? static_cast<uint32_t>(joined >> 32) : own.scales[0];
  }
  return own;
}

// Asks for the lines of a row that will be read, half of them by each of the two lanes that know
// it.
__device__ inline void prefetch_row(const RowLayout& layout, const uint8_t* row) {
  if (row == nullptr) return;
  const int last = static_cast<int>(layout.row_bytes) - 1;
  for (int at = threadIdx.x / 16 % 2 * 128; at <= last; at += 256) cuda::prefetch_l2(row + at);
}

// Eight keys' codes of one half of the channels, 8 a lane.
struct HalfRows {
  uint2 codes[8];
};

// Unit u of a tile of packed rows: keys 8 (u % 2) .. of the warp, half u / 2 of the channels.
__device__ __forceinline__ HalfRows load_unit(const LaneRow& own, int unit) {
  HalfRows half;
  const int offset = unit / 2 * 256 + 8 * static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const uint8_t* const row = row_of(own, unit % 2 * 8 + n);
    half.codes[n] = make_uint2(0, 0);
    if (row != nullptr) half.codes[n] = *reinterpret_cast<const uint2*>(row + offset);
  }
  return half;
}

// The scale of the lane's channels of half `half` of key `key`.
__device__ __forceinline__ float scale_of(bool is_v4, const LaneRow& own, int half, int key) {
  const int lane = threadIdx.x % 32;
  const uint32_t word = half == 0 ? own.scales[0] : own.scales[1];
  if (is_v4) {
    const uint32_t bytes = __shfl_sync(0xFFFFFFFF, word, key);
    return ue8m0_to_float(static_cast<uint8_t>(bytes >> (lane / 8 * 8)));
  }
  return __uint_as_float(__shfl_sync(0xFFFFFFFF, word, key + lane / 16 * 16));
}

__device__ __forceinline__ void store_unit(bool is_v4, const LaneRow& own, int unit,
                                           const HalfRows& half, int first_key,
                                           uint8_t (&tile)[kTilePanels][kPanelBytes]) {
  const int lane = threadIdx.x % 32;
  const int panel = unit / 2 * kHalfPanels + lane / 8;
  // The last channels of v4 are no codes.
  const bool is_code = !is_v4 || panel < kV4LatentDim / cuda::kPanelColumns;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int key = unit % 2 * 8 + n;
    const uint4 values = latent::decode8(half.codes[n], scale_of(is_v4, own, unit / 2, key));
    if (is_code) *tile_piece(tile, panel, first_key + key, lane % 8) = values;
  }
}

// The rope channels of 16 keys: a lane has 8 channels of key 4 n + lane / 8.
struct RopeRows {
  uint4 pieces[4];
};

__device__ __forceinline__ RopeRows load_rope(RowFormat format, const LaneRow& own) {
  RopeRows rope;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    rope.pieces[n] = make_uint4(0, 0, 0, 0);
    const uint8_t* const row = row_of(own, 4 * n + lane / 8);
    if (row == nullptr) continue;
    if (format == RowFormat::kF576) {
      const uint2 codes = *reinterpret_cast<const uint2*>(row + kLatentDim + 8 * (lane % 8));
      rope.pieces[n] = make_uint4(codes.x, codes.y, 0, 0);
    } else {
      const int64_t offset = format == RowFormat::kV4 ? kV4LatentDim : kV32RopeOffset;
      rope.pieces[n] = *reinterpret_cast<const uint4*>(row + offset + 16 * (lane % 8));
    }
  }
  return rope;
}

__device__ __forceinline__ void store_rope(RowFormat format, const RopeRows& rope, int first_key,
                                           uint8_t (&tile)[kTilePanels][kPanelBytes]) {
  const int lane = threadIdx.x % 32;
  const int panel = format == RowFormat::kV4 ? kRestPanel - 1 : kRestPanel;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    uint4 piece = rope.pieces[n];
    if (format == RowFormat::kF576) piece = latent::decode8(make_uint2(piece.x, piece.y), 1);
    *tile_piece(tile, panel, first_key + 4 * n + lane / 8, lane % 8) = piece;
  }
}

// Aligned packed rows. The next unit is on its way while one is decoded. `wait(half)` is called
// before the first store to a half.
template <class Wait>
__device__ __forceinline__ void store_packed(RowFormat format, const LaneRow& own, int first_key,
                                             const Wait& wait,
                                             uint8_t (&tile)[kTilePanels][kPanelBytes]) {
  const bool is_v4 = format == RowFormat::kV4, has_rope = format != RowFormat::kR512;
  HalfRows next = load_unit(own, 0);
  RopeRows rope;
#pragma unroll 1
  for (int unit = 0; unit < 4; ++unit) {
    const HalfRows half = next;
    if (unit < 3) {
      next = load_unit(own, unit + 1);
    } else if (has_rope) {
      rope = load_rope(format, own);
    }
    if (unit % 2 == 0) wait(unit / 2);
    store_unit(is_v4, own, unit, half, first_key, tile);
  }
  if (has_rope) store_rope(format, rope, first_key, tile);
}

// Aligned bf16 rows travel by themselves.
template <int kHeadDim, class Wait>
__device__ __forceinline__ void copy_rows(const LaneRow& own, const uint8_t* readable,
                                          int first_key, const Wait& wait,
                                          uint8_t (&tile)[kTilePanels][kPanelBytes]) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    wait(half);
#pragma unroll 4
    for (int key = 0; key < 16; ++key) {
      const uint8_t* const row = row_of(own, key);
      const uint8_t* const from = row == nullptr ? readable : row + 512 * half + 16 * lane;
      cuda::copy_async<16>(
          tile_piece(tile, half * kHalfPanels + lane / 8, first_key + key, lane % 8), from,
          row != nullptr);
    }
  }
  if constexpr (kHeadDim > kValueDim) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint8_t* const row = row_of(own, 4 * n + lane / 8);
      const uint8_t* const from = row == nullptr ? readable : row + 1024 + 16 * (lane % 8);
      cuda::copy_async<16>(tile_piece(tile, kRestPanel, first_key + 4 * n + lane / 8, lane % 8),
                           from, row != nullptr);
    }
  }
  cuda::wait_for_copies();
}

// Rows at any address, byte by byte: 8 channels a lane and step.
template <int kHeadDim>
__device__ __forceinline__ void store_unaligned(RowFormat format, const LaneRow& own, int first_key,
                                                uint8_t (&tile)[kTilePanels][kPanelBytes]) {
  const int lane = threadIdx.x % 32;
  const bool is_v4 = format == RowFormat::kV4;
#pragma unroll 1
  for (int key = 0; key < 16; ++key) {
    const uint8_t* const row = row_of(own, key);
    const float scales[2] = {scale_of(is_v4, own, 0, key), scale_of(is_v4, own, 1, key)};
#pragma unroll 1
    for (int piece = lane; piece < kHeadDim / 8; piece += 32) {
      uint4 values = make_uint4(0, 0, 0, 0);
      const bool is_rope = piece >= kLatentDim / 8;
      const bool is_v4_rope = is_v4 && piece >= kV4LatentDim / 8;
      if (row == nullptr) {
      } else if (format == RowFormat::kBf16) {
        values = latent::load_bf16<false>(row, piece);
      } else if (format == RowFormat::kV32 && is_rope) {
        values = latent::load_bf16<false>(row + kV32RopeOffset, piece - kLatentDim / 8);
      } else if (is_v4_rope) {
        values = latent::load_bf16<false>(row + kV4LatentDim, piece - kV4LatentDim / 8);
      } else {
        const float scale = is_rope ? 1.0f : piece < 32 ? scales[0] : scales[1];
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
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first_key = 16 * warp, own_key = first_key + lane % 16;
  const auto layout = [&](int64_t tile) -> const RowLayout& {
    return params.layouts[keys.is_primary(tile) ? 0 : 1];
  };
  if (begin >= end) return;
  const int32_t first_place = keys.place(begin, own_key);
  int32_t next_place = begin + 1 < end ? keys.place(begin + 1, own_key) : -1;
  LaneRow own;
  {
    const LatentAddress found = keys.address(begin, own_key, first_place);
    own = keep(layout(begin), found.row, ask(layout(begin), found));
  }
#pragma unroll 1
  for (int64_t tile = begin; tile < end; ++tile) {
    const int stage = static_cast<int>((tile - begin) % kStages);
    const int64_t use = (tile - begin) / kStages;
    LatentAddress next;
    AskedScales asked;
    if (tile + 1 < end) {
      next = keys.address(tile + 1, own_key, next_place);
      prefetch_row(layout(tile + 1), next.row);
      asked = ask(layout(tile + 1), next);
    }
    next_place = tile + 2 < end ? keys.place(tile + 2, own_key) : -1;
    const auto wait = [&](int half) {
      if (use > 0) {
        cuda::mbarrier_wait(half == 0 ? shared.left_free[stage] : shared.right_free[stage],
                            use - 1);
      }
    };
    const RowLayout& of_tile = layout(tile);
    const uint32_t present = __ballot_sync(0xFFFFFFFF, own.row != nullptr);
    if (!of_tile.aligned) {
      wait(0);
      wait(1);
      store_unaligned<kHeadDim>(of_tile.format, own, first_key, shared.tiles[stage]);
    } else if (of_tile.format == RowFormat::kBf16) {
      copy_rows<kHeadDim>(own, static_cast<const uint8_t*>(params.queries.data), first_key, wait,
                          shared.tiles[stage]);
    } else {
      store_packed(of_tile.format, own, first_key, wait, shared.tiles[stage]);
    }
    if (lane == 0) shared.present[stage][warp] = static_cast<uint16_t>(present);
    cuda::shared_stores_before_wgmma();
    __syncwarp();
    if (lane == 0) cuda::mbarrier_arrive(shared.full[stage]);
    if (tile + 1 < end) own = keep(layout(tile + 1), next.row, asked);
  }
}

// ---- logits and values ----

// Rows of the thread's sums: heads `low` and low + 8 of the block.
__device__ inline int low_head() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// Queries of `heads` heads of row t, zeros past them, by the threads of both consumers.
template <int kHeadDim>
__device__ __forceinline__ void load_queries(const Queries& queries, int64_t t, int64_t first_head,
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
    cuda::wait_for_copies();
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
  cuda::shared_stores_before_wgmma();
  cuda::sync_some(kConsumers, 2 * kGroupThreads);
}

// Asks for Q K^T of a tile.
template <int kHeadDim>
__device__ __forceinline__ void multiply_keys(SharedMemory<kHeadDim>& shared, int stage,
                                              WgmmaSums<kKeys>& dots) {
  const PanelMatrix q = cuda::panel_matrix(shared.q, kPanelBytes);
  const PanelMatrix k = cuda::panel_matrix(shared.tiles[stage], kPanelBytes);
  cuda::wgmma_fence();
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    const int at = d / cuda::kPanelColumns * kPanelBytes + d % cuda::kPanelColumns * 2;
    cuda::wgmma<PanelSide::kRows>(dots, q.advanced(at), k.advanced(at), d > 0);
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

// cap * tanh(logit / cap), without a branch.
__device__ inline float capped(float logit, float cap) {
  const float x = logit / cap, size = fabsf(x);
  const float large = 1 - 2 / (cuda::exp2_fast(2 * kLog2E * size) + 1);
  const float square = x * x;
  float p = fmaf(1.643758067e-2f, square, -5.267181328e-2f);
  p = fmaf(p, square, 1.332072505e-1f);
  p = fmaf(p, square, -3.333294664e-1f);
  const float small = fmaf(p * square, x, x);
  // NaN compares as small and stays.
  return cap * (size > 0.55f ? copysignf(large, x) : small);
}

// The softmax of two heads of a thread.
struct HeadState {
  float largest[2] = {kNegInf, kNegInf};  // in units of the dots, or of the capped logits
  float sum[2] = {0, 0};                  // of the thread's keys
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
// its own weight NaN, and with it the head's sum.
__device__ __forceinline__ void softmax(const Scores& scores, uint64_t present,
                                        WgmmaSums<kKeys>& dots, HeadState& state, uint8_t* weights,
                                        uint8_t* rests) {
  const int lane = threadIdx.x % 32, low = low_head();
  float unit = scores.logit_scale * kLog2E;
  if (scores.logit_cap > 0) {
    unit = kLog2E;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      dots.x[i] = capped(scores.logit_scale * dots.x[i], scores.logit_cap);
    }
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
      const float first = cuda::exp2_fast((dots.x[4 * n + 2 * half] - reference) * unit);
      const float second = cuda::exp2_fast((dots.x[4 * n + 2 * half + 1] - reference) * unit);
      sum += first + second;
      const cuda::SplitPair pair(first, second);
      const int at = cuda::panel_offset(low + 8 * half, n) + 4 * (lane % 4);
      *reinterpret_cast<uint32_t*>(weights + at) = pair.rounded;
      *reinterpret_cast<uint32_t*>(rests + at) = pair.rest;
    }
    state.shrink[half] = before == largest ? 1.0f : exp2f((before - largest) * unit);
    state.largest[half] = largest;
    state.sum[half] = fmaf(state.sum[half], state.shrink[half], sum);
  }
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
    const float sum = quad_sum(state.sum[half]);
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

// The 256 channels from `first_channel` on.
template <int kHeadDim>
__device__ __forceinline__ void store_values(const Target& to, int first_channel,
                                             const WgmmaSums<256>& values,
                                             const SharedMemory<kHeadDim>& shared) {
  const Outputs& outputs = to.params.outputs;
  const RowTurn turn{to.params.rotations.row(to.t), to.params.rope_dim};
  const int lane = threadIdx.x % 32;
  first_channel += 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int in_block = low_head() + 8 * half;
    if (!to.has(in_block)) continue;
    const int64_t head = to.head(in_block);
    if (!to.is_result) {
      float* const row =
          outputs.part_values + outputs.part_index(to.t, to.part, head) * kValueDim + first_channel;
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        *reinterpret_cast<float2*>(row + 8 * n) =
            make_float2(values.x[4 * n + 2 * half], values.x[4 * n + 2 * half + 1]);
      }
      continue;
    }
    const float factor = shared.factors[in_block];
    bf16_t* const row = outputs.out.row(to.t, head) + first_channel;
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      uint32_t pair = 0;
      if (factor != 0) {
        const float2 turned = turn(first_channel + 8 * n, factor * values.x[4 * n + 2 * half],
                                   factor * values.x[4 * n + 2 * half + 1]);
        pair = cuda::bf16_pair(turned.x, turned.y);
      }
      if (outputs.out_aligned) {
        *reinterpret_cast<uint32_t*>(row + 8 * n) = pair;
      } else {
        row[8 * n].bits = static_cast<uint16_t>(pair);
        row[8 * n + 1].bits = static_cast<uint16_t>(pair >> 16);
      }
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
    if (i > 0) cuda::sync_some(kWeightsRead, 2 * kGroupThreads);
    const uint64_t present = *reinterpret_cast<const uint64_t*>(shared.present[stage]);
    softmax(to.params.scores, present, dots, state, shared.weights, tile[kRestPanel]);
    if (threadIdx.x % 4 == 0) {
      shared.factors[low_head()] = state.shrink[0];
      shared.factors[low_head() + 8] = state.shrink[1];
    }
    cuda::shared_stores_before_wgmma();
    cuda::arrive_some(kWeightsReady, 2 * kGroupThreads);
    cuda::sync_some(kLogitGroup, kGroupThreads);
    shrink_values(state.shrink[0], state.shrink[1], values);
    cuda::wgmma_fence();
    multiply_values(shared.weights, tile, 0, values);
    multiply_values(tile[kRestPanel], tile, 0, values);
    cuda::wgmma_commit();
  }
  cuda::wgmma_wait<0>();
  cuda::wgmma_pin(values);
  if (num_tiles > 0) cuda::sync_some(kWeightsRead, 2 * kGroupThreads);
  store_heads(to, state, shared);
  cuda::sync_some(kConsumers, 2 * kGroupThreads);
  store_values(to, 0, values, shared);
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
    cuda::sync_some(kWeightsReady, 2 * kGroupThreads);
    shrink_values(shared.factors[low_head()], shared.factors[low_head() + 8], values);
    cuda::wgmma_fence();
    multiply_values(shared.weights, tile, kHalfPanels, values);
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(values);
    cuda::sync_some(kWeightsRead, 2 * kGroupThreads);
    cuda::wgmma_fence();
    multiply_values(tile[kRestPanel], tile, kHalfPanels, values);
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(values);
    if (leads) cuda::mbarrier_arrive(shared.right_free[stage]);
  }
  cuda::sync_some(kConsumers, 2 * kGroupThreads);
  store_values(to, 256, values, shared);
}

template <int kHeadDim>
__device__ __forceinline__ void attend_block(const Params& params, SharedMemory<kHeadDim>& shared) {
  const int64_t t = blockIdx.x / params.head_groups, part = blockIdx.y;
  const int64_t first_head = blockIdx.x % params.head_groups * kHeads;
  const RowParts parts = params.parts(t);
  // An empty row has no part; its first block writes the zeros.
  if (part >= parts.num_parts && part > 0) return;
  const int64_t begin = parts.num_parts > 0 ? parts.first_block(part) : 0;
  const int64_t end = parts.num_parts > 0 ? parts.first_block(part + 1) : 0;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      cuda::mbarrier_init(shared.full[stage], 4);  // by warps
      cuda::mbarrier_init(shared.left_free[stage], 4);
      cuda::mbarrier_init(shared.right_free[stage], 4);
    }
  }
  __syncthreads();
  const Target to{params, t, part, first_head, parts.num_parts <= 1};
  const int64_t heads_left = params.outputs.num_heads - first_head;
  const int heads = static_cast<int>(heads_left < kHeads ? heads_left : kHeads);
  const int group = threadIdx.x / kGroupThreads;
  if (group == 2) {
    cuda::give_registers<kKeyRegisters>();
    bring_keys(params, ListedKeys{params.segments, parts, t}, begin, end, shared);
  } else if (group == 0) {
    cuda::take_registers<kLogitRegisters>();
    load_queries(params.queries, t, first_head, heads, shared);
    attend_left(to, end - begin, shared);
  } else {
    cuda::give_registers<kValueRegisters>();
    load_queries(params.queries, t, first_head, heads, shared);
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
