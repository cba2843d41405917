#pragma once

#include <cstdint>

#include "fovea/numeric.h"
#include "src/core/cuda/bulk_copy.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/row_codes.cuh"
#include "src/mla/cuda/sparse_mla_window_sm90/block.cuh"

// The keys of a row. Four neighbours have a row, 64 codes of it at a time, and a warp 8 rows beside
// each other, of the first 64 keys and of the others. Codes travel by themselves to the place where
// a lane puts the values that it makes of them: 16 codes to one of two pieces of 8 values. So
// nothing is exchanged, and a whole row is on its way at a time.
namespace fovea::internal::sparse_window_sm90 {

inline constexpr int kHalves = 2;  // of the keys
inline constexpr int kHalfKeys = kKeys / kHalves;

// Of four neighbours, which share two rows, the first two look one up each.
struct LaneKey {
  int32_t name;        // what the list has; negative: none
  uint32_t place;      // of an aligned cache; kNoPlace: none
  uint32_t scales[3];  // r512: of the row; v4: seven bytes. Zeros where there is no row

  static __device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ int part() { return lane() % 4; }
  // Of the block's keys, the first of the warp in a half, and the lane's row from there.
  static __device__ int first(int half) {
    return half * kHalfKeys + static_cast<int>(threadIdx.x / 32) * 8;
  }
  static __device__ int row() { return lane() / 4; }
  // The list of the warp's keys of a half.
  static __device__ int segment(const Params& params, int half) {
    return first(half) < params.first_extra ? 0 : 1;
  }
  // The same for all lanes with the same half, as the compiler is to know.
  static __device__ int segment_of_warp(const Params& params, int half) {
    return __shfl_sync(0xFFFFFFFF, segment(params, half), 0);
  }
  static __device__ int slot(const Params& params, int half) {
    const int key = first(half) + row();
    return key < params.first_extra ? key : key - params.first_extra;
  }
  // What the neighbour knows that has looked up the row of a half.
  static __device__ uint32_t of_half(uint32_t own, int half) {
    return __shfl_sync(0xFFFFFFFF, own, lane() / 4 * 4 + half);
  }
  // Where the lane's first piece of panel 0 is; the second one is at `^ 16`.
  static __device__ uint32_t offset(int half) {
    return cuda::panel_offset(first(half) + row(), 2 * part());
  }
};

// What names a row, and how long its list is: two reads that nothing waits for.
struct LaneName {
  int32_t name;
  int32_t length;

  __device__ __forceinline__ void ask(const Params& params, int64_t t) {
    const int half = LaneKey::part() % 2;
    const int slot = LaneKey::slot(params, half);
    const SparseMlaSegment& segment = params.segments[LaneKey::segment(params, half)];
    name = -1;
    length = kKeys;
    if (segment.page_table) {
      if (slot < segment.length(t)) name = segment.place(t, slot);
    } else if (segment.indices) {
      if (slot < segment.indices.shape[1]) name = segment.indices(t, slot);
      if (segment.topk_length) length = segment.topk_length(t);
    }
  }
};

// Finds the row and asks for its scales.
__device__ __forceinline__ void find_key(const Params& params, const LaneName& name, LaneKey& key) {
  const int half = LaneKey::part() % 2;
  const int slot = LaneKey::slot(params, half);
  const int which = LaneKey::segment(params, half);
  const RowLayout& layout = params.layouts[which];
  key.name = slot < name.length ? name.name : -1;
  key.place = kNoPlace;
  key.scales[0] = key.scales[1] = key.scales[2] = 0;
  if (layout.aligned) {
    const RowPlaces& places = params.places[which];
    const RowPlace place = places.find(static_cast<uint32_t>(slot), key.name);
    key.place = place.row;
    const bool is_there = place.row != kNoPlace;
    const uint8_t* const scales = places.scale(place.scale);
    if (layout.format == RowFormat::kV4) {  // the byte after the 7 is never read
      cuda::load_or_zeros_late<4>(key.scales[0], scales, is_there);
      cuda::load_or_zeros_late<2>(key.scales[1], scales + 4, is_there);
      cuda::load_or_zeros_late<1>(key.scales[2], scales + 6, is_there);
    } else if (layout.bf16_scale) {
      cuda::load_or_zeros_late<2>(key.scales[0], scales, is_there);
    } else {
      cuda::load_or_zeros_late<4>(key.scales[0], scales, is_there);
    }
  } else if (key.name >= 0) {
    const LatentAddress address = params.segments[which].address(slot, key.name);
    if (address.row == nullptr) {
      key.name = -1;
      return;
    }
    const int bytes = layout.format == RowFormat::kV4 ? 7 : layout.bf16_scale ? 2 : 4;
#pragma unroll 1
    for (int i = 0; i < bytes; ++i) {
      const uint32_t byte = static_cast<uint32_t>(address.scales[i])
                            << (i < 4 ? 8 * i : 8 * (i % 2));
      if (i < 4) {
        key.scales[0] |= byte;
      } else if (i < 6) {
        key.scales[1] |= byte;
      } else {
        key.scales[2] |= byte;
      }
    }
  }
}
__device__ __forceinline__ bool is_there(const LaneKey& key, bool is_aligned) {
  return is_aligned ? key.place != kNoPlace : key.name >= 0;
}

// Where the codes of the lane's two rows are, of aligned caches.
struct LaneCodes {
  const uint8_t* from[kHalves];
  bool is_there[kHalves], is_aligned[kHalves], is_v4[kHalves];

