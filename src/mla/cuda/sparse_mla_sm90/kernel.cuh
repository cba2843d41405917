#pragma once

#include <cstdint>

#include "src/mla/cuda/sparse_mla_sm90/heads.cuh"
#include "src/mla/cuda/sparse_mla_sm90/keys.cuh"
#include "src/mla/cuda/sparse_mla_sm90/store.cuh"

// A block takes 64 heads of one row and one part of its list, 64 slots at a time. Its warpgroups:
//
//   0, logits  Q K^T of a tile, softmax, channels 0..255 of the values, weights to shared memory
//   1, values  channels 256..511
//   2, 3 keys  bring the rows (keys.cuh)
//
// A tile comes and goes in halves, so that logits begin with channels 0..255 while the others come,
// and the place of one half is filled while the other is in use. In the order of time:
//
//   logits  | Q K^T(i)     | softmax(i)  | P(i) V left   | Q K^T(i+1)
//   values  |              |             | P(i) V right  |
//   keys    | tile i+1, whose place is that of tile i-1  | tile i+2
//
// Two blocks with 64 heads each of the same row share the rows of their keys: each brings half of
// them and sends the other block a copy.
namespace fovea::internal::sparse_sm90 {

// Half a tile is used up, and another one wants its place: what nobody waits for might come to a
// block that has ended.
template <int kBlocks>
__device__ __forceinline__ void arrive_free(Mbarrier& free) {
  if (threadIdx.x % 32 != 0) return;
  if constexpr (kBlocks == 1) {
    cuda::mbarrier_arrive(free);
  } else {
    for (uint32_t rank = 0; rank < kBlocks; ++rank) cuda::mbarrier_arrive(free, rank);
  }
}

// Two blocks wait for each other: before the first row goes to the other, whose barriers are then
// there, and when all tiles are used up. Values are staged where the tiles were, when nothing more
// comes into them or leaves them for the other block, which also may end only then. Everybody has
// waited for what came, so nothing is left to be ordered.
template <int kBlocks>
__device__ __forceinline__ void meet_other_block() {
  if constexpr (kBlocks > 1) {
    cuda::cluster_arrive_relaxed();
    cuda::cluster_wait();
  }
}

// Barriers and what is known of the row are there.
template <int kBlocks>
__device__ __forceinline__ void meet_block() {
  cuda::sync_roles(kAllRoles, kThreads);
  meet_other_block<kBlocks>();
}

// Those who store would wait at a fence for what they have asked of memory, too.
__device__ __forceinline__ void wait_for_keys(Mbarrier& full, int use) {
  cuda::mbarrier_wait(full, use);
  cuda::shared_stores_before_wgmma();
}

// Asks for Q K^T of tile i; once its first products are under way, it calls after_first().
template <int kHeadDim, class AfterFirst>
__device__ __forceinline__ void ask_logits(int i, SharedMemory<kHeadDim>& shared,
                                           WgmmaSums<kKeys>& dots, const AfterFirst& after_first) {
  const int stage = i % kStages;
  Tile& tile = shared.tiles[stage];
  wait_for_keys(shared.left_full[stage], i / kStages);
  cuda::wgmma_fence();
  multiply_keys(shared.q, tile, 0, 1, dots);
  cuda::wgmma_commit();
  after_first();
  multiply_keys(shared.q, tile, 1, kHalfPanels, dots);
  wait_for_keys(shared.right_full[stage], i / kStages);
  multiply_keys(shared.q, tile, kHalfPanels, SharedMemory<kHeadDim>::kPanels, dots);
  cuda::wgmma_commit();
}

// Warpgroup 0. The tiles [0, num_tiles) of the part.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void attend_left(const Scores& scores, int num_tiles,
                                            SharedMemory<kHeadDim>& shared, ValueSums& values,
                                            HeadState& state) {
  if (num_tiles == 0) return;
  WgmmaSums<kKeys> dots;
  ask_logits(0, shared, dots, [] {});
  cuda::wgmma_wait<0>();
  cuda::wgmma_pin(dots);
#pragma unroll 1
  for (int i = 0; i < num_tiles; ++i) {
    const int stage = i % kStages;
    const uint64_t present = *reinterpret_cast<const uint64_t*>(shared.present[stage]);
    Weights weights;
    softmax(scores, present, dots, state, weights);
    shrink_values(state.shrink[0], state.shrink[1], values);
    cuda::wgmma_fence();
    multiply_left(weights, shared.tiles[stage], values);
    cuda::wgmma_commit();
    // The other warpgroup has used up the last weights.
    if (i > 0) cuda::sync_roles(kWeightsRead, 2 * kGroupThreads);
    store_weights(weights, shared.weights);
    if (threadIdx.x % 4 == 0) {
      shared.factors[low_head()] = state.shrink[0];
      shared.factors[low_head() + 8] = state.shrink[1];
    }
    cuda::arrive_some(kWeightsReady, 2 * kGroupThreads);
    if (i + 1 < num_tiles) {
      ask_logits(i + 1, shared, dots, [&] {
        cuda::wgmma_wait<1>();  // for the values of this tile
        if (i + kStages < num_tiles) arrive_free<kBlocks>(shared.left_free[stage]);
      });
    }
    state.add_tile();
    cuda::wgmma_wait<0>();
    pin(values);
    pin(weights);
    cuda::wgmma_pin(dots);
  }
  cuda::sync_roles(kWeightsRead, 2 * kGroupThreads);
}

