#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/cluster.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/mla/cuda/sparse_mla_sm90/block.cuh"

// The warps that bring keys: each looks up 8 slots of a tile, decodes their rows to bf16 and stores
// them, the left half first. While a half is decoded the next one is on its way, across tiles.
namespace fovea::internal::sparse_sm90 {

// The rows of the warp's keys of a tile: lane l knows key l % kWarpKeys, and of its scales those of
// group l / kWarpKeys.
struct LaneRow {
  const uint8_t* row = nullptr;  // null: absent
  // v32: that of channels 128 group ..; v4: the bytes of channels 64 group .. and 256 + 64 group
  // ..; r512 and f576: that of the row. 0 where absent.
  uint32_t scale = 0;
};
inline constexpr int kScaleGroups = 4;

template <class T>
__device__ inline T load(const uint8_t* from) {
  return __ldg(reinterpret_cast<const T*>(from));
}

// Places and addresses that follow from the lane are cheap, and registers are few.
__device__ inline int lane_here() { return cuda::computed_here(threadIdx.x % 32); }
__device__ inline int lane_key() { return threadIdx.x % kWarpKeys; }
__device__ inline int lane_group() { return threadIdx.x % 32 / kWarpKeys % kScaleGroups; }

// Of the 8 keys of a warp, blocks that share rows bring 4 each.
template <int kBlocks>
__device__ inline int first_own_key() {
  return kBlocks == 1 ? 0 : static_cast<int>(cuda::cluster_rank()) * (kWarpKeys / kBlocks);
}

// The row of a key of the warp.
__device__ inline const uint8_t* row_of(const LaneRow& own, int key) {
  return reinterpret_cast<const uint8_t*>(
      __shfl_sync(0xFFFFFFFF, reinterpret_cast<unsigned long long>(own.row), key));
}

// The row of a tile's cache at `base` that the lane knows, in 8 bytes from there: half the
// registers and exchanges of an address. Of aligned rows only; a cache with more than kMaxPlaces
// has none.
inline constexpr uint32_t kNoPlace = 0xFFFFFFFF;
__device__ inline uint32_t place_of(const uint8_t* base, const uint8_t* row) {
  return row == nullptr ? kNoPlace : static_cast<uint32_t>((row - base) / 8);
}
__device__ inline const uint8_t* at_place(const uint8_t* base, uint32_t place) {
  return base + 8 * static_cast<uint64_t>(place);
}

// A scale as LaneRow has it after keep(), that nobody waits for so far.
// Rows of 576 channels are v32, f576 or bf16; others have 512.
template <int kHeadDim>
__device__ inline uint32_t ask(const RowLayout& layout, const LatentAddress& found) {
  if (found.row == nullptr) return 0;
  if constexpr (kHeadDim > kValueDim) {
    if (layout.format != RowFormat::kV32) return 0;
    const uint8_t* const from = found.row + kV32ScaleOffset + 4 * lane_group();
    return layout.aligned ? load<uint32_t>(from) : __float_as_uint(cuda::load_float<false>(from));
  }
  if (layout.format == RowFormat::kV4) {  // the byte after the 7 is never read
    const int group = lane_group();
    if (group == 0) {
      return layout.aligned ? load<uint32_t>(found.scales)
                            : __float_as_uint(cuda::load_float<false>(found.scales));
    }
    if (group == 1) return found.scales[4] | found.scales[5] << 8;
    return group == 2 ? found.scales[6] : 0;
  }
  if (layout.format != RowFormat::kR512) return 0;
  return layout.bf16_scale ? load<uint16_t>(found.scales) : load<uint32_t>(found.scales);
}

template <int kHeadDim>
__device__ inline LaneRow keep(const RowLayout& layout, const uint8_t* row, uint32_t asked) {
  if (row == nullptr) return {};
  if constexpr (kHeadDim > kValueDim) {
    return {row, layout.format == RowFormat::kV32 ? asked : __float_as_uint(1.0f)};
  }
  if (layout.format == RowFormat::kV4) return {row, asked};
  return {row, layout.bf16_scale ? asked << 16 : asked};
}

// Asks for the lines of a row that will be read, a part of them by each lane that knows it.
__device__ inline void prefetch_row(const RowLayout& layout, const uint8_t* row) {
  if (row == nullptr) return;
  const int bytes = static_cast<int>(layout.row_bytes);
  for (int at = threadIdx.x % 32 / kWarpKeys * 128; at < bytes; at += 32 / kWarpKeys * 128)
    cuda::prefetch_l2(row + at);
}

// The scale of the lane's 8 channels of half `half` of key `key`.
__device__ __forceinline__ float scale_of(bool is_v4, const LaneRow& own, int half, int key) {
  const int lane = threadIdx.x % 32;
  const int group = !is_v4 ? 2 * half + lane / 16 : half == 0 ? 0 : 1 + lane / 16;
  const uint32_t word = __shfl_sync(0xFFFFFFFF, own.scale, key + kWarpKeys * group);
  // Of v4 a byte: 2^(byte - 127); 0 is below the normal range, 255 is NaN. No branch, no call. An
  // absent row has zeros for codes, which any finite scale keeps.
  const uint32_t bits =
      max((word >> ((half == 0 ? lane / 8 : lane / 8 % 2) * 8) & 0xFF) << 23, 0x00400000u);
  return __uint_as_float(!is_v4 ? word : bits == 0x7F800000u ? 0x7FC00000u : bits);
}

// Codes of one half of the channels of four keys, 8 a lane.
inline constexpr int kQuads = kWarpKeys / 4;
struct QuadRows {
  uint2 codes[4];
};

// Keys 4 quad .. of the warp.
__device__ __forceinline__ QuadRows load_quad(const uint8_t* base, uint32_t own, int half,
                                              int quad) {
  QuadRows rows;
  const uint8_t* const channels = base + half * kHalfChannels + 8 * lane_here();
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint32_t place = __shfl_sync(0xFFFFFFFF, own, 4 * quad + n);
    rows.codes[n] = cuda::load_or_zeros(at_place(channels, place), place != kNoPlace);
  }
  return rows;
}

