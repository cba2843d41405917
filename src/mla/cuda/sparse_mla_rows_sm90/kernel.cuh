#pragma once

#include <cstdint>

#include "src/mla/cuda/sparse_mla_rows_sm90/heads.cuh"
#include "src/mla/cuda/sparse_mla_rows_sm90/keys.cuh"
#include "src/mla/cuda/sparse_mla_rows_sm90/store.cuh"

// A block takes 64 heads of one row after the other, 64 slots of the row's list at a time. Its
// warpgroups:
//
//   0, even  Q K^T and softmax of the even tiles; channels 0..255 of all values
//   1, odd   the same of the odd tiles; channels 256..511
//   2, keys  brings queries and rows (keys.cuh)
//
// A warpgroup multiplies values with its own weights from registers, and with those of the other
// one from shared memory, tile after tile, so that sums are added in the order of the list. In the
// order of time, tiles i (even) and i + 1:
//
//   even | softmax(i) | P(i) V left  | P(i+1) V left            | Q K^T(i+2)
//   odd  | Q K^T(i+1) | softmax(i+1) | P(i) and P(i+1) V right  | Q K^T(i+3)
//
// So the tensor cores have products of one warpgroup while the other one has a softmax. The largest
// logit and the reference of the weights go from tile to tile.
namespace fovea::internal::sparse_rows_sm90 {

// x, the same in all lanes, which the compiler is to know: with branches that might divide a warp
// it lets products run one after the other only.
__device__ inline int same_in_warp(int x) { return __shfl_sync(0xFFFFFFFF, x, 0); }

// What a warpgroup has used up, and another one waits for.
__device__ __forceinline__ void arrive_used(Mbarrier& free) {
  if (threadIdx.x % 32 == 0) cuda::mbarrier_arrive(free);
}
// Copies of other threads are there, and products may read them.
__device__ __forceinline__ void wait_full(Mbarrier& full, int64_t phase) {
  cuda::mbarrier_wait(full, phase);
  cuda::shared_stores_before_wgmma();
}

// Q K^T of the tile in a place.
template <int kHeadDim>
__device__ __forceinline__ void multiply_tile_keys(int place, int64_t use,
                                                   SharedMemory<kHeadDim>& shared,
                                                   WgmmaSums<kKeys>& dots) {
  Tile& tile = shared.tiles[place];
  wait_full(shared.full[2 * place], use);
  cuda::wgmma_fence();
  multiply_keys(shared.q, tile, 0, kHalfPanels, true, dots);
  wait_full(shared.full[2 * place + 1], use);
  multiply_keys(shared.q, tile, kHalfPanels, SharedMemory<kHeadDim>::kPanels, false, dots);
  cuda::wgmma_commit();
  cuda::wgmma_wait<0>();
  cuda::wgmma_pin(dots);
}

// Warpgroup 0. `use` counts the uses of its place before this unit.
template <int kHeadDim>
__device__ __forceinline__ void attend_even(float unit, int num_tiles, int64_t use,
                                            SharedMemory<kHeadDim>& shared, ValueSums& values,
                                            HeadState& state) {
  Tile& own = shared.tiles[0];
  WgmmaSums<kKeys> dots;
  if (num_tiles > 0) multiply_tile_keys(0, use, shared, dots);
#pragma unroll 1
  for (int i = 0; i < num_tiles; i += 2) {
    if (i + 2 >= num_tiles) arrive_used(shared.q_free);
    Weights weights;
    float shrink[2];
    const uint64_t present = *reinterpret_cast<const uint64_t*>(shared.present[0]);
    softmax(unit, present, dots, state, shrink, weights);
    leave(state, shared.scales[0]);
    cuda::arrive_some(kEvenScales, 2 * kGroupThreads);
    shrink_values(shrink, values);
    pin(weights);
    cuda::wgmma_pin(values);
    cuda::wgmma_fence();
    multiply_own(weights, own, 0, values);
    cuda::wgmma_commit();
    // All warps have their logits, so the place of the rope channels is free.
    cuda::sync_roles(kEvenGroup, kGroupThreads);
    store_weights(weights, own);
    cuda::shared_stores_before_wgmma();
    cuda::arrive_some(kEvenWeights, 2 * kGroupThreads);
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(values);
    arrive_used(shared.free[kEvenLeft]);
    if (i + 1 == num_tiles) break;
    cuda::sync_roles(kOddWeights, 2 * kGroupThreads);
    follow(shared.scales[1], unit, state, shrink);
    shrink_values(shrink, values);
    cuda::wgmma_pin(values);
    cuda::wgmma_fence();
    multiply_other(shared.tiles[1], 0, values);
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(values);
    arrive_used(shared.free[kOddLeft]);
    if (i + 2 < num_tiles) multiply_tile_keys(0, use + i / 2 + 1, shared, dots);
  }
}

// Takes the even tile that the other warpgroup has weighed into the sums; the products are under
// way.
template <int kHeadDim>
__device__ __forceinline__ void take_even(const float (&shrink)[2], SharedMemory<kHeadDim>& shared,
                                          ValueSums& values) {
  cuda::sync_roles(kEvenWeights, 2 * kGroupThreads);
  shrink_values(shrink, values);
  cuda::wgmma_pin(values);
  cuda::wgmma_fence();
  multiply_other(shared.tiles[0], kHalfPanels, values);
  cuda::wgmma_commit();
}

// Warpgroup 1.
template <int kHeadDim>
__device__ __forceinline__ void attend_odd(float unit, int num_tiles, int64_t use,
                                           SharedMemory<kHeadDim>& shared, ValueSums& values,
                                           HeadState& state) {
  Tile& own = shared.tiles[1];
  const int num_pairs = num_tiles / 2;
#pragma unroll 1
  for (int i = 0; i < num_pairs; ++i) {
    WgmmaSums<kKeys> dots;
    multiply_tile_keys(1, use + i, shared, dots);
    if (i + 1 == num_pairs) arrive_used(shared.q_free);
    // The weights of the tile before may come later than its scales.
    float shrink_even[2], shrink[2];
    cuda::sync_roles(kEvenScales, 2 * kGroupThreads);
    follow(shared.scales[0], unit, state, shrink_even);
    Weights weights;
    const uint64_t present = *reinterpret_cast<const uint64_t*>(shared.present[1]);
    softmax(unit, present, dots, state, shrink, weights);
    // All warps have their logits, so the place of the rope channels is free.
    cuda::sync_roles(kOddGroup, kGroupThreads);
    store_weights(weights, own);
    leave(state, shared.scales[1]);
    cuda::shared_stores_before_wgmma();
    cuda::arrive_some(kOddWeights, 2 * kGroupThreads);
    take_even(shrink_even, shared, values);
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(values);
    arrive_used(shared.free[kEvenRight]);
    shrink_values(shrink, values);
    pin(weights);
    cuda::wgmma_pin(values);
    cuda::wgmma_fence();
    multiply_own(weights, own, kHalfPanels, values);
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    cuda::wgmma_pin(values);
    arrive_used(shared.free[kOddRight]);
  }
  if (num_tiles % 2 == 0) return;
  float shrink[2];
  cuda::sync_roles(kEvenScales, 2 * kGroupThreads);
  follow(shared.scales[0], unit, state, shrink);
  take_even(shrink, shared, values);
  cuda::wgmma_wait<0>();
  cuda::wgmma_pin(values);
  arrive_used(shared.free[kEvenRight]);
}

template <int kHeadDim>
__device__ __forceinline__ void init_barriers(SharedMemory<kHeadDim>& shared) {
  constexpr int kConsumerWarps = kGroupThreads / 32;
  cuda::mbarrier_init(shared.q_full, kGroupThreads + 1);  // and the number of tiles
  cuda::mbarrier_init(shared.q_free, 2 * kConsumerWarps);
  for (int half = 0; half < kHalves; ++half) {
    // With the masks of the keys.
    cuda::mbarrier_init(shared.full[half], kGroupThreads + (is_left(half) ? kKeyWarps : 0));
    cuda::mbarrier_init(shared.free[half], kConsumerWarps);
  }
}

// Computed where it is used: registers are few.
__device__ inline Target target_of_unit(const Params& params, uint32_t unit) {
  return {params, unit / params.head_groups, 0, int64_t{unit % params.head_groups} * kHeads, true};
}

// A warpgroup of heads, over all units of the block.
template <int kGroup, int kHeadDim>
__device__ __forceinline__ void work_on_heads(const Params& params,
                                              SharedMemory<kHeadDim>& shared) {
  const float scale = latent::logit_unit(params.scores);
  int64_t use = 0, turn = 0;
#pragma unroll 1
  for (int64_t unit = blockIdx.x; unit < params.num_units; unit += params.num_blocks, ++turn) {
    wait_full(shared.q_full, turn);
    const int num_tiles = same_in_warp(shared.num_tiles);
    // Without a tile of its own a warpgroup has no use for the queries.
    if (num_tiles <= kGroup) arrive_used(shared.q_free);
    ValueSums values = {};
    HeadState state;
    if constexpr (kGroup == 0) {
      attend_even(scale, num_tiles, use, shared, values, state);
    } else {
      attend_odd(scale, num_tiles, use, shared, values, state);
    }
    use += (num_tiles + 1 - kGroup) / 2;
    float factors[2];
    const Target target = target_of_unit(params, static_cast<uint32_t>(unit));
    finish_heads<kHeadDim>(target, kGroup, state, shared.sums[turn % 2], factors);
    store_values<kHeadDim>(target, kGroup * kHalfChannels, factors, values,
                           shared.staged[threadIdx.x / 32]);
  }
}

// Without these instructions the body is empty; supports() refuses such devices.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#define FOVEA_SM90_BODY(...) __VA_ARGS__
#else
#define FOVEA_SM90_BODY(...)
#endif

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ Params params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    auto& shared = *reinterpret_cast<SharedMemory<kHeadDim>*>(memory);
    cuda::let_next_launch_start();
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    const int role = same_in_warp(threadIdx.x / kGroupThreads);
    if (role == 0) {
      cuda::take_registers<kHeadRegisters>();
      work_on_heads<0>(params, shared);
    } else if (role == 1) {
      cuda::take_registers<kHeadRegisters>();
      work_on_heads<1>(params, shared);
    } else {
      cuda::give_registers<kKeyRegisters>();
      work_on_keys(params, shared);
    }
  })
}

#undef FOVEA_SM90_BODY

}  // namespace fovea::internal::sparse_rows_sm90
