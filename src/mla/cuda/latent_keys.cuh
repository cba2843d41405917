#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/numeric.h"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/mma.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/mla/sparse_mla_cache.h"

// How the blocks of latent_tiles.cuh bring queries and keys into shared memory.
namespace fovea::internal::latent {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kKeys = 64;
inline constexpr int kValueDim = static_cast<int>(kLatentDim);
// Rows of the ring past those of one tile: with them the next tile has its place but for 16 keys.
inline constexpr int kAheadKeys = 48;
inline constexpr int kRingKeys = kKeys + kAheadKeys;
// The 64 logits of a head, fp32, and later its weights, bf16. Rows are an odd number of 16-byte
// units apart, for ldmatrix.
inline constexpr int kScoreBytes = 272;
inline constexpr int kWeightStride = kScoreBytes / 2;
inline constexpr int kStagedRowBytes = static_cast<int>(kV32RowBytes);  // the longest packed row
inline constexpr int64_t kStagingBytes = kKeys * kStagedRowBytes;

// A row of queries or keys: an odd number of 16-byte units apart, for ldmatrix.
constexpr int row_stride(int head_dim) { return head_dim + 8; }

// Bytes of the ring past one tile. The staging area takes its place for packed rows.
constexpr int64_t ahead_bytes(int head_dim) {
  return int64_t{kAheadKeys} * row_stride(head_dim) * static_cast<int64_t>(sizeof(bf16_t));
}

// The warps that share a tile of 16 heads, and who this one is.
template <int kHeads>
struct Team {
  static constexpr int kTiles = kHeads / 16;
  static constexpr int kWarpsOfTile = kWarps / kTiles;
  static constexpr int kChannels = kValueDim / kWarpsOfTile;  // of each warp
  int tile = static_cast<int>(threadIdx.x / 32 % kTiles);
  int member = static_cast<int>(threadIdx.x / 32 / kTiles);

  __device__ int first_head() const { return tile * 16; }
  __device__ void sync() const { cuda::sync_some(1 + tile, 32 * kWarpsOfTile); }
};

// Sums of a warp: 16 heads, its channels.
template <int kHeads>
using Values = cuda::MmaC[Team<kHeads>::kChannels / 8];

// How the rows of a cache are stored.
struct RowLayout {
  int64_t row_bytes;
  RowFormat format;
  bool aligned;     // every row starts at a multiple of 16 bytes
  bool staged;      // its tiles go through the staging area
  bool bf16_scale;  // of r512; otherwise fp32

  __host__ bool is_plain() const { return format == RowFormat::kBf16 && aligned; }
};

struct Queries {
  const void* data;
  bool is_fp8;
  bool aligned;  // bf16, every 8th channel at a multiple of 16 bytes
  int64_t row_stride, head_stride;
};

template <int kHeads, int kHeadDim>
struct SharedMemory {
  bf16_t q[kHeads][row_stride(kHeadDim)];
  alignas(16) uint8_t scores[kHeads][kScoreBytes];
  const uint8_t* rows[3][kKeys];    // of this tile, the next and the one after
  uint32_t present[3][kKeys / 32];  // which of them there are, a bit a key
  float largest[kHeads];
  float sum[kHeads];
  float shrink[kHeads];  // what the new maximum leaves of the old sums
  // At the end, because the ring or the staging area may follow.
  alignas(16) bf16_t k[kKeys][row_stride(kHeadDim)];

  // Row of a key of the tile that starts at row `first` of the ring.
  __device__ bf16_t* ring_row(int first, int key) {
    const int row = first + key;
    return &k[0][0] + (row < kRingKeys ? row : row - kRingKeys) * row_stride(kHeadDim);
  }
  __device__ float* logits(int head) { return reinterpret_cast<float*>(scores[head]); }
  __device__ bf16_t* weights(int head) { return reinterpret_cast<bf16_t*>(scores[head]); }
};

// The scales of a tile of v4 or r512 rows, in front of SharedMemory. Each of the first kKeys
// threads finds those of one key.
struct KeyScales {
  const uint8_t* from[kKeys];  // of the tile whose rows were found last; null: none
  uint64_t of_key[kKeys];      // as LatentKey has them; 0: none
};

// Without scales apart from the rows.
struct NoScales {};

// Shared memory of a block with keys of that kind.
template <int kHeads>
struct ScaledMemory {
  KeyScales scales;
  SharedMemory<kHeads, kValueDim> tiles;

