#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fovea/dtype.h"
#include "fovea/numeric.h"
#include "fovea/sparse_mla.h"
#include "src/core/access.h"

/// Where the rows of a cache lie and which of them a query row uses.
namespace fovea::internal {

/// A v32 row: 512 e4m3 codes, 4 fp32 scales of 128 channels each, 64 bf16 rope values.
inline constexpr int64_t kV32ScaleOffset = kLatentDim;
inline constexpr int64_t kV32TileChannels = 128;
inline constexpr int64_t kV32NumScales = kLatentDim / kV32TileChannels;
inline constexpr int64_t kV32RopeOffset = kV32ScaleOffset + kV32NumScales * 4;
inline constexpr int64_t kV32RopeChannels = 64;
inline constexpr int64_t kV32RowBytes = kV32RopeOffset + kV32RopeChannels * 2;

/// An f576 row: 576 e4m3 codes, each of which is the channel up to the factor k_scale.
inline constexpr int64_t kF576Channels = 576;

/// Bytes of one token's row in a packed pool.
inline int64_t sparse_mla_row_bytes(RowFormat format, int64_t head_dim_qk) {
  if (format == RowFormat::kV32) return kV32RowBytes;
  return format == RowFormat::kF576 ? kF576Channels : head_dim_qk * 2;
}

/// What the logits are multiplied with: queries and f576 keys enter the dot products as codes.
inline double logit_scale(const SparseMlaProblem& problem) {
  return static_cast<double>(problem.softmax_scale) * problem.q_scale * problem.k_scale;
}

/// One cache and the lists of slots that the query rows take from it.
struct SparseMlaSegment {
  const uint8_t* base = nullptr;
  int64_t num_pages = 0;
  int64_t page_size = 1;  // tokens
  int64_t page_stride_bytes = 0;
  int64_t row_bytes = 0;
  RowFormat format = RowFormat::kBf16;
  Accessor<const int32_t, 2> indices;      // [T, width]
  Accessor<const int32_t, 1> topk_length;  // [T] or absent

  /// Slots of query row t that are read as indices.
  int64_t length(int64_t t) const {
    const int64_t width = indices ? indices.shape[1] : 0;
    return topk_length ? std::clamp<int64_t>(topk_length(t), 0, width) : width;
  }

  /// The row of a slot; null when the index is outside the cache.
  const uint8_t* row(int32_t index) const {
    if (index < 0) return nullptr;
    const int64_t page = index / page_size;
    if (page >= num_pages) return nullptr;
    return base + page * page_stride_bytes + index % page_size * row_bytes;
  }
};

/// The primary segment; bf16 [S, Dqk] is a pool of one-token pages.
SparseMlaSegment primary_segment(const SparseMlaProblem& problem, const SparseMlaTensors& tensors);
/// The second segment; its lists have width 0 when it is absent.
SparseMlaSegment extra_segment(const SparseMlaProblem& problem, const SparseMlaTensors& tensors);

/// Channel d of a row: the bf16 value, bf16(code * scale) with the product in fp32 (v32), or the
/// value of the code, which bf16 holds (f576). Rows may lie at any address.
inline float decode_channel(RowFormat format, const uint8_t* row, int64_t d) {
  if (format == RowFormat::kF576) return e4m3_to_float(row[d]);
  if (format == RowFormat::kV32 && d < kLatentDim) {
    float scale;
    std::memcpy(&scale, row + kV32ScaleOffset + d / kV32TileChannels * 4, sizeof(scale));
    return bf16_to_float(bf16_from_float(e4m3_to_float(row[d]) * scale));
  }
  const int64_t offset = format == RowFormat::kV32 ? kV32RopeOffset + (d - kLatentDim) * 2 : d * 2;
  bf16_t value;
  std::memcpy(&value, row + offset, sizeof(value));
  return bf16_to_float(value);
}

}  // namespace fovea::internal