  __device__ __forceinline__ LaneCodes(const Params& params, const LaneKey& key) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint32_t place = LaneKey::of_half(key.place, half);
      const int which = LaneKey::segment_of_warp(params, half);
      is_there[half] = place != kNoPlace;
      is_aligned[half] = params.layouts[which].aligned;
      is_v4[half] = params.layouts[which].format == RowFormat::kV4;
      from[half] = params.segments[which].base +
                   8 * static_cast<uint64_t>(is_there[half] ? place : 0) + 16 * LaneKey::part();
    }
  }

  // Asks for what the lane has of a quarter of the channels.
  __device__ __forceinline__ void ask(int quarter, SharedMemory& shared) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (!is_aligned[half]) continue;
      const uint8_t* const row = from[half] + quarter * kQuarterChannels;
      uint8_t* const to = shared.keys[kQuarterPanels * quarter] + LaneKey::offset(half);
      cuda::copy_async<16>(to, row, is_there[half]);
      // 64 rope channels are 128 bytes.
      const bool is_rope = is_v4[half] && quarter == kQuarters - 1;
      uint8_t* const second = to + kKeyPanelBytes;
      const uint8_t* const last = row + 64 + (is_rope ? 16 * LaneKey::part() : 0);
      cuda::copy_async<16>(second, last, is_there[half]);
      if (is_rope) {
        auto* const beside = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(second) ^ 16);
        cuda::copy_async<16>(beside, last + 16, is_there[half]);
      }
    }
  }
};

// The same at any address, byte by byte.
__device__ __forceinline__ void load_codes_unaligned(const Params& params, const LaneKey& key,
                                                     int quarter, int half, SharedMemory& shared) {
  const auto name = static_cast<int32_t>(LaneKey::of_half(static_cast<uint32_t>(key.name), half));
  const int which = LaneKey::segment_of_warp(params, half);
  const SparseMlaSegment& segment = params.segments[which];
  uint8_t* const to = shared.keys[kQuarterPanels * quarter] + LaneKey::offset(half);
  const int part = 16 * LaneKey::part();
  const uint8_t* from = nullptr;
  if (name >= 0)
    from =
        segment.address(LaneKey::slot(params, half), name).row + quarter * kQuarterChannels + part;
  const bool has_rope = segment.format == RowFormat::kV4 && quarter == kQuarters - 1;
#pragma unroll 1
  for (int i = 0; i < (has_rope ? 3 : 2); ++i) {
    const int at = i == 0 ? 0 : has_rope ? 64 + part + 16 * (i - 1) : 64;
    auto* const piece =
        reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(i == 0 ? to : to + kKeyPanelBytes) ^
                                   static_cast<uintptr_t>(i == 2 ? 16 : 0));
#pragma unroll 1
    for (int n = 0; n < 16; ++n) piece[n] = from == nullptr ? 0 : from[at + n];
  }
}

// 16 values to two pieces.
__device__ __forceinline__ void store_16(uint8_t* to, const uint4& low, const uint4& high) {
  *reinterpret_cast<uint4*>(to) = low;
  *reinterpret_cast<uint4*>(reinterpret_cast<uintptr_t>(to) ^ 16) = high;
}
__device__ __forceinline__ void decode_exact(uint8_t* to, const uint4& codes, uint32_t exponent) {
  const uint32_t factor = cuda::exact_factor(exponent);
  const uint2 a = cuda::decode4_exact(codes.x, factor), b = cuda::decode4_exact(codes.y, factor);
  const uint2 c = cuda::decode4_exact(codes.z, factor), d = cuda::decode4_exact(codes.w, factor);
  store_16(to, make_uint4(a.x, a.y, b.x, b.y), make_uint4(c.x, c.y, d.x, d.y));
}
__device__ __forceinline__ void decode_scaled(uint8_t* to, const uint4& codes, float scale) {
  const uint4 low = latent::decode8(make_uint2(codes.x, codes.y), scale);
  store_16(to, low, latent::decode8(make_uint2(codes.z, codes.w), scale));
}
__device__ __forceinline__ uint32_t nan_bits(const uint4& codes) {
  return cuda::nan_bits(codes.x) | cuda::nan_bits(codes.y) | cuda::nan_bits(codes.z) |
         cuda::nan_bits(codes.w);
}