  // has_staging and has_ring count with rows of 576 channels.
  static_assert(sizeof(KeyScales) % 16 == 0 &&
                sizeof(KeyScales) + sizeof(tiles) <= sizeof(SharedMemory<kHeads, 576>));
};

// What a thread has asked for, not yet put together: nothing waits for it so far.
struct AskedScales {
  uint32_t low = 0, middle = 0, high = 0;
};

__device__ inline AskedScales ask_scales(const RowLayout& layout, const uint8_t* from) {
  AskedScales asked;
  if (from == nullptr) return asked;
  if (layout.format == RowFormat::kR512) {
    asked.low = layout.bf16_scale ? *reinterpret_cast<const uint16_t*>(from)
                                  : *reinterpret_cast<const uint32_t*>(from);
  } else if (layout.aligned) {  // v4: 7 bytes; the one after them is never read
    asked.low = *reinterpret_cast<const uint32_t*>(from);
    asked.middle = *reinterpret_cast<const uint16_t*>(from + 4);
    asked.high = from[6];
  } else {
    for (int i = 0; i < 4; ++i) asked.low |= static_cast<uint32_t>(from[i]) << (8 * i);
    asked.middle = from[4] | static_cast<uint32_t>(from[5]) << 8;
    asked.high = from[6];
  }
  return asked;
}

__device__ inline uint64_t joined_scales(const RowLayout& layout, const AskedScales& asked) {
  const bool is_bf16 = layout.format == RowFormat::kR512 && layout.bf16_scale;
  const uint32_t low = is_bf16 ? asked.low << 16 : asked.low;
  return low | static_cast<uint64_t>(asked.middle | asked.high << 16) << 32;
}

// Eight bf16 of a row at channels 8 i .. 8 i + 7.
template <bool kAligned>
__device__ uint4 load_bf16(const uint8_t* row, int i) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const uint4*>(row + 16 * i);
  } else {
    uint32_t word[4] = {};
    for (int b = 0; b < 16; ++b) {
      word[b / 4] |= static_cast<uint32_t>(row[16 * i + b]) << (8 * (b % 4));
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// Eight codes.
template <bool kAligned>
__device__ uint2 load_codes(const uint8_t* from) {
  if constexpr (kAligned) return *reinterpret_cast<const uint2*>(from);
  uint32_t word[2] = {};
  for (int b = 0; b < 8; ++b) word[b / 4] |= static_cast<uint32_t>(from[b]) << (8 * (b % 4));
  return make_uint2(word[0], word[1]);
}

__device__ inline uint4 decode8(uint2 codes, float scale) {
  const uint2 low = cuda::decode4(codes.x, scale);
  const uint2 high = cuda::decode4(codes.y, scale);
  return make_uint4(low.x, low.y, high.x, high.y);
}

// One row of a cache as bf16, by the lanes of a warp. A lane takes 8 neighbouring codes and the 8
// that lie 256 further, so that the lanes store to neighbouring addresses.
template <int kHeadDim, bool kAligned>
__device__ __forceinline__ void load_key(RowFormat format, const uint8_t* row, bf16_t* to) {
  const int lane = threadIdx.x % 32;
  auto* const places = reinterpret_cast<uint4*>(to);
  if (format == RowFormat::kBf16) {
    for (int i = lane; i < kHeadDim / 8; i += 32) places[i] = load_bf16<kAligned>(row, i);
    return;
  }
  const uint2 low = load_codes<kAligned>(row + 8 * lane);
  const uint2 high = load_codes<kAligned>(row + 256 + 8 * lane);
  float low_scale = 1, high_scale = 1;
  if (format == RowFormat::kV32) {
    low_scale = cuda::load_float<kAligned>(row + kV32ScaleOffset + lane / 16 * 4);
    high_scale = cuda::load_float<kAligned>(row + kV32ScaleOffset + 8 + lane / 16 * 4);
    if (lane < 8) places[kLatentDim / 8 + lane] = load_bf16<kAligned>(row + kV32RopeOffset, lane);
  } else if (lane < 8) {
    places[kLatentDim / 8 + lane] = decode8(load_codes<kAligned>(row + kLatentDim + 8 * lane), 1);
  }
  places[lane] = decode8(low, low_scale);
  places[32 + lane] = decode8(high, high_scale);
}

// The same for rows whose scales lie apart. Of v4 the codes of the last lanes' second part are the
// rope values.
template <bool kAligned>
__device__ __forceinline__ void load_key(RowFormat format, const uint8_t* row, uint64_t scales,
                                         bf16_t* to) {
  const int lane = threadIdx.x % 32;
  auto* const places = reinterpret_cast<uint4*>(to);
  const uint2 low = load_codes<kAligned>(row + 8 * lane);
  if (format == RowFormat::kR512) {
    const uint2 high = load_codes<kAligned>(row + 256 + 8 * lane);
    places[lane] = decode8(low, r512_scale(scales));
    places[32 + lane] = decode8(high, r512_scale(scales));
    return;
  }
  constexpr int kLanes = (static_cast<int>(kV4LatentDim) - 256) / 8;  // whose second part is codes
  constexpr int kTileLanes = static_cast<int>(kV4TileDim) / 8;
  places[lane] = decode8(low, v4_scale(scales, lane / kTileLanes));
  if (lane < kLanes) {
    const uint2 high = load_codes<kAligned>(row + 256 + 8 * lane);
    places[32 + lane] = decode8(high, v4_scale(scales, (32 + lane) / kTileLanes));
  } else {
    places[32 + lane] = load_bf16<kAligned>(row + kV4LatentDim, lane - kLanes);
  }
}

__device__ inline void clear_key(int head_dim, bf16_t* to) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < head_dim / 8; i += 32) {
    reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
  }
}

