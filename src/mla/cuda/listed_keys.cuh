#pragma once

#include <cstdint>

#include "src/mla/sparse_mla_cache.h"
#include "src/mla/sparse_mla_parts.h"

namespace fovea::internal {

/// The keys of one row's lists, 64 slots a block, primary blocks first. A key takes two steps: the
/// read of a table that gives its place, and where that place is.
struct ListedKeys {
  const SparseMlaSegment* segments;  // [2]
  const RowParts& parts;
  int64_t t;

  __device__ bool is_primary(int64_t block) const { return block < parts.primary_blocks; }
  __device__ const SparseMlaSegment& segment(int64_t block) const {
    return segments[is_primary(block) ? 0 : 1];
  }
  __device__ int64_t slot(int64_t block, int key) const {
    return (is_primary(block) ? block : block - parts.primary_blocks) * kBlockSlots + key;
  }
  /// What names the key; -1 where the list is over.
  __device__ int32_t place(int64_t block, int key) const {
    const int64_t at = slot(block, key);
    if (at >= (is_primary(block) ? parts.primary_slots : parts.extra_slots)) return -1;
    return segment(block).place(t, at);
  }
  __device__ LatentAddress address(int64_t block, int key, int32_t place) const {
    return segment(block).address(slot(block, key), place);
  }
};

}  // namespace fovea::internal