// What decoding needs to know of the lane's two rows.
struct LaneScales {
  uint32_t word[kHalves][3];
  bool is_aligned[kHalves], is_v4[kHalves], is_bf16[kHalves];

  __device__ __forceinline__ LaneScales(const Params& params, const LaneKey& key) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const RowLayout& layout = params.layouts[LaneKey::segment_of_warp(params, half)];
      is_aligned[half] = layout.aligned;
      is_v4[half] = layout.format == RowFormat::kV4;
      is_bf16[half] = layout.bf16_scale;
#pragma unroll
      for (int i = 0; i < 3; ++i) word[half][i] = LaneKey::of_half(key.scales[i], half);
    }
  }
  // v4: the byte of a panel of a quarter; r512: the bits of the scale.
  __device__ __forceinline__ uint32_t of(int half, int quarter, int panel) const {
    const uint32_t(&words)[3] = word[half];
    if (!is_v4[half]) return is_bf16[half] ? words[0] << 16 : words[0];
    const uint32_t pair = quarter == 0   ? words[0]
                          : quarter == 1 ? words[0] >> 16
                          : quarter == 2 ? words[1]
                                         : words[2];
    return pair >> (8 * panel) & 0xFF;
  }
};

// Makes values of the codes that the lane has of a quarter of the channels, which have come.
__device__ __forceinline__ void decode(const Params& params, const LaneKey& key,
                                       const LaneScales& scales, int quarter,
                                       SharedMemory& shared) {
  constexpr int kParts = 2 * kHalves;  // part 2 i + n: panel n of half i
  uint8_t* const start = shared.keys[kQuarterPanels * quarter] + LaneKey::offset(0);
  const auto place = [&](int part) {
    return start + part % 2 * kKeyPanelBytes + part / 2 * kHalfKeys * cuda::kPanelRowBytes;
  };
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if (!scales.is_aligned[half]) load_codes_unaligned(params, key, quarter, half, shared);
  }
  uint4 codes[kParts];
  uint32_t scale[kParts];
  bool is_rope[kParts];
  // Powers of two: a few integer instructions and one product, where they are in range and no code
  // is NaN.
  bool is_exact = true;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int half = part / 2, panel = part % 2;
    is_rope[part] = panel == 1 && quarter == kQuarters - 1 && scales.is_v4[half];
    codes[part] = make_uint4(0, 0, 0, 0);
    if (!is_rope[part]) codes[part] = *reinterpret_cast<const uint4*>(place(part));
    scale[part] = scales.of(half, quarter, panel);
    is_exact = is_exact && scales.is_v4[half] && scale[part] <= cuda::kLargestExact &&
               (nan_bits(codes[part]) & cuda::kNanBits) == 0;
  }
  if (__all_sync(0xFFFFFFFF, is_exact)) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (!is_rope[part]) decode_exact(place(part), codes[part], scale[part]);
  } else {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (is_rope[part]) continue;
      const float factor = scales.is_v4[part / 2]
                               ? ue8m0_to_float(static_cast<uint8_t>(scale[part]))
                               : __uint_as_float(scale[part]);
      decode_scaled(place(part), codes[part], factor);
    }
  }
}

// Which keys there are.
__device__ __forceinline__ void leave_present(const Params& params, const LaneKey& key,
                                              SharedMemory& shared) {
  const bool is_aligned = params.layouts[LaneKey::segment(params, LaneKey::part() % 2)].aligned;
  const uint32_t own = is_there(key, is_aligned) ? 1 : 0;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    // Lane l < 8 has row l.
    const uint32_t of_row = __shfl_sync(0xFFFFFFFF, own, 4 * (threadIdx.x % 8) + half);
    const uint32_t bits = __ballot_sync(0xFFFFFFFF, of_row != 0);
    if (LaneKey::lane() == 0) shared.present[LaneKey::first(half) / 8] = static_cast<uint8_t>(bits);
  }
}

// Brings the rows of the next keys to the second-level cache.
__device__ __forceinline__ void prefetch_key(const Params& params, const LaneName& name) {
  const int half = LaneKey::part();
  if (half >= kHalves) return;
  const int which = LaneKey::segment(params, half);
  if (!params.layouts[which].aligned) return;
  const int slot = LaneKey::slot(params, half);
  const RowPlaces& places = params.places[which];
  const RowPlace place =
      places.find(static_cast<uint32_t>(slot), slot < name.length ? name.name : -1);
  if (place.row == kNoPlace) return;
  cuda::prefetch_bulk(params.segments[which].base + 8 * static_cast<uint64_t>(place.row),
                      static_cast<int>(params.layouts[which].row_bytes));
  cuda::prefetch_l2(places.scale(place.scale));
}

}  // namespace fovea::internal::sparse_window_sm90