// Asks for the packed rows of a tile; they are there after wait_for_copies and a barrier.
__device__ inline void stage_rows(const RowLayout& layout, const uint8_t* const* rows,
                                  uint8_t* staging) {
  const int lane = threadIdx.x % 32;
  const int pieces = static_cast<int>(layout.row_bytes / 16);
#pragma unroll
  for (int i = 0; i < kKeys; i += 4 * kWarps) {
    const int key = i + static_cast<int>(threadIdx.x / 32);
    const uint8_t* row[4];  // before the copies, past which no read moves
#pragma unroll
    for (int n = 0; n < 4; ++n) row[n] = rows[key + n * kWarps];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (row[n] == nullptr) continue;
      uint8_t* const to = staging + (key + n * kWarps) * kStagedRowBytes;
      cuda::copy_async<16>(to + 16 * lane, row[n] + 16 * lane, true);
      if (lane + 32 < pieces) {
        cuda::copy_async<16>(to + 16 * (lane + 32), row[n] + 16 * (lane + 32), true);
      }
    }
  }
}

// Asks for the bf16 rows of the keys [begin, end) of a tile that starts at row `first` of the ring,
// and clears the places of those that are absent; there after wait_for_copies and a barrier.
template <int kBegin, int kEnd, int kHeads, int kHeadDim>
__device__ __forceinline__ void fetch_rows(const uint8_t* const* rows, int first,
                                           SharedMemory<kHeads, kHeadDim>& shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = kBegin; i < kEnd; i += 2 * kWarps) {
    const int key = i + static_cast<int>(threadIdx.x / 32);
    // Before the copies, past which no read moves.
    const uint8_t* const row[2] = {rows[key], rows[key + kWarps]};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      bf16_t* const to = shared.ring_row(first, key + n * kWarps);
      if (row[n] == nullptr) {
        clear_key(kHeadDim, to);
        continue;
      }
#pragma unroll
      for (int piece = 0; piece < kHeadDim / 8; piece += 32) {
        if (piece + lane >= kHeadDim / 8) continue;
        cuda::copy_async<16>(to + 8 * (piece + lane), row[n] + 16 * (piece + lane), true);
      }
    }
  }
}

// Rows at any address; a call of its own, to keep the code of the usual paths together.
template <int kHeads, int kHeadDim>
__device__ __noinline__ void load_unaligned(RowFormat format, const uint8_t* const* rows, NoScales,
                                            SharedMemory<kHeads, kHeadDim>& shared) {
#pragma unroll 1
  for (int key = threadIdx.x / 32; key < kKeys; key += kWarps) {
    if (rows[key] != nullptr) load_key<kHeadDim, false>(format, rows[key], shared.k[key]);
  }
}

template <int kHeads, int kHeadDim>
__device__ __noinline__ void load_unaligned(RowFormat format, const uint8_t* const* rows,
                                            const KeyScales& scales,
                                            SharedMemory<kHeads, kHeadDim>& shared) {
#pragma unroll 1
  for (int key = threadIdx.x / 32; key < kKeys; key += kWarps) {
    if (rows[key] == nullptr) continue;
    if (format == RowFormat::kBf16) {
      load_key<kHeadDim, false>(format, rows[key], shared.k[key]);
    } else {
      load_key<false>(format, rows[key], scales.of_key[key], shared.k[key]);
    }
  }
}

// All places of the staging area, also those of absent keys, which are cleared afterwards: without
// a branch several rows are on their way at a time.
template <RowFormat kFormat, int kHeads, int kHeadDim>
__device__ __forceinline__ void decode_staged(const uint8_t* staging,
                                              SharedMemory<kHeads, kHeadDim>& shared) {
  if constexpr (kHeadDim > kLatentDim) {
    const int warp = threadIdx.x / 32;
#pragma unroll 4
    for (int i = 0; i < kKeys; i += kWarps) {
      load_key<kHeadDim, true>(kFormat, staging + (warp + i) * kStagedRowBytes, shared.k[warp + i]);
    }
  }
}

