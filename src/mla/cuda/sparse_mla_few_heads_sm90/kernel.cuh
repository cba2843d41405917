#pragma once

#include <cstdint>

#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/column_softmax.cuh"
#include "src/core/cuda/fp8.cuh"
#include "src/core/cuda/mbarrier.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/mla/cuda/listed_keys.cuh"
#include "src/mla/cuda/sparse_mla_few_heads_sm90/config.h"
#include "src/mla/cuda/sparse_mla_launch.cuh"

// A block takes 16 heads of one row and one part of its list, 64 slots at a time. Products stand on
// their side: logits are keys times queries, [64 keys][16 heads], sums are values times weights,
// [512 channels][16 heads], so that few heads fill the tensor cores. Its warpgroups:
//
//   0, 1 sums  a tile each in turn, so that one's arithmetic runs beside the other's products. A
//              warp decodes its 16 keys, 64 channels at a time, to registers: A of the logits. They
//              are stored as values when those products have read them, two panels later, and the
//              values' products of the tile before run meanwhile. It weighs its 16 keys (weights
//              are sums of two bf16) and asks for 16 columns of each panel of the values
//   2, rows    looks slots up and copies codes and scales to shared memory, those of a warp of each
//              group a warp; rope channels are read by the sums when the others are there
//
// Lane (g, c) = (lane / 4, lane % 4) of warp w has, for heads 8 j + 2 c + e in place 2 j + e:
//   logits    rows 16 w + g and + 8 of the tile
//   sums      columns 16 w + g and + 8 of panel p; rounded weights, then rests
// Row 16 w + g + 8 h of a tile is slot 16 w + row_key(g) + 8 h of the list, and of each 64 channels
// the lane has 16 c .. 16 c + 15: column 16 s + 8 h + 2 c + e of the products is channel
// 16 c + 4 s + 2 h + e.
namespace fovea::internal::sparse_few_heads_sm90 {

using cuda::ColumnSoftmax;
using cuda::Mbarrier;
using cuda::PanelMatrix;
using cuda::PanelSide;
using cuda::WgmmaA;
using cuda::WgmmaSums;
using latent::kNegInf;
using latent::RowLayout;
using latent::RowParams;
using latent::Target;

inline constexpr int kValuePanelBytes = kKeys * cuda::kPanelRowBytes;
inline constexpr int kQueryPanelBytes = kHeads * cuda::kPanelRowBytes;
inline constexpr int kWeightBytes = kHeads * cuda::kPanelRowBytes;
inline constexpr int kStepsOfPanel = cuda::kPanelColumns / 16;
inline constexpr int kPlaces = ColumnSoftmax::kPlaces;
inline constexpr float kLn2 = 0.693147181f;

// Neighbours in g are four rows apart: rows are 33 units of 16 bytes, and eight lanes that read two
// of them meet all banks.
__device__ inline int row_key(int g) { return g / 2 + g % 2 * 4; }

// The exchange tells the compiler that it is the same in all lanes.
__device__ inline int one_of_warp(int x) { return __shfl_sync(0xFFFFFFFF, x, 0); }

// A group's sums where its values were. Each 32 channels are four floats further from those before,
// so that no more than two lanes that store a channel at a time meet at a bank.
struct GroupSums {
  float x[kHeads][kValueDim + kValueDim / 8 + 4];

  __device__ float* at(int head, int channel) { return &x[head][channel + channel / 32 * 4]; }
};

struct GroupMemory {
  alignas(1024) uint8_t values[kValuePanels][kValuePanelBytes];  // [64 keys][512]
  alignas(1024) uint8_t weights[2][kWeightBytes];                // [16 heads][64 keys]
  alignas(16) uint8_t rows[kKeys][kStagedBytes];
  const uint8_t* ropes[kKeys];    // the rope channels of these rows
  uint32_t present[kGroupWarps];  // which of these rows there are, a bit a key of the warp
  cuda::ColumnMemory softmax;
  float reference[kHeads];  // in units of log2
  float largest[kGroupWarps][kHeads];
  float sum[kGroupWarps][kHeads];
  Mbarrier full[kGroupWarps], empty[kGroupWarps];  // the rows of a warp