__device__ __forceinline__ void store_quad(bool is_v4, const LaneRow& own, int half, int quad,
                                           const QuadRows& rows, int first_key, Tile& tile) {
  const int lane = lane_here();
  const int panel = half * kHalfPanels + lane / 8;
  // The last channels of v4 are no codes.
  const bool is_code = !is_v4 || panel < kV4LatentDim / cuda::kPanelColumns;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int key = 4 * quad + n;
    const uint4 values = latent::decode8(rows.codes[n], scale_of(is_v4, own, half, key));
    if (is_code) *tile_piece(tile, panel, first_key + key, lane % 8) = values;
  }
}

// The rope channels: a lane has 8 channels of key 4 n + lane / 8. Those of f576 are codes; the
// others travel by themselves. `readable`: any address that may be named for what is absent.
template <int kBlocks>
__device__ __forceinline__ void bring_rope(RowFormat format, const uint8_t* base, uint32_t own,
                                           const uint8_t* readable, int first_key, Tile& tile) {
  const int lane = lane_here();
  const int panel = format == RowFormat::kV4 ? kRestPanel - 1 : kRestPanel;
  const int64_t offset = format == RowFormat::kV4    ? kV4LatentDim
                         : format == RowFormat::kV32 ? kV32RopeOffset
                                                     : 2 * kLatentDim;  // bf16
#pragma unroll
  for (int i = 0; i < kQuads / kBlocks; ++i) {
    const int n = i + first_own_key<kBlocks>() / 4;
    const uint32_t place = __shfl_sync(0xFFFFFFFF, own, 4 * n + lane / 8);
    const uint8_t* const row = at_place(base, place);
    const bool is_there = place != kNoPlace;
    uint4* const to = tile_piece(tile, panel, first_key + 4 * n + lane / 8, lane % 8);
    if (format == RowFormat::kF576) {
      uint2 codes = make_uint2(0, 0);
      if (is_there) codes = load<uint2>(row + kLatentDim + 8 * (lane % 8));
      *to = latent::decode8(codes, 1);
    } else {
      cuda::copy_async<16>(to, is_there ? row + offset + 16 * (lane % 8) : readable, is_there);
    }
  }
}