template <RowFormat kFormat, int kHeads, int kHeadDim>
__device__ __forceinline__ void decode_staged(const uint8_t* staging, const KeyScales& scales,
                                              SharedMemory<kHeads, kHeadDim>& shared) {
  const int warp = threadIdx.x / 32;
#pragma unroll 4
  for (int i = 0; i < kKeys; i += kWarps) {
    load_key<true>(kFormat, staging + (warp + i) * kStagedRowBytes, scales.of_key[warp + i],
                   shared.k[warp + i]);
  }
}

template <int kHeads, int kHeadDim>
__device__ __forceinline__ void decode_staged(RowFormat format, const uint8_t* staging, NoScales,
                                              SharedMemory<kHeads, kHeadDim>& shared) {
  if (format == RowFormat::kV32) {
    decode_staged<RowFormat::kV32>(staging, shared);
  } else {
    decode_staged<RowFormat::kF576>(staging, shared);
  }
}

template <int kHeads, int kHeadDim>
__device__ __forceinline__ void decode_staged(RowFormat format, const uint8_t* staging,
                                              const KeyScales& scales,
                                              SharedMemory<kHeads, kHeadDim>& shared) {
  if (format == RowFormat::kV4) {
    decode_staged<RowFormat::kV4>(staging, scales, shared);
  } else {
    decode_staged<RowFormat::kR512>(staging, scales, shared);
  }
}

// Brings the keys of a tile into place. Of a staged tile the rows have arrived. One loop per
// source: all of them unrolled together would not fit the instruction cache. `scales`: NoScales or
// KeyScales.
template <int kHeads, int kHeadDim, class Scales>
__device__ void load_keys(const RowLayout& layout, const uint8_t* const* rows,
                          const uint8_t* staging, const Scales& scales,
                          SharedMemory<kHeads, kHeadDim>& shared) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  if (layout.format == RowFormat::kBf16 && layout.aligned) {
#pragma unroll
    for (int i = 0; i < kKeys / kWarps; ++i) {
      const int key = warp + i * kWarps;
      const uint8_t* const row = rows[key];
      if (row == nullptr) continue;
      for (int piece = lane; piece < kHeadDim / 8; piece += 32) {
        cuda::copy_async<16>(&shared.k[key][8 * piece], row + 16 * piece, true);
      }
    }
    cuda::wait_for_copies();
  } else if (layout.staged) {
    decode_staged(layout.format, staging, scales, shared);
  } else {
    load_unaligned<kHeads, kHeadDim>(layout.format, rows, scales, shared);
  }
#pragma unroll 1
  for (int key = warp; key < kKeys; key += kWarps) {
    if (rows[key] == nullptr) clear_key(kHeadDim, shared.k[key]);
  }
}

// Queries of `heads` heads of row t, zeros past them. With kWaits they are there after a barrier,
// otherwise after wait_for_copies and a barrier.
template <bool kWaits = true, int kHeads, int kHeadDim>
__device__ void load_queries(const Queries& queries, int64_t t, int64_t first_head, int heads,
                             SharedMemory<kHeads, kHeadDim>& shared) {
  const int64_t start = t * queries.row_stride + first_head * queries.head_stride;
  if (queries.aligned) {
    const auto* const from = static_cast<const bf16_t*>(queries.data) + start;
    for (int i = threadIdx.x; i < heads * (kHeadDim / 8); i += kThreads) {
      const int head = i / (kHeadDim / 8), d = i % (kHeadDim / 8) * 8;
      cuda::copy_async<16>(&shared.q[head][d], from + head * queries.head_stride + d, true);
    }
    if constexpr (kWaits) cuda::wait_for_copies();
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < heads * kHeadDim; i += kThreads) {
      const int64_t at = start + i / kHeadDim * queries.head_stride + i % kHeadDim;
      shared.q[i / kHeadDim][i % kHeadDim] =
          queries.is_fp8
              ? bf16_from_float(e4m3_to_float(static_cast<const uint8_t*>(queries.data)[at]))
              : static_cast<const bf16_t*>(queries.data)[at];
    }
  }
  for (int i = heads * kHeadDim + threadIdx.x; i < kHeads * kHeadDim; i += kThreads) {
    shared.q[i / kHeadDim][i % kHeadDim] = bf16_t{0};
  }
}

}  // namespace fovea::internal::latent