  __device__ GroupSums& sums() {
    static_assert(sizeof(GroupSums) <= sizeof(values));
    return reinterpret_cast<GroupSums&>(values);
  }
};

struct SharedMemory {
  alignas(1024) uint8_t queries[kQueryPanels][kQueryPanelBytes];
  GroupMemory groups[kGroups];
  float factors[kGroups][kHeads];  // what sums are multiplied with
};

// The column of the products that is channel `channel` of a panel.
__device__ inline int product_column(int channel) {
  return channel % 16 / 4 * 16 + channel % 4 / 2 * 8 + channel / 16 * 2 + channel % 2;
}

// Eight channels of a query, from 8 * piece on.
__device__ inline uint4 load_query(const latent::Queries& queries, int64_t first, int piece) {
  if (queries.is_fp8) {
    const auto* const from = static_cast<const uint8_t*>(queries.data) + first;
    return latent::decode8(latent::load_codes<false>(from + 8 * piece), 1);
  }
  const auto* const from =
      reinterpret_cast<const uint8_t*>(static_cast<const bf16_t*>(queries.data) + first);
  return queries.aligned ? latent::load_bf16<true>(from, piece)
                         : latent::load_bf16<false>(from, piece);
}

// Queries of `heads` heads of row t, zeros past them.
template <int kHeadDim, int kAllThreads>
__device__ __forceinline__ void load_queries(const latent::Queries& queries, int64_t t,
                                             int64_t first_head, int heads, SharedMemory& shared) {
  constexpr int kPieces = kHeadDim / 8;
  const int64_t first = t * queries.row_stride + first_head * queries.head_stride;
#pragma unroll 5
  for (int i = threadIdx.x; i < kHeads * kPieces; i += kAllThreads) {
    const int head = i / kPieces, piece = i % kPieces;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (head < heads) value = load_query(queries, first + head * queries.head_stride, piece);
    const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int column = product_column(piece % 8 * 8 + 2 * n);
      *reinterpret_cast<uint32_t*>(shared.queries[piece / 8] +
                                   cuda::panel_offset(head, column / 8) + column % 8 * 2) =
          words[n];
    }
  }
}

// Sixteen channels of a row, as pairs: the lane's of a panel.
struct Channels {
  uint32_t pair[8];

  __device__ static Channels of(const uint4& low, const uint4& high) {
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
};

// Those of any row, one of which may be none, from device memory.
template <bool kAligned>
__device__ inline Channels load_channels(const RowLayout& layout, const LatentAddress& key,
                                         int panel) {
  const int first = panel * 8 + static_cast<int>(threadIdx.x % 4) * 2;  // in 8 channels
  const auto plain = [&](int64_t offset, int from) {
    return Channels::of(latent::load_bf16<kAligned>(key.row + offset, from),
                        latent::load_bf16<kAligned>(key.row + offset, from + 1));
  };
  const auto codes = [&](float scale) {
    const uint8_t* const from = key.row + 8 * first;
    return Channels::of(latent::decode8(latent::load_codes<kAligned>(from), scale),
                        latent::decode8(latent::load_codes<kAligned>(from + 8), scale));
  };
  if (key.row == nullptr) return {};
  if (layout.format == RowFormat::kBf16) return plain(0, first);
  if (layout.format == RowFormat::kF576) return codes(1);
  if (layout.format == RowFormat::kV32) {
    if (panel == kValuePanels) return plain(kV32RopeOffset, first - kValueDim / 8);
    return codes(cuda::load_float<kAligned>(key.row + kV32ScaleOffset + panel / 2 * 4));
  }
  if (layout.format == RowFormat::kV4) {
    if (panel == kValuePanels - 1)
      return plain(kV4LatentDim, first - static_cast<int>(kV4LatentDim) / 8);
    return codes(v4_scale(key.scales[panel], 0));
  }
  const float scale =
      layout.bf16_scale
          ? __uint_as_float(static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(key.scales))
                            << 16)
          : *reinterpret_cast<const float*>(key.scales);
  return codes(scale);
}

