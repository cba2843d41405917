#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/cluster.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/row_codes.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/mla/cuda/sparse_mla_sm90/block.cuh"

// The warps that bring keys. A warp looks up its 8 keys of four tiles at a time, two tiles before
// the first of them. Packed rows are asked for a tile ahead, half of the channels at a time, each
// into the registers of the half that was decoded just before. A lane keeps to one row, so that
// nothing of it is exchanged. bf16 rows travel by themselves.
namespace fovea::internal::sparse_sm90 {

// Tiles that are looked up together: lane l has key l % kWarpKeys of tile l / kWarpKeys.
inline constexpr int kTurnTiles = 32 / kWarpKeys;

// Who a thread is. What follows from that is computed where it is used: it is cheap, and registers
// are few.
struct KeyThread {
  __device__ uint32_t here() const {
    return static_cast<uint32_t>(cuda::computed_here(static_cast<int>(threadIdx.x)));
  }
  __device__ uint32_t lane() const { return here() % 32; }
  __device__ uint32_t key() const { return here() % kWarpKeys; }
  __device__ uint32_t group() const { return here() % 32 / kWarpKeys; }
  __device__ uint32_t warp() const { return here() / 32 % kKeyWarps; }
};

template <class T>
__device__ inline T load(const uint8_t* from) {
  return __ldg(reinterpret_cast<const T*>(from));
}

// Of the 8 keys of a warp, blocks that share rows bring 4 each.
template <int kBlocks>
__device__ inline uint32_t first_own_key() {
  return kBlocks == 1 ? 0 : cuda::cluster_rank() * (kWarpKeys / kBlocks);
}
template <int kBlocks>
__device__ inline bool is_own_key(uint32_t key) {
  return key - first_own_key<kBlocks>() < kWarpKeys / kBlocks;
}

__device__ inline const uint8_t* at_place(const uint8_t* base, uint32_t place) {
  return base + 8 * static_cast<uint64_t>(place);
}

// 2^(code - 127) of the scales of v4: of 0, which is below the normal range, too; 255 is NaN. No
// branch, no call.
__device__ inline float v4_scale_value(uint32_t code) {
  const uint32_t bits = max(code << 23, 0x00400000u);
  return __uint_as_float(bits == 0x7F800000u ? 0x7FC00000u : bits);
}

// Asks for the lines of a row that will be read.
__device__ inline void prefetch_row(const RowLayout& layout, const uint8_t* row) {
  const int bytes = static_cast<int>(layout.row_bytes);
#pragma unroll 1
  for (int at = 0; at < bytes; at += 128) cuda::prefetch_l2(row + at);
}

// Who decodes what: kLanes neighbours have the pieces of a row's panels, in turn.
template <int kBlocks>
struct Share {
  static constexpr int kLanes = 4 * kBlocks;
  static constexpr int kPieces = 8 / kLanes;  // a lane has of each panel, neighbours

  // The lane's row, one of the 8 of the warp.
  static __device__ uint32_t row(const KeyThread& me) {
    return first_own_key<kBlocks>() + me.lane() / kLanes;
  }
  static __device__ uint32_t part(const KeyThread& me) { return me.lane() % kLanes; }
  // Where the lane's first piece of panel 0 is in a tile; the second one is at `^ 16`.
  static __device__ uint32_t offset(const KeyThread& me) {
    const uint32_t key = row(me);
    return (me.warp() * kWarpKeys + key) * cuda::kPanelRowBytes + ((part(me) * kPieces ^ key) << 4);
  }
};

// Half of a tile, as a warp fills it, in this block and in the other one that shares the rows.
template <int kBlocks>
struct HalfPlace {
  uint8_t* panels;
  Mbarrier& full;
  uint32_t distance = 0;  // to the other block