// Aligned bf16 rows travel by themselves: half `half` of their first 512 channels.
template <int kBlocks>
__device__ __forceinline__ void copy_half(const uint8_t* base, uint32_t own,
                                          const uint8_t* readable, int half, int first_key,
                                          Tile& tile) {
  const int lane = lane_here();
  const uint8_t* const channels = base + 512 * half + 16 * lane;
  constexpr int kOwn = kWarpKeys / kBlocks;
  const int first = first_own_key<kBlocks>();
  uint32_t place[kOwn];  // before the copies, past which no exchange moves
#pragma unroll
  for (int n = 0; n < kOwn; ++n) place[n] = __shfl_sync(0xFFFFFFFF, own, first + n);
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const bool is_there = place[n] != kNoPlace;
    cuda::copy_async<16>(
        tile_piece(tile, half * kHalfPanels + lane / 8, first_key + first + n, lane % 8),
        is_there ? at_place(channels, place[n]) : readable, is_there);
  }
}

// Rows at any address, byte by byte: 8 channels a lane and step.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void store_unaligned(RowFormat format, const LaneRow& own, int first_key,
                                                Tile& tile) {
  const int lane = lane_here();
  const bool is_v4 = format == RowFormat::kV4;
#pragma unroll 1
  for (int key = 0; key < kWarpKeys; ++key) {
    const uint8_t* const row = row_of(own, key);
    const bool is_own =
        key / (kWarpKeys / kBlocks) * (kWarpKeys / kBlocks) == first_own_key<kBlocks>();
#pragma unroll 1
    for (int piece = is_own ? lane : kLatentDim / 8 + lane; piece < kHeadDim / 8; piece += 32) {
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

// The warp's rows of the half from panel `first_panel` on are there: the other block gets them too,
// but for the panel of rests. What is there at first is brought by each block, because nobody knows
// when a row has left for the other block.
template <int kBlocks>
__device__ __forceinline__ void arrive_full(Tile& tile, int first_panel, int first_key,
                                            Mbarrier& full) {
  cuda::shared_stores_before_wgmma();
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if constexpr (kBlocks == 1) {
    if (lane == 0) cuda::mbarrier_arrive(full);
  } else {
    constexpr int kBytes = kWarpKeys / kBlocks * cuda::kPanelRowBytes;
    if (lane == 0) {
      const int first_row = (first_key + first_own_key<kBlocks>()) * cuda::kPanelRowBytes;
#pragma unroll
      for (int panel = first_panel; panel < first_panel + kHalfPanels; ++panel)
        cuda::copy_to_block(tile[panel] + first_row, kBytes, full, 1 - cuda::cluster_rank());
      // What the warp's counterpart sends.
      cuda::mbarrier_arrive_expecting(full, kHalfPanels * kBytes);
    }
  }
}

// The tiles [begin, end) of the row.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void bring_keys(const Params& params, const ListedKeys& keys, int begin,
                                           int end, SharedMemory<kHeadDim>& shared) {
  const auto warp = [] { return cuda::computed_here(threadIdx.x) / 32 % kKeyWarps; };
  const auto own_key = [&] { return kWarpKeys * warp() + lane_key(); };
  const auto layout = [&](int tile) -> const RowLayout& {
    return params.layouts[keys.is_primary(tile) ? 0 : 1];
  };
  const auto base = [&](int tile) { return keys.segment(tile).base; };
  const auto is_packed = [&](int tile) {
    return tile < end && layout(tile).aligned && layout(tile).format != RowFormat::kBf16;
  };
  if (begin >= end) return;
  const int32_t first_place = keys.place(begin, own_key());
  int32_t next_place = begin + 1 < end ? keys.place(begin + 1, own_key()) : -1;
  LaneRow own;
  {
    const LatentAddress found = keys.address(begin, own_key(), first_place);
    prefetch_row(layout(begin), found.row);
    own = keep<kHeadDim>(layout(begin), found.row, ask<kHeadDim>(layout(begin), found));
  }
  const auto* const readable = static_cast<const uint8_t*>(params.queries.data);
  constexpr int kOwnQuads = kQuads / kBlocks;
  // Whose rope channels are in the panel of rests: arrive_full().
  constexpr int kRopeBlocks = kHeadDim > kValueDim ? 1 : kBlocks;
  const auto quad_of = [](int i) { return i + first_own_key<kBlocks>() / 4; };
  // Packed rows that are on their way: one half of all, or both of few.
  QuadRows left[kOwnQuads], right[kOwnQuads];
  constexpr bool kBothHalves = kBlocks > 1;
  const auto load_left = [&](int tile, const uint8_t* row) {
    if (!is_packed(tile)) return;
#pragma unroll
    for (int q = 0; q < kOwnQuads; ++q)
      left[q] = load_quad(base(tile), place_of(base(tile), row), 0, quad_of(q));
  };
  const auto load_right = [&](int tile, uint32_t place, int q) {
    right[q] = load_quad(base(tile), place, 1, quad_of(q));
  };
  load_left(begin, own.row);
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const int stage = (i - begin) % kStages, use = (i - begin) / kStages;
    const int first_key = kWarpKeys * warp();
    Tile& tile = shared.tiles[stage];
    const auto wait_free = [&](Mbarrier& free) {
      if (use > 0) cuda::mbarrier_wait(free, use - 1);
    };
    const RowLayout& of_tile = layout(i);
    const bool travels = of_tile.aligned && of_tile.format == RowFormat::kBf16;
    const uint32_t place = place_of(base(i), own.row);
    if (travels) {
      wait_free(shared.left_free[stage]);
      copy_half<kBlocks>(base(i), place, readable, 0, first_key, tile);
      cuda::commit_copies();
    }
    if (kBothHalves && is_packed(i)) {
#pragma unroll
      for (int q = 0; q < kOwnQuads; ++q) load_right(i, place, q);
    }
    // While these rows are on their way.
    const uint8_t* next_row = nullptr;
    uint32_t asked = 0;
    if (i + 1 < end) {
      const LatentAddress found = keys.address(i + 1, own_key(), next_place);
      next_row = found.row;
      asked = ask<kHeadDim>(layout(i + 1), found);
      prefetch_row(layout(i + 1), found.row);
    }
    next_place = i + 2 < end ? keys.place(i + 2, own_key()) : -1;
    if (is_packed(i)) {
      const bool is_v4 = kHeadDim == kValueDim && of_tile.format == RowFormat::kV4;
      wait_free(shared.left_free[stage]);
#pragma unroll
      for (int q = 0; q < kOwnQuads; ++q) {
        store_quad(is_v4, own, 0, quad_of(q), left[q], first_key, tile);
        if (!kBothHalves) load_right(i, place, q);
      }
      arrive_full<kBlocks>(tile, 0, first_key, shared.left_full[stage]);
      if (kBothHalves) load_left(i + 1, next_row);
      wait_free(shared.right_free[stage]);
      if (kHeadDim > kValueDim || is_v4)
        bring_rope<kRopeBlocks>(of_tile.format, base(i), place, readable, first_key, tile);
#pragma unroll
      for (int q = 0; q < kOwnQuads; ++q)
        store_quad(is_v4, own, 1, quad_of(q), right[q], first_key, tile);
    } else {
      wait_free(shared.right_free[stage]);
      if (travels) {
        copy_half<kBlocks>(base(i), place, readable, 1, first_key, tile);
        if (kHeadDim > kValueDim)
          bring_rope<kRopeBlocks>(RowFormat::kBf16, base(i), place, readable, first_key, tile);
        cuda::commit_copies();
        cuda::wait_copies<1>();
      } else {
        wait_free(shared.left_free[stage]);
        store_unaligned<kHeadDim, kBlocks>(of_tile.format, own, first_key, tile);
      }
      arrive_full<kBlocks>(tile, 0, first_key, shared.left_full[stage]);
    }
    if (!kBothHalves || !is_packed(i)) load_left(i + 1, next_row);
    const uint32_t present = __ballot_sync(0xFFFFFFFF, own.row != nullptr);
    if (threadIdx.x % 32 == 0) {
      shared.present[stage][warp()] = static_cast<uint8_t>(present & ((1u << kWarpKeys) - 1));
    }
    cuda::wait_for_copies();
    arrive_full<kBlocks>(tile, kHalfPanels, first_key, shared.right_full[stage]);
    if (i + 1 < end) own = keep<kHeadDim>(layout(i + 1), next_row, asked);
  }
}

}  // namespace fovea::internal::sparse_sm90
