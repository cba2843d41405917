#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "fovea/dtype.h"
#include "fovea/numeric.h"
#include "fovea/sparse_mla.h"
#include "src/core/access.h"
#include "src/core/row_layout.h"

/// Where the rows of a cache lie and which of them a query row uses.
namespace fovea::internal {

/// Bytes from one token's row to the next in a packed pool; the scale rows of v4 are apart.
inline int64_t sparse_mla_row_bytes(RowFormat format, int64_t head_dim_qk) {
  return format == RowFormat::kV4 ? kV4DataBytes : row_bytes(format, head_dim_qk);
}

/// What the logits are multiplied with: queries and f576 keys enter the dot products as codes.
inline double logit_scale(const SparseMlaProblem& problem) {
  return static_cast<double>(problem.softmax_scale) * problem.q_scale * problem.k_scale;
}

/// A row of a cache, and the scales that lie apart from it: the 7 bytes of v4, or the bits of the
/// fp32 scale of r512; 0 for other formats. Null: no row.
struct LatentKey {
  const uint8_t* row = nullptr;
  uint64_t scales = 0;
};

/// Scale of tile `tile` of a v4 row, and the scale of an r512 row.
inline float v4_scale(uint64_t scales, int64_t tile) {
  return ue8m0_to_float(static_cast<uint8_t>(scales >> (8 * tile)));
}
inline float r512_scale(uint64_t scales) {
  return std::bit_cast<float>(static_cast<uint32_t>(scales));
}

/// One cache and the keys that the query rows take from it: listed slots, or the leading keys of a
/// request.
struct SparseMlaSegment {
  const uint8_t* base = nullptr;
  int64_t num_pages = 0;
  int64_t page_size = 1;  // tokens
  int64_t page_stride_bytes = 0;
  int64_t row_bytes = 0;
  RowFormat format = RowFormat::kBf16;
  RowScales<const uint8_t> inv_scale;         // of r512
  Accessor<const int32_t, 2> indices;         // [T, width]
  Accessor<const int32_t, 1> topk_length;     // [T] or absent; of a page table its number of keys
  Accessor<const int32_t, 2> page_table;      // [R, max_pages] or absent
  Accessor<const int32_t, 1> row_to_request;  // [T], with page_table
  int64_t max_length = 0;                     // of a page table

  /// Slots of query row t: those that are read as indices, or the keys of its request.
  int64_t length(int64_t t) const {
    int64_t width = indices ? indices.shape[1] : 0;
    if (page_table) width = request_is_valid(t) ? max_length : 0;
    return topk_length ? std::clamp<int64_t>(topk_length(t), 0, width) : width;
  }

  /// Slot `slot` < length(t) of query row t; null when what it names is outside the cache.
  LatentKey key(int64_t t, int64_t slot) const {
    if (page_table) {
      const int64_t column = slot / page_size;
      return at(page_table(row_to_request(t), column), slot - column * page_size);
    }
    const int32_t index = indices(t, slot);
    if (index < 0) return {};
    // Both fit 32 bits, whose division is several times faster than that of 64.
    const uint32_t page = static_cast<uint32_t>(index) / static_cast<uint32_t>(page_size);
    return at(page, index - page * page_size);
  }

 private:
  bool request_is_valid(int64_t t) const {
    const int64_t request = row_to_request(t);
    return request >= 0 && request < page_table.shape[0];
  }

  LatentKey at(int64_t page, int64_t offset) const {
    if (page < 0 || page >= num_pages) return {};
    const uint8_t* const start = base + page * page_stride_bytes;
    LatentKey key{start + offset * row_bytes, 0};
    if (format == RowFormat::kV4) {
      // The byte after the scales is never read.
      std::memcpy(&key.scales, start + page_size * kV4DataBytes + offset * kV4ScaleBytes,
                  static_cast<size_t>(kV4NumTiles));
    } else if (format == RowFormat::kR512) {
      // A table may name pages whose slots 32 bits do not hold.
      RowScales<const uint8_t> of_page = inv_scale;
      of_page.data += page * page_size * of_page.stride_bytes;
      key.scales = std::bit_cast<uint32_t>(of_page.get(static_cast<int32_t>(offset)));
    }
    return key;
  }
};

/// The primary segment; bf16 [S, Dqk] is a pool of one-token pages.
SparseMlaSegment primary_segment(const SparseMlaProblem& problem, const SparseMlaTensors& tensors);
/// The second segment; its lists have width 0 when it is absent.
SparseMlaSegment extra_segment(const SparseMlaProblem& problem, const SparseMlaTensors& tensors);

/// The table of the inverse rotation and where each query row stands in it.
struct InverseRotations {
  Accessor<const float, 2> table;  // absent: none
  Accessor<const int32_t, 1> positions;

  explicit InverseRotations(const SparseMlaTensors& tensors)
      : table(access<const float, 2>(tensors.inverse_rope)),
        positions(access<const int32_t, 1>(tensors.positions)) {}

  /// The cosines and sines of query row t; null without a table.
  const float* row(int64_t t) const {
    return table ? table.row(std::clamp<int64_t>(positions(t), 0, table.shape[0] - 1)) : nullptr;
  }
};

/// bf16(code * scale) with the product in fp32.
inline float decode_code(uint8_t code, float scale) {
  return bf16_to_float(bf16_from_float(e4m3_to_float(code) * scale));
}

/// Channel d of a row: the bf16 value, bf16(code * scale) (v32, v4, r512), or the value of the
/// code, which bf16 holds (f576). Rows may lie at any address.
inline float decode_channel(RowFormat format, const uint8_t* row, int64_t d, uint64_t scales = 0) {
  int64_t offset = d * 2;  // of a bf16 value
  if (format == RowFormat::kF576) return e4m3_to_float(row[d]);
  if (format == RowFormat::kR512) return decode_code(row[d], r512_scale(scales));
  if (format == RowFormat::kV4) {
    if (d < kV4LatentDim) return decode_code(row[d], v4_scale(scales, d / kV4TileDim));
    offset = kV4LatentDim + (d - kV4LatentDim) * 2;
  } else if (format == RowFormat::kV32) {
    if (d < kV32LatentDim) {
      float scale;
      std::memcpy(&scale, row + kV32ScaleOffset + d / kV32TileDim * 4, sizeof(scale));
      return decode_code(row[d], scale);
    }
    offset = kV32RopeOffset + (d - kV32LatentDim) * 2;
  }
  bf16_t value;
  std::memcpy(&value, row + offset, sizeof(value));
  return bf16_to_float(value);
}

}  // namespace fovea::internal