  __device__ HalfPlace(Tile& tile, int first_panel, Mbarrier& full_)
      : panels(tile[first_panel]), full(full_) {
    if constexpr (kBlocks > 1) distance = cuda::distance_to_block(panels, 1 - cuda::cluster_rank());
  }
  __device__ __forceinline__ void store(int panel, uint32_t offset, const uint4& values) const {
    uint8_t* const to = panels + panel * kPanelBytes + offset;
    *reinterpret_cast<uint4*>(to) = values;
    if constexpr (kBlocks > 1) cuda::send_at_distance(values, to, full, distance);
  }
};

// What a lane has of one panel of its row: eight codes a piece.
template <int kPieces>
struct PanelCodes;
template <>
struct PanelCodes<1> {
  uint2 codes;
  __device__ void ask(const uint8_t* from, bool is_there) {
    cuda::load_or_zeros_late(codes, from, is_there);
  }
  __device__ uint2 piece(int) const { return codes; }
};
template <>
struct PanelCodes<2> {
  uint4 codes;
  __device__ void ask(const uint8_t* from, bool is_there) {
    cuda::load_or_zeros_late(codes, from, is_there);
  }
  __device__ uint2 piece(int i) const {
    return i == 0 ? make_uint2(codes.x, codes.y) : make_uint2(codes.z, codes.w);
  }
};

// One half of the channels of the lane's row, as they were stored, and their scales.
template <int kHeadDim, int kBlocks>
struct HalfRow {
  using Of = Share<kBlocks>;
  static constexpr int kPieces = Of::kPieces;
  PanelCodes<kPieces> panels[kHalfPanels];
  // The second half of the rope channels of v4, whose first half is in the place of the codes of
  // the last panel.
  PanelCodes<kPieces> tail;
  // v32: of 128 channels each; r512: of the row; v4: the bytes of the four panels, of the right
  // half two, and one in the second word. Zeros where the row is absent: its codes are zeros, which
  // any finite scale keeps.
  uint32_t scales[2];

  // kHalf: 0 left, 1 right. `place`: kNoPlace for zeros.
  template <int kHalf>
  __device__ __forceinline__ void ask(const KeyThread& me, const RowLayout& layout,
                                      const RowPlaces& places, const uint8_t* base,
                                      const RowPlace& place) {
    const bool is_there = place.row != kNoPlace;
    const bool is_v4 = kHeadDim == kValueDim && layout.format == RowFormat::kV4;
    const uint8_t* row = at_place(base, place.row);
    if constexpr (kHeadDim > kValueDim) {
      scales[0] = scales[1] = __float_as_uint(1.0f);
      if (layout.format == RowFormat::kV32) {
        uint2 both;
        cuda::load_or_zeros_late(both, row + kV32ScaleOffset + 8 * kHalf, is_there);
        scales[0] = both.x;
        scales[1] = both.y;
      }
    } else {
      const uint8_t* const from = places.scale(place.scale);
      if (!is_v4) {
        if (layout.bf16_scale) {
          cuda::load_or_zeros_late<2>(scales[0], from, is_there);
        } else {
          cuda::load_or_zeros_late<4>(scales[0], from, is_there);
        }
      } else if (kHalf == 0) {
        cuda::load_or_zeros_late<4>(scales[0], from, is_there);
      } else {  // the byte after the 7 is never read
        cuda::load_or_zeros_late<2>(scales[0], from + 4, is_there);
        cuda::load_or_zeros_late<1>(scales[1], from + 6, is_there);
      }
    }
    const uint32_t part = Of::part(me) * (8 * kPieces);
    row += kHalf * kHalfChannels + part;
    cuda::hold(row);
#pragma unroll
    for (int i = 0; i < kHalfPanels; ++i) {
      const bool is_rope = kHalf == 1 && i == kHalfPanels - 1 && is_v4;
      panels[i].ask(row + 64 * i + (is_rope ? part : 0), is_there);
    }
    if constexpr (kHeadDim == kValueDim && kHalf == 1) {
      const int last = 64 * (kHalfPanels - 1);
      if (is_v4) tail.ask(row + last + part + 8 * kPieces, is_there);
    }
  }

