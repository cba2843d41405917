#pragma once

#include <algorithm>
#include <cstdint>

#include "src/mla/cuda/latent_keys.cuh"
#include "src/mla/sparse_mla_cache.h"

// Where the rows of an aligned cache are, in 32 bits: half the registers and exchanges of an
// address, and a few instructions from an index, without a division.
namespace fovea::internal::sparse_sm90 {

inline constexpr uint32_t kNoPlace = 0xFFFFFFFF;

// A row, and its scales where they lie apart from it (v4, r512), counted from RowPlaces::scales.
struct RowPlace {
  uint32_t row = kNoPlace;  // in 8 bytes; kNoPlace: absent
  uint32_t scale = 0;       // in scale_bytes
};

// Of an aligned cache with at most latent::kMaxPlaces; of others nothing else is used.
struct RowPlaces {
  bool is_packed = false;  // aligned, and rows are codes
  uint32_t page_size = 1;
  uint32_t num_pages = 0;
  // x / page_size = 2 x multiplier >> 32 >> shift for 0 <= x < 2^31: the multiplier is 2^(31 +
  // shift) / page_size rounded up, page_size <= 2^shift, so what it has too much is less than
  // 1 / page_size in all.
  uint32_t multiplier = 0;
  uint32_t shift = 0;
  uint32_t page_steps = 0, row_steps = 0;
  uint32_t scale_page_steps = 0;
  bool by_table = false;
  const uint8_t* scales = nullptr;
  int64_t scale_bytes = 0;

  RowPlaces() = default;
  RowPlaces(const SparseMlaSegment& segment, bool is_aligned) {
    if (!is_aligned) return;
    is_packed = segment.format != RowFormat::kBf16;
    page_size = static_cast<uint32_t>(segment.page_size);
    num_pages = static_cast<uint32_t>(std::min<int64_t>(segment.num_pages, int64_t{1} << 31));
    while (uint64_t{1} << shift < page_size) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + page_size - 1) / page_size);
    page_steps = static_cast<uint32_t>(segment.page_stride_bytes / 8);
    row_steps = static_cast<uint32_t>(segment.row_bytes / 8);
    by_table = static_cast<bool>(segment.page_table);
    if (segment.format == RowFormat::kV4) {
      static_assert(kV4ScaleBytes == 8);
      scales = segment.base + segment.page_size * kV4DataBytes;
      scale_bytes = kV4ScaleBytes;
      scale_page_steps = page_steps;
    } else if (segment.format == RowFormat::kR512) {
      scales = segment.inv_scale.data;
      scale_bytes = segment.inv_scale.stride_bytes;
      scale_page_steps = page_size;
    }
  }

  // Of the key of slot `slot`, named by an index or by an entry of the page table. Sums are taken
  // modulo 2^32.
  __device__ RowPlace find(uint32_t slot, int32_t name) const {
    const uint32_t x = by_table ? slot : static_cast<uint32_t>(name);
    const uint32_t quotient = __umulhi(2 * x, multiplier) >> shift;
    const uint32_t offset = x - quotient * page_size;
    const uint32_t page = by_table ? static_cast<uint32_t>(name) : quotient;
    if (name < 0 || page >= num_pages) return {};
    return {page * page_steps + offset * row_steps, page * scale_page_steps + offset};
  }
  __device__ const uint8_t* scale(uint32_t place) const { return scales + place * scale_bytes; }
};

}  // namespace fovea::internal::sparse_sm90
