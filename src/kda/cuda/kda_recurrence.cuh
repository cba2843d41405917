#pragma once

#include <cstdint>

#include "src/kda/cuda/kda_chain.cuh"
#include "src/kda/cuda/warp_sums.cuh"

/// A prefill token by token, for shapes that have no tiles: any K and V up to 256.
namespace fovea::internal::cuda {

inline constexpr int kRecurrenceWarps = 4;
inline constexpr int kRecurrenceRows = 4;  // of V, of a warp
inline constexpr int kMaxLaneChannels = 8;

struct RecurrenceParams {
  ChainParams chain;  // `slices` blocks share the rows of V
  int head_dim_k, head_dim_v;
};

/// A warp per sequence, value head and kRecurrenceRows rows of V; its lanes share the channels of
/// K.
static __global__ void __launch_bounds__(kRecurrenceWarps* kWarpThreads)
    recur(const __grid_constant__ RecurrenceParams params) {
  const ChainParams& chain = params.chain;
  if (chain.table.is_refused()) return;
  const KdaInput& input = chain.input;
  const PrefillTargets& targets = chain.targets;
  const auto per_sequence = static_cast<uint32_t>(input.value_heads * chain.slices);
  const int n = chain.table.order[blockIdx.x / per_sequence];
  const int hv = static_cast<int>(blockIdx.x % per_sequence) / chain.slices;
  const int slice = static_cast<int>(blockIdx.x % per_sequence) % chain.slices;
  const int lane = threadIdx.x % kWarpThreads;
  const int v0 =
      (slice * kRecurrenceWarps + static_cast<int>(threadIdx.x) / kWarpThreads) * kRecurrenceRows;
  if (v0 >= params.head_dim_v) return;
  const int head = hv / input.heads_per_key;
  const int64_t begin = chain.table.offsets[n];
  const int length = static_cast<int>(chain.table.offsets[n + 1] - begin);
  const float rate = input.rate(hv);
  float state[kRecurrenceRows][kMaxLaneChannels];
  const auto for_state = [&](auto each) {
#pragma unroll
    for (int r = 0; r < kRecurrenceRows; ++r) {
#pragma unroll
      for (int i = 0; i < kMaxLaneChannels; ++i) {
        const int c = lane + i * kWarpThreads;
        if (v0 + r < params.head_dim_v && c < params.head_dim_k) each(r, i, v0 + r, c);
      }
    }
  };
  const int64_t start = targets.routes.start(n);
#pragma unroll
  for (int r = 0; r < kRecurrenceRows; ++r) {
#pragma unroll
    for (int i = 0; i < kMaxLaneChannels; ++i) state[r][i] = 0;
  }
  if (start >= 0) {
    for_state(
        [&](int r, int i, int v, int c) { state[r][i] = targets.states.load(start, hv, v, c); });
  }
  SnapshotCursor snapshots(targets.snapshots, n, chain.table.snapshots[n] > 0);
#pragma unroll 1
  for (int position = 0;; ++position) {
    for (int64_t m = -2; m < snapshots.end();
         m = m < -1 ? m + 1 : snapshots.find(n, m + 1, position)) {
      const auto [access, entry] = target_at(chain, n, length, position, m);
      if (entry < 0) continue;
      for_state([&](int r, int i, int v, int c) { access.store(entry, hv, v, c, state[r][i]); });
    }
    if (snapshots.is_due(position)) snapshots.advance(n, position);
    if (position == length) break;
    const int64_t t = begin + position;
    float k[kMaxLaneChannels], q[kMaxLaneChannels];
    float k_squares = 0, q_squares = 0, dot = 0;
#pragma unroll
    for (int i = 0; i < kMaxLaneChannels; ++i) {
      const int c = lane + i * kWarpThreads;
      const bool used = c < params.head_dim_k;
      k[i] = used ? bf16_to_float(input.k(t, head, c)) : 0.0f;
      q[i] = used ? bf16_to_float(input.q(t, head, c)) : 0.0f;
      const float decay =
          used ? exp2_fast(input.log2_decay(input.load_gate(t, hv, c), input.bias(hv, c), rate))
               : 0.0f;
#pragma unroll
      for (int r = 0; r < kRecurrenceRows; ++r) state[r][i] *= decay;
      k_squares = fmaf(k[i], k[i], k_squares);
      q_squares = fmaf(q[i], q[i], q_squares);
      dot = fmaf(q[i], k[i], dot);
    }
    float k_factor = 1, q_factor = input.scale;
    if (input.normalise) {
      k_factor = kda_inverse_norm(warp_sum(k_squares));
      q_factor *= kda_inverse_norm(warp_sum(q_squares));
    }
    dot = warp_sum(dot) * k_factor * q_factor;
    const float beta = input.load_beta(t, hv);
#pragma unroll
    for (int r = 0; r < kRecurrenceRows; ++r) {
      float seen = 0, read = 0;
#pragma unroll
      for (int i = 0; i < kMaxLaneChannels; ++i) {
        seen = fmaf(state[r][i], k[i], seen);
        read = fmaf(state[r][i], q[i], read);
      }
      seen = warp_sum(seen) * k_factor;
      read = warp_sum(read) * q_factor;
      if (v0 + r >= params.head_dim_v) continue;
      const float u = beta * (bf16_to_float(input.v(t, hv, v0 + r)) - seen);
#pragma unroll
      for (int i = 0; i < kMaxLaneChannels; ++i) {
        state[r][i] = fmaf(k[i] * k_factor, u, state[r][i]);
      }
      if (lane == 0) chain.out(t, hv, v0 + r) = bf16_from_float(fmaf(dot, u, read));
    }
  }
}

}  // namespace fovea::internal::cuda