  // Calls after_first() when the first read has been waited for: what it asks for is not waited for
  // before the next half, although all reads that pass a branch share one scoreboard.
  template <int kHalf, class AfterFirst>
  __device__ __forceinline__ void store(const KeyThread& me, const RowLayout& layout,
                                        const HalfPlace<kBlocks>& to,
                                        const AfterFirst& after_first) const {
    const uint32_t offset = Of::offset(me);
    if constexpr (kHeadDim > kValueDim) {
      decode(
          to, offset, kHalfPanels, [&](int i) { return __uint_as_float(scales[i / 2]); },
          after_first);
    } else {
      constexpr int kV4Panels = kHalfPanels - kHalf;
      const bool is_v4 = layout.format == RowFormat::kV4;
      const uint32_t bytes = kHalf == 0 ? scales[0] : scales[0] | scales[1] << 16;
      const auto byte = [&](int i) { return bytes >> (8 * i) & 0xFF; };
      // Powers of two: a few integer instructions and one product, where all of them are in range
      // and no code is NaN.
      const bool is_exact = cuda::are_exact(bytes) && are_numbers(kV4Panels) && is_v4;
      const bool all_exact = __all_sync(0xFFFFFFFF, is_exact);
      __syncwarp();
      after_first();
      if (all_exact) {
#pragma unroll
        for (int i = 0; i < kV4Panels; ++i) {
          const uint32_t factor = cuda::exact_factor(byte(i));
#pragma unroll
          for (int n = 0; n < kPieces; ++n) {
            const uint2 codes = panels[i].piece(n);
            const uint2 low = cuda::decode4_exact(codes.x, factor);
            const uint2 high = cuda::decode4_exact(codes.y, factor);
            to.store(i, offset ^ n << 4, make_uint4(low.x, low.y, high.x, high.y));
          }
        }
      } else {
        const float of_row = __uint_as_float(layout.bf16_scale ? scales[0] << 16 : scales[0]);
        decode(
            to, offset, is_v4 ? kV4Panels : kHalfPanels,
            [&](int i) { return is_v4 ? v4_scale_value(byte(i)) : of_row; }, [] {});
      }
      if constexpr (kHalf == 1) {
        if (is_v4) store_rope(to, kV4Panels, offset);
      }
    }
  }

 private:
  __device__ __forceinline__ bool are_numbers(int num_panels) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kHalfPanels; ++i) {
      if (i >= num_panels) continue;
#pragma unroll
      for (int n = 0; n < kPieces; ++n)
        bits |= cuda::nan_bits(panels[i].piece(n).x) | cuda::nan_bits(panels[i].piece(n).y);
    }
    return (bits & cuda::kNanBits) == 0;
  }

  template <class Scale, class AfterFirst>
  __device__ __forceinline__ void decode(const HalfPlace<kBlocks>& to, uint32_t offset,
                                         int num_panels, const Scale& scale,
                                         const AfterFirst& after_first) const {
#pragma unroll
    for (int i = 0; i < kHalfPanels; ++i) {
      if (i >= num_panels) continue;
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        to.store(i, offset ^ n << 4, latent::decode8(panels[i].piece(n), scale(i)));
      }
      // Reads stay behind this, and not all panels are beside each other, which would need more
      // registers than there are.
      if (i < 2) __syncwarp();
      if (i == 0) after_first();
    }
  }

  __device__ __forceinline__ void store_rope(const HalfPlace<kBlocks>& to, int panel,
                                             uint32_t offset) const {
    const auto& first = panels[kHalfPanels - 1].codes;
    if constexpr (kPieces == 1) {
      to.store(panel, offset, make_uint4(first.x, first.y, tail.codes.x, tail.codes.y));
    } else {
      to.store(panel, offset, first);
      to.store(panel, offset ^ 16, tail.codes);
    }
  }
};

// The rope channels of the lane's row of 576: of v32 a piece of 8 values or two; of f576 the 16
// bytes that have the codes.
template <int kBlocks>
struct RopeRow {
  using Of = Share<kBlocks>;
  static constexpr int kPieces = Of::kPieces;
  uint4 bytes[kPieces];

  // `place`: of the lane's row.
  __device__ __forceinline__ void ask(const KeyThread& me, RowFormat format, const uint8_t* base,
                                      uint32_t place) {
    const bool is_v32 = format == RowFormat::kV32, is_there = place != kNoPlace;
    const uint32_t part = Of::part(me) * kPieces;
    const uint8_t* const from =
        at_place(base, place) + (is_v32 ? kV32RopeOffset + 16 * part : kLatentDim + part / 2 * 16);
    cuda::load_or_zeros_late(bytes[0], from, is_there);
    if constexpr (kPieces == 2) cuda::load_or_zeros_late(bytes[1], from + 16, is_there && is_v32);
  }
  __device__ __forceinline__ void store(const KeyThread& me, RowFormat format,
                                        const HalfPlace<kBlocks>& to) const {
    const uint32_t offset = Of::offset(me);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      uint4 values = bytes[n];
      if (format == RowFormat::kF576) {
        const bool is_second = (Of::part(me) * kPieces + n) % 2 != 0;
        values = latent::decode8(
            is_second ? make_uint2(bytes[0].z, bytes[0].w) : make_uint2(bytes[0].x, bytes[0].y), 1);
      }
      to.store(kRopePanel - kHalfPanels, offset ^ n << 4, values);
    }
  }
};