// Of a warp's rows of a tile, a bit for each that there is.
__device__ inline uint32_t present_rows(const uint8_t* row) {
  return __ballot_sync(0xFFFFFFFF, row != nullptr) & ((1u << kWarpKeys) - 1);
}

__device__ inline const uint8_t* from_lane(const uint8_t* address, int lane) {
  return reinterpret_cast<const uint8_t*>(
      __shfl_sync(0xFFFFFFFF, reinterpret_cast<unsigned long long>(address), lane));
}

// In place of rope channels that there are none of.
static __device__ const uint4 kNoRope[8] = {};

// Brings packed rows: those of warp threadIdx.x / 32 % 4 of each group, tile after tile.
__device__ __forceinline__ void bring_rows(const RowParams& params, const ListedKeys& keys,
                                           int begin, int end, SharedMemory& shared) {
  const int lane = threadIdx.x % 32;
  const int warp = one_of_warp(static_cast<int>(threadIdx.x) % kGroupThreads / 32);
  const int key = warp * kWarpKeys + lane % kWarpKeys;
  const auto find = [&](int tile, int32_t place) {
    const uint8_t* const row = keys.address(tile, key, place).row;
    if (row != nullptr) {
#pragma unroll
      for (int at = 0; at < kV32RowBytes; at += 128) cuda::prefetch_l2(row + at);
    }
    return row;
  };
  if (begin >= end) return;
  const uint8_t* row = find(begin, keys.place(begin, key));
  int32_t next_place = begin + 1 < end ? keys.place(begin + 1, key) : -1;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const int use = (i - begin) / kGroups;
    GroupMemory& own = shared.groups[(i - begin) % kGroups];
    if (use > 0) cuda::mbarrier_wait(own.empty[warp], use - 1);
    const uint32_t present = present_rows(row);
    if (lane < kWarpKeys) {
      own.ropes[key] =
          row != nullptr ? row + kV32RopeOffset : reinterpret_cast<const uint8_t*>(kNoRope);
    }
    if (lane == 0) own.present[warp] = present;
    const auto* const readable = static_cast<const uint8_t*>(params.queries.data);
#pragma unroll 4
    for (int n = 0; n < kWarpKeys; ++n) {
      const uint8_t* const from = from_lane(row, n);
      cuda::copy_async<16>(own.rows[warp * kWarpKeys + n] + 16 * lane,
                           from != nullptr ? from + 16 * lane : readable, from != nullptr);
    }
    if (lane < kWarpKeys) {
      cuda::copy_async<16>(own.rows[key] + kV32ScaleOffset,
                           row != nullptr ? row + kV32ScaleOffset : readable, row != nullptr);
    }
    cuda::mbarrier_arrive_with_copies(own.full[warp]);
    // Of what is not copied.
    __syncwarp();
    if (lane == 0) cuda::mbarrier_arrive(own.full[warp]);
    if (i + 1 < end) row = find(i + 1, next_place);
    next_place = i + 2 < end ? keys.place(i + 2, key) : -1;
  }
  cuda::wait_for_copies();
}

// kPacked: all rows are v32 and start at multiples of 16 bytes. Others are read when they are
// wanted, which is slow.
template <int kHeadDim, bool kPacked>
class GroupWork {
 public:
  __device__ GroupWork(const RowParams& params, const ListedKeys& keys, int group,
                       SharedMemory& shared)
      : params_(params), keys_(keys), shared_(shared), own_(shared.groups[group]), group_(group) {
    const int lane = threadIdx.x % 32;
    warp_ = one_of_warp(static_cast<int>(threadIdx.x) % kGroupThreads / 32);
    value_at_ = cuda::panel_offset(warp_ * kWarpKeys + lane % 16, lane / 16);
  }

