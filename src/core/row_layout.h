#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/numeric.h"
#include "fovea/tensor.h"

/// Byte layouts of packed rows (docs/formats.md) and the addresses of their parts.
namespace fovea::internal {

/// v32: 512 e4m3 codes, one fp32 scale per 128 of them, 64 bf16 rope values, in one record. Rows of
/// 576 channels consist of the same two parts in every format.
inline constexpr int64_t kV32LatentDim = 512;
inline constexpr int64_t kV32TileDim = 128;
inline constexpr int64_t kV32NumTiles = kV32LatentDim / kV32TileDim;
inline constexpr int64_t kV32RopeDim = 64;
inline constexpr int64_t kV32Width = kV32LatentDim + kV32RopeDim;
inline constexpr int64_t kV32ScaleOffset = kV32LatentDim;
inline constexpr int64_t kV32RopeOffset = kV32ScaleOffset + 4 * kV32NumTiles;
inline constexpr int64_t kV32RowBytes = kV32RopeOffset + 2 * kV32RopeDim;
static_assert(kV32RowBytes == 656);

/// i132: `width` e4m3 codes and one fp32 scale a token; a page holds all codes, then all scales.
inline constexpr int64_t kI132Width = 128;
FOVEA_HOST_DEVICE constexpr int64_t i132_row_bytes(int64_t width) { return width + 4; }

/// v4: 448 e4m3 codes, one ue8m0 scale per 64 of them, 64 bf16 rope values. A page holds all data
/// rows (codes, then rope), then all scale rows (7 scales and a byte that is written 0 and never
/// read).
inline constexpr int64_t kV4LatentDim = 448;
inline constexpr int64_t kV4TileDim = 64;
inline constexpr int64_t kV4NumTiles = kV4LatentDim / kV4TileDim;
inline constexpr int64_t kV4RopeDim = 64;
inline constexpr int64_t kV4Width = kV4LatentDim + kV4RopeDim;
inline constexpr int64_t kV4DataBytes = kV4LatentDim + 2 * kV4RopeDim;
inline constexpr int64_t kV4ScaleBytes = kV4NumTiles + 1;
inline constexpr int64_t kV4RowBytes = kV4DataBytes + kV4ScaleBytes;
static_assert(kV4RowBytes == 584);

/// r512: 512 e4m3 codes; the scale of a row is an element of a tensor beside the pool.
inline constexpr int64_t kR512Width = 512;

/// f576: 576 e4m3 codes of x / k_scale; the scale belongs to the cache, not to the row.
inline constexpr int64_t kF576Width = 576;

/// Bytes of one token in any format.
FOVEA_HOST_DEVICE constexpr int64_t row_bytes(RowFormat format, int64_t width) {
  switch (format) {
    case RowFormat::kBf16:
      return 2 * width;
    case RowFormat::kV32:
      return kV32RowBytes;
    case RowFormat::kI132:
      return i132_row_bytes(width);
    case RowFormat::kV4:
      return kV4RowBytes;
    case RowFormat::kR512:
      return kR512Width;
    case RowFormat::kF576:
      return kF576Width;
  }
  return 0;
}

/// Bytes of one token in the first of the two regions of a page; 0: a token is one record.
FOVEA_HOST_DEVICE constexpr int64_t first_region_bytes(RowFormat format, int64_t width) {
  if (format == RowFormat::kI132) return width;
  return format == RowFormat::kV4 ? kV4DataBytes : 0;
}

/// Tokens of a paged pool, addressed by slot = page * page_size + offset; byte offsets are 64 bits
/// wide. Byte is const for readers. Nothing in a pool is aligned beyond what its base and page
/// stride give.
template <class Byte>
struct PagedRows {
  Byte* data = nullptr;
  int64_t num_pages = 0;
  int64_t page_size = 1;
  int64_t page_stride_bytes = 0;

  FOVEA_HOST_DEVICE int64_t capacity() const { return num_pages * page_size; }
  FOVEA_HOST_DEVICE bool contains(int32_t slot) const { return slot >= 0 && slot < capacity(); }

  /// Start of a valid slot's part in a region of the page that gives `bytes` to each token and
  /// starts `region_offset` bytes into the page.
  FOVEA_HOST_DEVICE Byte* at(int32_t slot, int64_t bytes, int64_t region_offset = 0) const {
    // Both fit 32 bits, whose division is several times faster than that of 64 on many processors.
    const uint32_t page = static_cast<uint32_t>(slot) / static_cast<uint32_t>(page_size);
    const int64_t offset = slot - page * page_size;
    return data + page * page_stride_bytes + region_offset + offset * bytes;
  }

  /// The record of a bf16, v32, r512 or f576 row.
  FOVEA_HOST_DEVICE Byte* record(int32_t slot, int64_t bytes) const { return at(slot, bytes); }
  FOVEA_HOST_DEVICE Byte* i132_codes(int32_t slot, int64_t width) const { return at(slot, width); }
  FOVEA_HOST_DEVICE Byte* i132_scale(int32_t slot, int64_t width) const {
    return at(slot, 4, page_size * width);
  }
  FOVEA_HOST_DEVICE Byte* v4_data(int32_t slot) const { return at(slot, kV4DataBytes); }
  FOVEA_HOST_DEVICE Byte* v4_scales(int32_t slot) const {
    return at(slot, kV4ScaleBytes, page_size * kV4DataBytes);
  }
};

/// The scales of r512 rows, bf16 or fp32, by slot. Byte is const for readers.
template <class Byte>
struct RowScales {
  Byte* data = nullptr;  // null: rows that have none
  int64_t stride_bytes = 0;
  bool is_bf16 = false;

  FOVEA_HOST_DEVICE Byte* at(int32_t slot) const { return data + slot * stride_bytes; }
  FOVEA_HOST_DEVICE float get(int32_t slot) const {
    if (is_bf16) return bf16_to_float(*reinterpret_cast<const bf16_t*>(at(slot)));
    return *reinterpret_cast<const float*>(at(slot));
  }
  FOVEA_HOST_DEVICE void set(int32_t slot, float scale) const {
    if (is_bf16) {
      *reinterpret_cast<bf16_t*>(at(slot)) = bf16_from_float(scale);
    } else {
      *reinterpret_cast<float*>(at(slot)) = scale;
    }
  }
};

/// Views `inv_scale` [S, 1].
template <class Byte, class View>
RowScales<Byte> row_scales(const View& inv_scale) {
  RowScales<Byte> scales;
  if (!inv_scale.defined()) return scales;
  scales.data = static_cast<Byte*>(inv_scale.data);
  scales.stride_bytes = inv_scale.stride[0] * static_cast<int64_t>(size_of(inv_scale.dtype));
  scales.is_bf16 = inv_scale.dtype == DType::kBf16;
  return scales;
}

/// Views a pool: u8 [pages, page_bytes], or bf16 [S, D] (then every row is a page of its own).
template <class Byte, class View>
PagedRows<Byte> paged_rows(const View& pool, int64_t page_size) {
  PagedRows<Byte> rows;
  rows.data = static_cast<Byte*>(pool.data);
  rows.num_pages = pool.shape[0];
  rows.page_size = pool.dtype == DType::kBf16 ? 1 : page_size;
  rows.page_stride_bytes = pool.stride[0] * static_cast<int64_t>(size_of(pool.dtype));
  return rows;
}

}  // namespace fovea::internal
