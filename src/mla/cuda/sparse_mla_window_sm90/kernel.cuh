#pragma once

#include <cstdint>

#include "src/mla/cuda/sparse_mla_window_sm90/heads.cuh"
#include "src/mla/cuda/sparse_mla_window_sm90/keys.cuh"
#include "src/mla/cuda/sparse_mla_window_sm90/store.cuh"

// A block takes one row after the other, whole: at most 128 keys. All of them are decoded once,
// into shared memory. Both warpgroups do the same, a quarter of the channels at a time:
//
//   keys    codes of a quarter to values, by all threads, while the last quarter is multiplied
//   logits  Q K^T of a quarter, 64 heads a warpgroup
//   softmax of all keys at once
//   values  of a quarter; the one before leaves meanwhile
//
// In a wide block the warpgroups have 64 heads each and all channels of the values; otherwise both
// have the same logits and different channels. Of the next row's first half of the channels, codes
// come into the places of this one's keys as soon as their values are done, queries before that.
namespace fovea::internal::sparse_window_sm90 {

// What a warpgroup does with one row after the other.
template <class Shape>
struct Share {
  int group;
  int first_head;
  int first_quarter;  // of its values

  __device__ explicit Share(int quarters)
      // The compiler is to know that it is the same for a warp.
      : group(__shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x / kGroupThreads), 0)) {
    const auto block = static_cast<int>(blockIdx.x);
    if constexpr (Shape::kIsWide) {
      first_head = (2 * block + group) * kHeads;
      first_quarter = 0;
    } else {
      first_head = block / Shape::kBlocksOfHeads * kHeads;
      first_quarter = (2 * (block % Shape::kBlocksOfHeads) + group) * quarters;
    }
  }
  __device__ bool stores_heads() const { return Shape::kIsWide || first_quarter == 0; }
};

// Keys are there for all.
__device__ __forceinline__ void meet() {
  cuda::shared_stores_before_wgmma();
  __syncthreads();
}

// Q K^T. Copies of a quarter of the channels, codes and queries, are a group; those of two quarters
// are on their way at a time, so that nobody stands in front of a full queue of reads while the
// first ones have come. Those of the first two quarters have been asked for.
template <class Shape>
__device__ __forceinline__ void attend(const Params& params, const Share<Shape>& share, int64_t t,
                                       const LaneKey& key, const LaneName& next_name, bool has_next,
                                       SharedMemory& shared, Logits& dots) {
  const LaneScales scales(params, key);
  const LaneCodes codes(params, key);
#pragma unroll 1
  for (int quarter = -1; quarter < kQuarters; ++quarter) {
    if (quarter >= 0) {
      meet();
      cuda::wgmma_fence();
      multiply_keys<Shape>(share.group, quarter, shared, dots);
      cuda::wgmma_commit();
      if (quarter + 2 < kQuarters) {
        codes.ask(quarter + 2, shared);
        ask_queries<Shape>(params, share.group, t, share.first_head, quarter + 2, shared);
      }
      cuda::commit_copies();
      if (quarter == 1 && has_next) prefetch_key(params, next_name);
    }
    if (quarter + 1 < kQuarters) {
      cuda::wait_copies<1>();
      decode(params, key, scales, quarter + 1, shared);
    }
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(dots);
  }
}

template <int kQuartersOfGroup>
__device__ __forceinline__ void attend_rows(const Params& params, SharedMemory& shared) {
  using Shape = sparse_window_sm90::Shape<kQuartersOfGroup>;
  const Share<Shape> share(kQuartersOfGroup);
  int t = static_cast<int>(blockIdx.y);
  LaneKey key;
  {
    LaneName name;
    name.ask(params, t);
    ask_queries<Shape>(params, share.group, t, share.first_head, 0, shared);
    find_key(params, name, key);
    const LaneCodes codes(params, key);
    codes.ask(0, shared);
    cuda::commit_copies();
    ask_queries<Shape>(params, share.group, t, share.first_head, 1, shared);
    codes.ask(1, shared);
    cuda::commit_copies();
  }
#pragma unroll 1
  while (true) {
    const int next = t + params.rows_at_a_time;
    const bool has_next = next < params.num_rows;
    LaneName name{-1, 0};
    if (has_next) name.ask(params, next);
    leave_present(params, key, shared);
    Logits dots = {};
    attend(params, share, t, key, name, has_next, shared, dots);
    if (has_next) {
      __syncthreads();  // queries are used up
      for (int quarter = 0; quarter < 2; ++quarter)
        ask_queries<Shape>(params, share.group, next, share.first_head, quarter, shared);
      find_key(params, name, key);
    }
    const float unit = latent::logit_unit(params.scores);
    HeadSums sums(unit, shared, dots);
    Weights weights;
    const Target target{params, t, 0, share.first_head, true};
    const float* const rotation = params.rotations.row(t);
    float factors[2];
    if constexpr (Shape::kIsWide) {
      // One loop over the values, for the sake of code that is fetched once.
#pragma unroll
      for (int step = 0; step < kSteps; ++step) sums.weigh(unit, step, dots, weights);
    }
#pragma unroll 1
    for (int i = 0; i < kQuartersOfGroup; i += 2) {
      constexpr bool kHasSecond = kQuartersOfGroup > 1;
      const int quarter = share.first_quarter + i;
      Values first = {};
      if constexpr (Shape::kIsWide) {
        pin(weights);
        cuda::wgmma_fence();
        multiply_values(weights, quarter, shared, first);
      } else {
        // Weights of 16 keys are multiplied while the next ones are made.
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          sums.weigh(unit, step, dots, weights);
          cuda::wgmma_fence();
          multiply_step(weights, quarter, step, shared, first);
        }
      }
      cuda::wgmma_commit();
      if (i == 0) finish_heads(target, sums, share.stores_heads(), factors);
      const auto store = [&](int n, Values& values) {
        store_values<Shape>(target, share.group, n, factors, rotation, shared, values);
      };
      const auto ask_next = [&] {
        if (!has_next || i > 0) return;
        __syncthreads();  // keys of the first two quarters are used up
        const LaneCodes codes(params, key);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          codes.ask(n, shared);
          cuda::commit_copies();
        }
      };
      if constexpr (kHasSecond) {
        Values second = {};
        cuda::wgmma_fence();
        multiply_values(weights, quarter + 1, shared, second);
        cuda::wgmma_commit();
        cuda::wgmma_wait<1>();
        cuda::wgmma_pin(first);
        store(quarter, first);
        cuda::wgmma_wait<0>();
        cuda::wgmma_pin(second);
        ask_next();
        store(quarter + 1, second);
      } else {
        cuda::wgmma_wait<0>();
        cuda::wgmma_pin(first);
        ask_next();
        store(quarter, first);
      }
      pin(weights);
    }
    if (!has_next) break;
    __syncthreads();  // so are the places of results
    t = next;
  }
}

// Without these instructions the body is empty; supports() refuses such devices.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#define FOVEA_SM90_BODY(...) __VA_ARGS__
#else
#define FOVEA_SM90_BODY(...)
#endif

template <int kQuartersOfGroup>
__global__ void __launch_bounds__(kThreads, 1) attend_lists(const __grid_constant__ Params params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    cuda::let_next_launch_start();
    attend_rows<kQuartersOfGroup>(params, *reinterpret_cast<SharedMemory*>(memory));
  })
}

#undef FOVEA_SM90_BODY

}  // namespace fovea::internal::sparse_window_sm90