  // The tiles begin, begin + kGroups, .. < end.
  __device__ __forceinline__ void run(int begin, int end) {
#pragma unroll
    for (WgmmaSums<32>& panel : sums_) panel = {};
    softmax_.clear();
#pragma unroll
    for (float& x : largest_) x = kNegInf;
    pin();
    int use = 0;
#pragma unroll 1
    for (int i = begin; i < end; i += kGroups) {
      WgmmaSums<16> logits;
      uint32_t present;
      if constexpr (kPacked) {
        present = multiply_packed(use, logits);
      } else {
        present = multiply_any(i, use, logits);
      }
      finish_logits(present, logits);
      softmax_.add(logits, use, warp_, barrier(), own_.softmax, own_.weights[0], own_.weights[1],
                   sums_);
      multiply_values();
      ++use;
    }
    cuda::wgmma_wait<0>();
    pin();
    leave();
  }

 private:
  __device__ int barrier() const { return 1 + group_; }
  __device__ void sync() const { cuda::sync_some(barrier(), kGroupThreads); }

  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int p = 0; p < kValuePanels; ++p) cuda::wgmma_pin(sums_[p]);
  }

  // The lane's 16 channels of a panel of two rows, as A of four steps.
  struct Piece {
    WgmmaA step[kStepsOfPanel];

    __device__ void set(int half, const Channels& channels) {
#pragma unroll
      for (int s = 0; s < kStepsOfPanel; ++s) {
        step[s].x[half] = channels.pair[2 * s];
        step[s].x[2 + half] = channels.pair[2 * s + 1];
      }
    }
  };
  struct Codes {
    uint4 row[2];
  };

  // `rows`: the lane's 16 channels of panel 0.
  __device__ static Codes load_codes(const uint8_t* const (&rows)[2], int panel) {
    const int at = panel * cuda::kPanelColumns;
    return {*reinterpret_cast<const uint4*>(rows[0] + at),
            *reinterpret_cast<const uint4*>(rows[1] + at)};
  }
  __device__ static void decode(const Codes& codes, const float (&scale)[2], Piece& piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4& row = codes.row[half];
      piece.set(half, Channels::of(latent::decode8(make_uint2(row.x, row.y), scale[half]),
                                   latent::decode8(make_uint2(row.z, row.w), scale[half])));
    }
  }
  __device__ void multiply_panel(const Piece& piece, int panel, WgmmaSums<16>& logits,
                                 int keep_sums = 1) const {
    const PanelMatrix queries =
        cuda::panel_matrix(shared_.queries, kQueryPanelBytes).advanced(panel * kQueryPanelBytes);
    cuda::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kStepsOfPanel; ++s) {
      cuda::wgmma<PanelSide::kRows>(logits, piece.step[s], queries.advanced(32 * s),
                                    s > 0 ? 1 : keep_sums);
    }
    cuda::wgmma_commit();
  }
  // Behind the wait for its products: registers that they read have a use that comes later. Values
  // keep the order of the columns.
  __device__ void store_piece(const Piece& piece, int panel) const {
    uint8_t* const to = own_.values[panel];
#pragma unroll
    for (int s = 0; s < kStepsOfPanel; ++s)
      cuda::store_rows(to + (value_at_ ^ s << 5), piece.step[s].x);
  }

  // Logits of the tile, and its values in their place. Returns a bit for each key of the warp that
  // there is.
  __device__ __forceinline__ uint32_t multiply_packed(int use, WgmmaSums<16>& logits) {
    const int lane = threadIdx.x % 32;
    cuda::mbarrier_wait(own_.full[warp_], use);
    const uint32_t present = own_.present[warp_];
    const uint8_t *rows[2], *codes_of[2];
    uint4 rope_words[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of_warp = row_key(lane / 4) + 8 * half;
      const int key = warp_ * kWarpKeys + of_warp;
      rows[half] = own_.rows[key];
      codes_of[half] = rows[half] + lane % 4 * 16;
      const auto* const words = reinterpret_cast<const uint4*>(own_.ropes[key]) + 2 * (lane % 4);
      rope_words[half][0] = __ldg(words);
      rope_words[half][1] = __ldg(words + 1);
    }
    float scale[2];
    const auto load_scale = [&](int group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[half] = *reinterpret_cast<const float*>(rows[half] + kV32ScaleOffset + 4 * group);
      }
    };
    // Two panels are on their way to the tensor cores.
    Piece even, odd;
    load_scale(0);
    decode(load_codes(codes_of, 0), scale, even);
    decode(load_codes(codes_of, 1), scale, odd);
    load_scale(1);
    Codes codes = load_codes(codes_of, 2);
    cuda::wgmma_wait<0>();
    pin();
    // The values of the last tile are used up.
    if (use > 0) sync();
    multiply_panel(even, 0, logits, 0);
    multiply_panel(odd, 1, logits);
