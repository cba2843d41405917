#pragma once

#include <cstdint>

/// Sums over the threads of a block.
namespace fovea::internal::cuda {

inline constexpr int kWarpThreads = 32;

/// Inclusive sum of `value` over the threads of a one-dimensional block, in thread order, and the
/// sum of all in `*total`. `shared` holds 33 values and may be used again after the call. Every
/// thread of the block calls it.
template <class T>
__device__ T block_inclusive_sum(T value, T* shared, T* total) {
  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;
  const int warps = (blockDim.x + kWarpThreads - 1) / kWarpThreads;
  for (int step = 1; step < kWarpThreads; step *= 2) {
    const T other = __shfl_up_sync(0xFFFFFFFF, value, step);
    if (lane >= step) value += other;
  }
  if (lane == kWarpThreads - 1) shared[warp] = value;
  __syncthreads();
  if (warp == 0) {
    T sum = lane < warps ? shared[lane] : T(0);
    for (int step = 1; step < kWarpThreads; step *= 2) {
      const T other = __shfl_up_sync(0xFFFFFFFF, sum, step);
      if (lane >= step) sum += other;
    }
    shared[lane] = sum;
    if (lane == kWarpThreads - 1) shared[kWarpThreads] = sum;
  }
  __syncthreads();
  if (warp > 0) value += shared[warp - 1];
  *total = shared[kWarpThreads];
  __syncthreads();
  return value;
}

/// Walks `count` values in pieces of the block's size: calls done(i, before, upto) with the sums
/// before and up to value(i), for every i, and returns the sum of all. Every thread of the block
/// calls it; what done() writes is visible to the block afterwards.
template <class T, class Value, class Done>
__device__ T block_scan(int64_t count, T* shared, Value value, Done done) {
  T carried = 0;
  for (int64_t base = 0; base < count; base += blockDim.x) {
    const int64_t i = base + threadIdx.x;
    const T own = i < count ? value(i) : T(0);
    T total;
    const T upto = carried + block_inclusive_sum(own, shared, &total);
    if (i < count) done(i, upto - own, upto);
    carried += total;
  }
  __syncthreads();
  return carried;
}

/// Largest `value` over the warp; of floats NaN is left out.
template <class T>
__device__ T warp_max(T value) {
  for (int step = kWarpThreads / 2; step > 0; step /= 2) {
    value = max(value, __shfl_xor_sync(0xFFFFFFFF, value, step));
  }
  return value;
}

__device__ inline int32_t warp_max(int32_t value) { return __reduce_max_sync(0xFFFFFFFF, value); }

/// Largest `value` over the block. `shared` as above.
template <class T>
__device__ T block_max(T value, T* shared) {
  value = warp_max(value);
  if (threadIdx.x % kWarpThreads == 0) shared[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  value = shared[0];
  for (int warp = 1; warp < static_cast<int>((blockDim.x + kWarpThreads - 1) / kWarpThreads);
       ++warp) {
    value = max(value, shared[warp]);
  }
  __syncthreads();
  return value;
}

/// The number of the ascending values at(0) .. at(count - 1) that are <= x.
template <class At, class T>
__device__ int64_t count_up_to(const At& at, int64_t count, T x) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (at(middle) <= x) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace fovea::internal::cuda
