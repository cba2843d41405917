#pragma once

#include <algorithm>
#include <cstdint>

#include "src/core/access.h"
#include "src/core/cuda/scan.cuh"
#include "src/mla/sparse_mla_cache.h"

// Lists of keys in the order of regions of the cache instead of their own. Blocks start together
// and take about as long for a list, so that all are in one region at a time, which the
// second-level cache holds: of 64K keys that all rows list at random it holds a third.
namespace fovea::internal::sparse_rows_sm90 {

// A region has so many keys, the last one all others. Lists that name none of those keep their
// order, and with it the cache that holds none.
inline constexpr int kRegionBits = 14;
inline constexpr int kRegions = 4;
inline constexpr int64_t kUnorderedKeys = int64_t{kRegions - 1} << kRegionBits;
inline constexpr int kOrderThreads = 256;
inline constexpr int kSlotsEach = 16;
inline constexpr int kMaxOrderedSlots = kOrderThreads * kSlotsEach;
inline constexpr int kMinOrderedSlots = 512;

struct ListOrder {
  SparseMlaSegment segment;
  Accessor<int32_t, 2> ordered;
};

// Of what is not a key, too: an index below 0 counts as the first.
__device__ inline int region_of(int32_t index) {
  return min(max(index, 0) >> kRegionBits, kRegions - 1);
}

// A block orders the list of a row. Numbers of keys by region stand side by side in 64 bits.
static __global__ void __launch_bounds__(kOrderThreads)
    order_lists(const __grid_constant__ ListOrder order) {
  __shared__ int32_t ordered[kMaxOrderedSlots];
  __shared__ uint64_t sums[cuda::kWarpThreads + 1];
  const int64_t t = blockIdx.x;
  const auto num_slots = static_cast<int>(order.segment.length(t));
  const int each = (num_slots + kOrderThreads - 1) / kOrderThreads;
  const int first = static_cast<int>(threadIdx.x) * each;
  const int count = min(max(num_slots - first, 0), each);
  const int32_t* const list = order.segment.indices.row(t) + first;
  int32_t index[kSlotsEach];
  uint64_t own = 0;
#pragma unroll
  for (int i = 0; i < kSlotsEach; ++i) {
    index[i] = i < count ? list[i] : 0;
    if (i < count) own += uint64_t{1} << 16 * region_of(index[i]);
  }
  uint64_t total;
  const uint64_t upto = cuda::block_inclusive_sum(own, sums, &total);
  const bool is_ordered = num_slots >= kMinOrderedSlots && total >> 16 * (kRegions - 1) != 0;
  uint64_t at = (total << 16) + (total << 32) + (total << 48) + upto - own;
#pragma unroll
  for (int i = 0; i < kSlotsEach; ++i) {
    if (i >= count) continue;
    const int region = region_of(index[i]);
    ordered[is_ordered ? at >> 16 * region & 0xFFFF : first + i] = index[i];
    at += uint64_t{1} << 16 * region;
  }
  __syncthreads();
  int32_t* const to = order.ordered.row(t);
  for (int i = static_cast<int>(threadIdx.x); i < num_slots; i += kOrderThreads) to[i] = ordered[i];
}

}  // namespace fovea::internal::sparse_rows_sm90