#pragma unroll 1
    for (int panel = 2; panel < kValuePanels; panel += 2) {
      cuda::wgmma_wait<1>();
      store_piece(even, panel - 2);
      decode(codes, scale, even);
      codes = load_codes(codes_of, panel + 1);
      multiply_panel(even, panel, logits);
      cuda::wgmma_wait<1>();
      store_piece(odd, panel - 1);
      decode(codes, scale, odd);
      if (panel + 2 < kValuePanels) {
        load_scale(panel / 2 + 1);
        codes = load_codes(codes_of, panel + 2);
      } else {
        // The rows have been read.
        __syncwarp();
        if (lane == 0) cuda::mbarrier_arrive(own_.empty[warp_]);
      }
      multiply_panel(odd, panel + 1, logits);
    }
    cuda::wgmma_wait<1>();
    store_piece(even, kValuePanels - 2);
    Piece rope;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      rope.set(half, Channels::of(rope_words[half][0], rope_words[half][1]));
    multiply_panel(rope, kValuePanels, logits);
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(logits);
    store_piece(odd, kValuePanels - 1);
    return present;
  }

  // The same with rows that are looked up and read here.
  __device__ __forceinline__ uint32_t multiply_any(int tile, int use, WgmmaSums<16>& logits) {
    const RowLayout& layout = params_.layouts[keys_.is_primary(tile) ? 0 : 1];
    const int lane = threadIdx.x % 32;
    const int key = warp_ * kWarpKeys + lane % kWarpKeys;
    const LatentAddress found = keys_.address(tile, key, keys_.place(tile, key));
    LatentAddress rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of_warp = row_key(lane / 4) + 8 * half;
      rows[half] = {from_lane(found.row, of_warp), from_lane(found.scales, of_warp)};
    }