// Aligned bf16 rows travel by themselves: the panels [first, end) of kRows rows of the warp from
// `first_row` on, 128 bytes of four rows at a time.
template <int kRows>
__device__ __forceinline__ void copy_panels(const KeyThread& me, const uint8_t* base, uint32_t own,
                                            uint32_t first_row, int first, int end, Tile& tile) {
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const uint32_t row = first_row + 4 * i + me.lane() / 8, piece = me.lane() % 8;
    const uint32_t place = __shfl_sync(0xFFFFFFFF, own, row);
    const bool is_there = place != kNoPlace;
    const uint8_t* from = at_place(base, is_there ? place : 0) + 16 * piece;
    cuda::hold(from);
    uint8_t* const to =
        tile[0] + (me.warp() * kWarpKeys + row) * cuda::kPanelRowBytes + ((piece ^ row) << 4);
#pragma unroll
    for (int panel = first; panel < end; ++panel) {
      cuda::copy_async<16>(to + panel * kPanelBytes, from + panel * cuda::kPanelRowBytes, is_there);
    }
  }
}

// Rows at any address, byte by byte: 8 channels a lane and step. Returns kNoPlace where the lane's
// key is absent.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ uint32_t store_unaligned(const KeyThread& me, const RowLayout& layout,
                                                    const ListedKeys& keys, int block, Tile& tile) {
  const uint32_t lane = me.lane();
  const int first_key = static_cast<int>(me.warp() * kWarpKeys);
  const RowFormat format = layout.format;
  const bool is_v4 = format == RowFormat::kV4;
  const int own_key = first_key + static_cast<int>(me.key());
  const LatentAddress own = keys.address(block, own_key, keys.place(block, own_key));
  const auto of_key = [](const uint8_t* own_address, int key) {
    return reinterpret_cast<const uint8_t*>(
        __shfl_sync(0xFFFFFFFF, reinterpret_cast<unsigned long long>(own_address), key));
  };
#pragma unroll 1
  for (int key = 0; key < kWarpKeys; ++key) {
    const uint8_t* const row = of_key(own.row, key);
    const uint8_t* const scales = of_key(own.scales, key);
    if (!is_own_key<kBlocks>(key)) continue;
#pragma unroll 1
    for (int piece = lane; piece < kHeadDim / 8; piece += 32) {
      uint4 values = make_uint4(0, 0, 0, 0);
      const bool is_rope = piece >= (is_v4 ? kV4LatentDim : kLatentDim) / 8;
      if (row == nullptr) {
      } else if (format == RowFormat::kBf16) {
        values = latent::load_bf16<false>(row, piece);
      } else if (is_rope && format != RowFormat::kF576) {
        values = is_v4 ? latent::load_bf16<false>(row + kV4LatentDim, piece - kV4LatentDim / 8)
                       : latent::load_bf16<false>(row + kV32RopeOffset, piece - kLatentDim / 8);
      } else {
        float scale = 1;
        if (is_v4) {
          scale = v4_scale_value(scales[piece / 8]);
        } else if (format == RowFormat::kV32) {
          scale = cuda::load_float<false>(row + kV32ScaleOffset + piece / 16 * 4);
        } else if (format == RowFormat::kR512) {
          scale = layout.bf16_scale ? __uint_as_float(load<uint16_t>(scales) << 16)
                                    : __uint_as_float(load<uint32_t>(scales));
        }
        values = latent::decode8(latent::load_codes<false>(row + 8 * piece), scale);
      }
      *tile_piece(tile, piece / 8, first_key + key, piece % 8) = values;
    }
  }
  return own.row != nullptr ? 0 : kNoPlace;
}

