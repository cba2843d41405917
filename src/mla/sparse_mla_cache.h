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

/// Where a row of a cache lies, and the scales that lie apart from it: the 7 bytes of v4, or the
/// element of r512; null for other formats. A null row: none.
struct LatentAddress {
  const uint8_t* row = nullptr;
  const uint8_t* scales = nullptr;
};

/// The row with its scales: the 7 bytes of v4, or the bits of the fp32 scale of r512; 0 for other
/// formats. Null: no row.
struct LatentKey {
  const uint8_t* row = nullptr;
  uint64_t scales = 0;
};

/// Scale of tile `tile` of a v4 row, and the scale of an r512 row.
FOVEA_HOST_DEVICE inline float v4_scale(uint64_t scales, int64_t tile) {
  return ue8m0_to_float(static_cast<uint8_t>(scales >> (8 * tile)));
}
FOVEA_HOST_DEVICE inline float r512_scale(uint64_t scales) {
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
  FOVEA_HOST_DEVICE int64_t length(int64_t t) const {
    int64_t width = indices ? indices.shape[1] : 0;
    if (page_table) width = request_is_valid(t) ? max_length : 0;
    if (!topk_length) return width;
    const int64_t len = topk_length(t);
    return len < 0 ? 0 : len > width ? width : len;
  }

  /// What slot `slot` < length(t) of query row t names: an index, or a page of the table.
  FOVEA_HOST_DEVICE int32_t place(int64_t t, int64_t slot) const {
    return page_table ? page_table(row_to_request(t), quotient(slot)) : indices(t, slot);
  }
  /// Where the key of such a slot lies; no row when its place is outside the cache.
  FOVEA_HOST_DEVICE LatentAddress address(int64_t slot, int32_t place) const {
    if (page_table) return at(place, slot - quotient(slot) * page_size);
    if (place < 0) return {};
    const int64_t page = quotient(place);
    return at(page, place - page * page_size);
  }

  /// The key of slot `slot` < length(t) of query row t; no row when it is outside the cache.
  LatentKey key(int64_t t, int64_t slot) const {
    const LatentAddress from = address(slot, place(t, slot));
    LatentKey key{from.row, 0};
    if (from.scales == nullptr) return key;
    if (format == RowFormat::kV4) {
      // The byte after the scales is never read.
      std::memcpy(&key.scales, from.scales, static_cast<size_t>(kV4NumTiles));
    } else {
      const RowScales<const uint8_t> scale{from.scales, 0, inv_scale.is_bf16};
      key.scales = std::bit_cast<uint32_t>(scale.get(0));
    }
    return key;
  }

 private:
  FOVEA_HOST_DEVICE bool request_is_valid(int64_t t) const {
    const int64_t request = row_to_request(t);
    return request >= 0 && request < page_table.shape[0];
  }

  // By the tokens of a page. Both fit 32 bits, whose division is several times faster than that of
  // 64.
  FOVEA_HOST_DEVICE int64_t quotient(int64_t slot) const {
    return static_cast<uint32_t>(slot) / static_cast<uint32_t>(page_size);
  }

  FOVEA_HOST_DEVICE LatentAddress at(int64_t page, int64_t offset) const {
    if (page < 0 || page >= num_pages) return {};
    const uint8_t* const start = base + page * page_stride_bytes;
    LatentAddress to{start + offset * row_bytes, nullptr};
    if (format == RowFormat::kV4) {
      to.scales = start + page_size * kV4DataBytes + offset * kV4ScaleBytes;
    } else if (format == RowFormat::kR512) {
      // A table may name pages whose slots 32 bits do not hold.
      to.scales = inv_scale.data + (page * page_size + offset) * inv_scale.stride_bytes;
    }
    return to;
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

  InverseRotations() = default;
  explicit InverseRotations(const SparseMlaTensors& tensors)
      : table(access<const float, 2>(tensors.inverse_rope)),
        positions(access<const int32_t, 1>(tensors.positions)) {}

  /// The cosines and sines of query row t; null without a table.
  FOVEA_HOST_DEVICE const float* row(int64_t t) const {
    if (!table) return nullptr;
    const int64_t position = positions(t), last = table.shape[0] - 1;
    return table.row(position < 0 ? 0 : position > last ? last : position);
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