#pragma unroll 1
    for (int panel = 0; panel < kHeadDim / cuda::kPanelColumns; ++panel) {
      Piece piece;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        piece.set(half, layout.aligned ? load_channels<true>(layout, rows[half], panel)
                                       : load_channels<false>(layout, rows[half], panel));
      }
      cuda::wgmma_wait<0>();
      pin();
      // The values of the last tile are used up.
      if (panel == 0 && use > 0) sync();
      multiply_panel(piece, panel, logits, panel);
      cuda::wgmma_wait<0>();
      cuda::wgmma_pin(logits);
      if (panel < kValuePanels) store_piece(piece, panel);
    }
    return present_rows(found.row);
  }

  // In units of log2; -inf where a key is absent.
  __device__ __forceinline__ void finish_logits(uint32_t present, WgmmaSums<16>& logits) {
    const latent::Scores& scores = params_.scores;
    const float unit = latent::logit_unit(scores);
    if (scores.logit_cap > 0) {
      const float scale = scores.logit_scale / scores.logit_cap;
#pragma unroll
      for (float& x : logits.x) x = latent::capped_fast(scale * x, scores.logit_cap);
    }
    const uint32_t own = present >> row_key(threadIdx.x % 32 / 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      logits.x[i] = (own >> (i / 2 % 2 * 8) & 1) != 0 ? logits.x[i] * unit : kNegInf;
      float& largest = largest_[i / 4 * 2 + i % 2];
      largest = fmaxf(largest, logits.x[i]);
    }
  }

  __device__ __forceinline__ void multiply_values() {
    const PanelMatrix values = cuda::panel_matrix(own_.values, kValuePanelBytes);
    const PanelMatrix weights = cuda::panel_matrix(own_.weights, 2 * kWeightBytes);
    cuda::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int p = 0; p < kValuePanels; ++p) {
        cuda::wgmma<PanelSide::kRows, 32, PanelSide::kColumns>(
            sums_[p], values.advanced(p * kValuePanelBytes + k * 16 * cuda::kPanelRowBytes),
            weights.advanced(32 * k), 1);
      }
    }
    cuda::wgmma_commit();
  }

  // Sums and states to shared memory.
  __device__ __forceinline__ void leave() {
    sync();  // the products of all warps have read the values
    const int lane = threadIdx.x % 32;
    GroupSums& to = own_.sums();
#pragma unroll
    for (int p = 0; p < kValuePanels; ++p) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Column 16 warp + g + 8 h of the panel.
        const int channel = 64 * p + lane / 8 * 16 + warp_ * 4 + i / 2 % 2 * 2 + lane / 4 % 2;
        *to.at(ColumnSoftmax::lane_head(i / 4 * 2 + i % 2), channel) =
            sums_[p].x[i] + sums_[p].x[i + 8];
      }
    }
#pragma unroll
    for (int h = 0; h < kPlaces; ++h) {
      float sum = softmax_.sum[h], largest = largest_[h];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
      }
      if (lane >= 4) continue;
      const int head = ColumnSoftmax::lane_head(h);
      own_.sum[warp_][head] = sum;
      own_.largest[warp_][head] = largest;
      if (warp_ == 0) own_.reference[head] = softmax_.reference[h];
    }
  }

  const RowParams& params_;
  const ListedKeys& keys_;
  SharedMemory& shared_;
  GroupMemory& own_;
  int group_, warp_;
  int value_at_;  // in a panel, of what the lane names to store a step
  ColumnSoftmax softmax_;
  float largest_[kPlaces];  // logits of the lane, in units of log2
  WgmmaSums<32> sums_[kValuePanels];
};

// By a thread per head: what both groups have, to a result or a part.
__device__ inline void finish_states(const Target& to, SharedMemory& shared) {
  const int head = threadIdx.x;
  if (head >= kHeads || !to.has(head)) return;
  float largest = kNegInf, reference = kNegInf;
#pragma unroll
  for (const GroupMemory& group : shared.groups) {
    reference = fmaxf(reference, group.reference[head]);
#pragma unroll
    for (const auto& of_warp : group.largest) largest = fmaxf(largest, of_warp[head]);
  }
  // While all are -inf, subtract 0: -inf minus -inf would be NaN.
  const float base = reference == kNegInf ? 0.0f : reference;
  float sum = 0, factors[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const GroupMemory& group = shared.groups[g];
    factors[g] = cuda::exp2_fast(group.reference[head] - base);
    float of_group = 0;
#pragma unroll
    for (const auto& of_warp : group.sum) of_group += of_warp[head];
    // A group without a weight, or with nothing but NaN.
    sum += group.reference[head] == kNegInf ? of_group : of_group * factors[g];
  }
  // From the reference, which may lag behind, to the maximum.
  const float shrink = reference == largest ? 1.0f : exp2f(reference - largest);
  const float factor = shrink * latent::leave_head(to, head, kLn2 * largest, shrink * sum);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) shared.factors[g][head] = factor * factors[g];
}