// The warp's rows of the panels [first_panel, end_panel) are there. The other block has been sent
// them, unless they came by themselves or byte by byte: then it gets a copy.
template <int kBlocks>
__device__ __forceinline__ void arrive_full(const KeyThread& me, bool are_sent, Tile& tile,
                                            int first_panel, int end_panel, Mbarrier& full) {
  const uint32_t lane = me.lane();
  if constexpr (kBlocks == 1) {
    __syncwarp();
    if (lane == 0) cuda::mbarrier_arrive(full);
  } else {
    constexpr int kBytes = kWarpKeys / kBlocks * cuda::kPanelRowBytes;
    const auto num_panels = static_cast<uint32_t>(end_panel - first_panel);
    if (!are_sent) cuda::shared_stores_before_wgmma();
    __syncwarp();
    if (!are_sent && lane < num_panels) {
      const uint32_t first_row = me.warp() * kWarpKeys + first_own_key<kBlocks>();
      cuda::copy_to_block(tile[first_panel + lane] + first_row * cuda::kPanelRowBytes, kBytes, full,
                          1 - cuda::cluster_rank());
    }
    // What the warp's counterpart sends.
    if (lane == 0) cuda::mbarrier_arrive_expecting(full, num_panels * kBytes);
  }
}

// The places of a warp's keys, tile by tile.
template <int kHeadDim, int kBlocks>
class PlaceFinder {
 public:
  __device__ PlaceFinder(const KeyThread& me, const Params& params, const ListedKeys& keys,
                         int begin, int end)
      : me(me), params_(params), keys_(keys), begin_(begin), end_(end) {
    const int32_t names = ask(begin);
    after_ = ask(begin + kTurnTiles);
    here_ = find(begin, names);
  }

  // Of the lane's key of a tile; to be called for one tile after the other.
  __device__ __forceinline__ RowPlace next(int tile) {
    const int turn = (tile - begin_) / kTurnTiles, i = (tile - begin_) % kTurnTiles;
    if (i == 0 && turn > 0) here_ = ahead_;
    if (i == kTurnTiles / 2) ahead_ = find(begin_ + (turn + 1) * kTurnTiles, after_);
    const uint32_t from = i * kWarpKeys + me.key();
    RowPlace place{__shfl_sync(0xFFFFFFFF, here_.row, from), 0};
    if (kHeadDim == kValueDim) place.scale = __shfl_sync(0xFFFFFFFF, here_.scale, from);
    return place;
  }

  // Behind next(tile), where a read may be asked for: what the next search takes.
  __device__ __forceinline__ void ask_ahead(int tile) {
    const int turn = (tile - begin_) / kTurnTiles, i = (tile - begin_) % kTurnTiles;
    if (i == kTurnTiles / 2) after_ = ask(begin_ + (turn + 2) * kTurnTiles);
  }

 private:
  __device__ int key() const { return static_cast<int>(me.warp() * kWarpKeys + me.key()); }

  // What names the lane's key of the tiles from `first` on.
  __device__ __forceinline__ int32_t ask(int first) const {
    const int tile = first + static_cast<int>(me.group());
    return tile < end_ ? keys_.place(tile, key()) : -1;
  }
  __device__ __forceinline__ RowPlace find(int first, int32_t name) const {
    const int tile = first + static_cast<int>(me.group());
    const int segment = keys_.is_primary(tile) ? 0 : 1;
    if (!params_.layouts[segment].aligned) return {};
    const auto slot = static_cast<uint32_t>(keys_.slot(tile, key()));
    const RowPlace place = params_.places[segment].find(slot, name);
    if (place.row != kNoPlace && is_own_key<kBlocks>(me.key())) {
      prefetch_row(params_.layouts[segment], at_place(params_.segments[segment].base, place.row));
    }
    return place;
  }

  const KeyThread& me;
  const Params& params_;
  const ListedKeys& keys_;
  const int begin_, end_;
  RowPlace here_, ahead_;  // of four tiles in hand, and of the next four
  int32_t after_;          // what names those after them
};