// Warpgroup 1.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void attend_right(int num_tiles, SharedMemory<kHeadDim>& shared,
                                             ValueSums& values) {
#pragma unroll 1
  for (int i = 0; i < num_tiles; ++i) {
    const int stage = i % kStages;
    Tile& tile = shared.tiles[stage];
    cuda::mbarrier_wait(shared.right_full[stage], i / kStages);
    cuda::sync_roles(kWeightsReady, 2 * kGroupThreads);
    cuda::shared_stores_before_wgmma();  // those of the weights, too
    shrink_values(shared.factors[low_head()], shared.factors[low_head() + 8], values);
    cuda::wgmma_fence();
    multiply_right(shared.weights, tile, values);
    cuda::wgmma_commit();
    cuda::wgmma_wait<0>();
    pin(values);
    if (i + kStages < num_tiles) arrive_free<kBlocks>(shared.right_free[stage]);
    cuda::arrive_some(kWeightsRead, 2 * kGroupThreads);
  }
}

// Computed where they are used: registers are few.
__device__ inline int64_t row_of_block(const Params& params) {
  return static_cast<uint32_t>(cuda::computed_here(static_cast<int>(blockIdx.x))) /
         params.head_groups;
}
__device__ inline int64_t first_head_of_block(const Params& params) {
  return static_cast<uint32_t>(cuda::computed_here(static_cast<int>(blockIdx.x))) %
         params.head_groups * kHeads;
}
__device__ inline Target target_of_block(const Params& params, const BlockRow& row) {
  return {params, row_of_block(params), blockIdx.y, first_head_of_block(params), row.is_result};
}

template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void init_barriers(SharedMemory<kHeadDim>& shared) {
  for (int stage = 0; stage < kStages; ++stage) {
    cuda::mbarrier_init(shared.left_full[stage], kKeyWarps);
    cuda::mbarrier_init(shared.right_full[stage], kKeyWarps);
    cuda::mbarrier_init(shared.left_free[stage], 4 * kBlocks);  // by the warps of a consumer
    cuda::mbarrier_init(shared.right_free[stage], 4 * kBlocks);
  }
  if constexpr (kBlocks > 1) cuda::show_barriers_to_cluster();
}