// A lane puts out 8 neighbouring channels of one head after the other.
__device__ inline void leave_values(const Target& to, SharedMemory& shared) {
  const latent::RowTurn turn{to.params.rotations.row(to.t), to.params.rope_dim};
  constexpr int kPieces = kValueDim / 8;
#pragma unroll 2
  for (int i = threadIdx.x; i < kHeads * kPieces; i += kThreads) {
    const int head = i / kPieces, channel = i % kPieces * 8;
    if (!to.has(head)) break;
    float4 sums[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const auto at = [&](int g) {
        return *reinterpret_cast<const float4*>(shared.groups[g].sums().at(head, channel + 4 * n));
      };
      const float4 a = at(0), b = at(1);
      const float of_a = shared.factors[0][head], of_b = shared.factors[1][head];
      sums[n] = make_float4(fmaf(b.x, of_b, a.x * of_a), fmaf(b.y, of_b, a.y * of_a),
                            fmaf(b.z, of_b, a.z * of_a), fmaf(b.w, of_b, a.w * of_a));
    }
    latent::leave_channels(to, turn, head, channel, 1, sums[0], sums[1]);
  }
}

template <int kHeadDim, bool kPacked>
__device__ __forceinline__ void attend_block(const RowParams& params, SharedMemory& shared) {
  constexpr int kAllThreads = all_threads(kPacked);
  const int64_t t = blockIdx.x / params.head_groups, part = blockIdx.y;
  const int64_t first_head = static_cast<int64_t>(blockIdx.x % params.head_groups) * kHeads;
  const RowParts parts = params.parts(t);
  // An empty row has no part; its first block writes the zeros.
  if (part > 0 && part >= parts.num_parts) return;
  const bool is_result = parts.num_parts <= 1;
  // Tiles are few enough for an int.
  const auto begin = one_of_warp(static_cast<int>(is_result ? 0 : parts.first_block(part)));
  const auto end =
      one_of_warp(static_cast<int>(is_result ? parts.num_blocks : parts.first_block(part + 1)));
  const ListedKeys keys{params.segments, parts, t};
  const int group = one_of_warp(static_cast<int>(threadIdx.x) / kGroupThreads);
  if (threadIdx.x == 0) {
    for (GroupMemory& of : shared.groups) {
      for (Mbarrier& full : of.full) cuda::mbarrier_init(full, 32 + 1);
      for (Mbarrier& empty : of.empty) cuda::mbarrier_init(empty, 1);
    }
  }
  const int64_t heads_left = params.outputs.num_heads - first_head;
  load_queries<kHeadDim, kAllThreads>(params.queries, t, first_head,
                                      static_cast<int>(heads_left < kHeads ? heads_left : kHeads),
                                      shared);
  cuda::shared_stores_before_wgmma();
  __syncthreads();
  if constexpr (kPacked) {
    if (group == kGroups) {
      cuda::give_registers<kBringRegisters>();
      bring_rows(params, keys, begin, end, shared);
      return;
    }
    cuda::take_registers<kGroupRegisters>();
  }
  GroupWork<kHeadDim, kPacked>(params, keys, group, shared).run(begin + group, end);
  const Target to{params, t, part, first_head, is_result};
  cuda::sync_roles(kBothGroups, kThreads);
  finish_states(to, shared);
  cuda::sync_roles(kBothGroups, kThreads);
  leave_values(to, shared);
}

// Without these instructions the body is empty; supports() refuses such devices.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#define FOVEA_SM90_BODY(...) __VA_ARGS__
#else
#define FOVEA_SM90_BODY(...)
#endif

template <int kHeadDim, bool kPacked>
__global__ void __launch_bounds__(all_threads(kPacked), 1)
    attend(const __grid_constant__ RowParams params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    attend_block<kHeadDim, kPacked>(params, *reinterpret_cast<SharedMemory*>(memory));
  })
}

#undef FOVEA_SM90_BODY

}  // namespace fovea::internal::sparse_few_heads_sm90