// The tiles [begin, end) of the row, at least one; meet() when the first rows are on their way.
template <int kHeadDim, int kBlocks, class Meet>
__device__ __forceinline__ void bring_keys(const Params& params, const ListedKeys& keys, int begin,
                                           int end, const Meet& meet,
                                           SharedMemory<kHeadDim>& shared) {
  constexpr int kPanels = kHeadDim / cuda::kPanelColumns;
  constexpr bool kHasRope = kPanels > kRopePanel;
  const auto segment_of = [&](int tile) { return keys.is_primary(tile) ? 0 : 1; };
  const KeyThread me;
  PlaceFinder<kHeadDim, kBlocks> finder(me, params, keys, begin, end);
  HalfRow<kHeadDim, kBlocks> left, right;
  RopeRow<kBlocks> rope;
  RowPlace place;  // of key l % kWarpKeys of the tile in hand
  // Of the lane's row.
  const auto own = [&](const RowPlaces& places, const RowPlace& found) {
    const uint32_t row = Share<kBlocks>::row(me);
    RowPlace result{__shfl_sync(0xFFFFFFFF, found.row, row), 0};
    if (kHeadDim == kValueDim) result.scale = __shfl_sync(0xFFFFFFFF, found.scale, row);
    if (!places.is_packed) result.row = kNoPlace;
    return result;
  };
  const auto ask_right = [&](int segment) {
    const RowLayout& layout = params.layouts[segment];
    const RowPlaces& places = params.places[segment];
    const uint8_t* const base = params.segments[segment].base;
    const RowPlace of_lane = own(places, place);
    right.template ask<1>(me, layout, places, base, of_lane);
    if (kHasRope) rope.ask(me, layout.format, base, of_lane.row);
  };
  const auto ask_left = [&](int segment, const RowPlace& found) {
    const RowPlaces& places = params.places[segment];
    left.template ask<0>(me, params.layouts[segment], places, params.segments[segment].base,
                         own(places, found));
  };
  place = finder.next(begin);
  ask_left(segment_of(begin), place);
  meet();
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const int stage = (i - begin) % kStages, use = (i - begin) / kStages;
    Tile& tile = shared.tiles[stage];
    const auto wait_free = [&](Mbarrier& free) {
      if (use > 0) cuda::mbarrier_wait(free, use - 1);
    };
    const int segment = segment_of(i);
    const RowLayout& layout = params.layouts[segment];
    const bool is_packed = params.places[segment].is_packed;
    wait_free(shared.left_free[stage]);
    if (is_packed) {
      const HalfPlace<kBlocks> to(tile, 0, shared.left_full[stage]);
      left.template store<0>(me, layout, to, [&] { ask_right(segment); });
    } else if (layout.aligned) {
      const uint8_t* const base = params.segments[segment].base;
      constexpr int kOwn = kWarpKeys / kBlocks;
      const uint32_t first = first_own_key<kBlocks>();
      copy_panels<kOwn>(me, base, place.row, first, 0, kHalfPanels, tile);
      cuda::commit_copies();
      wait_free(shared.right_free[stage]);
      copy_panels<kOwn>(me, base, place.row, first, kHalfPanels, kPanels, tile);
      cuda::commit_copies();
      cuda::wait_copies<1>();
    } else {
      wait_free(shared.right_free[stage]);
      place.row = store_unaligned<kHeadDim, kBlocks>(me, layout, keys, i, tile);
    }
    arrive_full<kBlocks>(me, is_packed, tile, 0, kHalfPanels, shared.left_full[stage]);
    // The registers of the left half are free for the search.
    RowPlace found;
    const int next = i + 1 < end ? segment_of(i + 1) : segment;
    if (i + 1 < end) found = finder.next(i + 1);
    const auto ask_next = [&] {
      ask_left(next, found);
      finder.ask_ahead(i + 1);
    };
    const uint32_t present = __ballot_sync(0xFFFFFFFF, place.row != kNoPlace);
    if (is_packed) {
      wait_free(shared.right_free[stage]);
      const HalfPlace<kBlocks> to(tile, kHalfPanels, shared.right_full[stage]);
      if (kHasRope) rope.store(me, layout.format, to);
      right.template store<1>(me, layout, to, [&] { ask_next(); });
    } else {
      ask_next();
      cuda::wait_for_copies();
    }
    if (me.lane() == 0) shared.present[stage][me.warp()] = static_cast<uint8_t>(present);
    arrive_full<kBlocks>(me, is_packed, tile, kHalfPanels, kPanels, shared.right_full[stage]);
    place = found;
  }
}

}  // namespace fovea::internal::sparse_sm90