// The warpgroups that bring keys: they look up the row for all, because reads of memory one after
// the other lead to its keys.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void work_on_keys(const Params& params, SharedMemory<kHeadDim>& shared) {
  const bool leads = threadIdx.x == 2 * kGroupThreads;
  const int64_t t = row_of_block(params), part = blockIdx.y;
  if (leads) init_barriers<kHeadDim, kBlocks>(shared);
  const RowParts parts = params.parts(t);
  const bool is_result = parts.num_parts <= 1;
  // Tiles are few enough for an int.
  auto begin = static_cast<int>(is_result ? 0 : parts.first_block(part));
  auto end = static_cast<int>(is_result ? parts.num_blocks : parts.first_block(part + 1));
  // An empty row has no part; its first block writes the zeros.
  const bool has_part = part == 0 || part < parts.num_parts;
  if (!has_part) begin = end = 0;
  if (leads) shared.row = {has_part ? end - begin : -1, is_result};
  const auto meet = [] { meet_block<kBlocks>(); };
  if (begin < end) {
    bring_keys<kHeadDim, kBlocks>(params, ListedKeys{params.segments, parts, t}, begin, end, meet,
                                  shared);
  } else {
    meet();
  }
  if (shared.row.num_tiles >= 0) meet_other_block<kBlocks>();
}

// The warpgroups that use them.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void work_on_heads(const Params& params,
                                              SharedMemory<kHeadDim>& shared) {
  const int64_t first_head = first_head_of_block(params);
  const int64_t heads_left = params.outputs.num_heads - first_head;
  const int heads = static_cast<int>(heads_left < kHeads ? heads_left : kHeads);
  const int group = threadIdx.x / kGroupThreads;
  ask_queries(params.queries, row_of_block(params), first_head, heads, shared);
  prefetch_for_store(params, row_of_block(params), first_head, heads, shared);
  meet_block<kBlocks>();
  const BlockRow row = shared.row;
  if (row.num_tiles < 0) {
    cuda::wait_for_copies();
    return;
  }
  ValueSums values = {};
  if (group == 0) {
    cuda::take_registers<kLogitRegisters>();
    wait_for_queries();
    HeadState state;
    attend_left<kHeadDim, kBlocks>(params.scores, row.num_tiles, shared, values, state);
    store_heads(target_of_block(params, row), state, shared);
    cuda::give_registers<kValueRegisters>();
  } else {
    cuda::take_registers<kValueRegisters>();
    wait_for_queries();
    attend_right<kHeadDim, kBlocks>(row.num_tiles, shared, values);
  }
  meet_other_block<kBlocks>();
  cuda::sync_roles(kConsumers, 2 * kGroupThreads);
  // Once for both, for the sake of code that is fetched once.
  store_values(target_of_block(params, row), group * kHalfChannels, values, shared);
}

template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void attend_block(const Params& params, SharedMemory<kHeadDim>& shared) {
  cuda::let_next_launch_start();
  if (threadIdx.x / kGroupThreads >= 2) {
    cuda::give_registers<kKeyRegisters>();
    work_on_keys<kHeadDim, kBlocks>(params, shared);
  } else {
    work_on_heads<kHeadDim, kBlocks>(params, shared);
  }
}

// Without these instructions the body is empty; supports() refuses such devices.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#define FOVEA_SM90_BODY(...) __VA_ARGS__
#else
#define FOVEA_SM90_BODY(...)
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FOVEA_CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define FOVEA_CLUSTER_OF(blocks)
#endif

// A block that brings its rows alone, and two, with 64 heads of a row each, that share them.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ Params params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    attend_block<kHeadDim, 1>(params, *reinterpret_cast<SharedMemory<kHeadDim>*>(memory));
  })
}
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) FOVEA_CLUSTER_OF(2)
    attend_together(const __grid_constant__ Params params) {
  FOVEA_SM90_BODY({
    extern __shared__ __align__(1024) uint8_t memory[];
    attend_block<kHeadDim, 2>(params, *reinterpret_cast<SharedMemory<kHeadDim>*>(memory));
  })
}

#undef FOVEA_SM90_BODY
#undef FOVEA_CLUSTER_OF

}  // namespace fovea::internal::sparse_sm90
