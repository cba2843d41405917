#pragma once

#include <cstdint>
#include <limits>

#include "src/kda/cuda/kda_sequences.cuh"

/// Where kernels read and write states.
namespace fovea::internal::cuda {

// Whether four channels of K are one aligned word.
__device__ inline bool holds_words(const StateAccess& access, const void* at) {
  const uintptr_t bytes = access.is_bf16 ? 8 : 16;
  return access.k_stride == 1 && reinterpret_cast<uintptr_t>(at) % bytes == 0;
}

/// Channels k .. k + 3 of row v.
__device__ inline float4 load_state4(const StateAccess& access, int64_t entry, int hv, int v,
                                     int k) {
  const int64_t at = access.offset(entry, hv, v, k);
  if (access.is_bf16) {
    const bf16_t* const from = static_cast<const bf16_t*>(access.data) + at;
    if (holds_words(access, from)) {
      const uint2 word = *reinterpret_cast<const uint2*>(from);
      return make_float4(__uint_as_float(word.x << 16), __uint_as_float(word.x & 0xFFFF0000),
                         __uint_as_float(word.y << 16), __uint_as_float(word.y & 0xFFFF0000));
    }
  } else {
    const float* const from = static_cast<const float*>(access.data) + at;
    if (holds_words(access, from)) return *reinterpret_cast<const float4*>(from);
  }
  return make_float4(access.load(entry, hv, v, k), access.load(entry, hv, v, k + 1),
                     access.load(entry, hv, v, k + 2), access.load(entry, hv, v, k + 3));
}

__device__ inline void store_state4(const float4& word, const StateAccess& access, int64_t entry,
                                    int hv, int v, int k) {
  const int64_t at = access.offset(entry, hv, v, k);
  if (access.is_bf16) {
    bf16_t* const to = static_cast<bf16_t*>(access.data) + at;
    if (holds_words(access, to)) {
      const uint32_t low =
          bf16_from_float(word.x).bits | static_cast<uint32_t>(bf16_from_float(word.y).bits) << 16;
      const uint32_t high =
          bf16_from_float(word.z).bits | static_cast<uint32_t>(bf16_from_float(word.w).bits) << 16;
      *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
      return;
    }
  } else {
    float* const to = static_cast<float*>(access.data) + at;
    if (holds_words(access, to)) {
      *reinterpret_cast<float4*>(to) = word;
      return;
    }
  }
  access.store(entry, hv, v, k, word.x);
  access.store(entry, hv, v, k + 1, word.y);
  access.store(entry, hv, v, k + 2, word.z);
  access.store(entry, hv, v, k + 3, word.w);
}

/// The device's form of PrefillStates: final states and snapshots of a prefill, in the pool or in
/// the staging area (final states first, then snapshots).
struct PrefillTargets {
  StateAccess states;
  StateAccess staged;  // no data: written directly
  StateAccess chunk_states;
  StateRoutes routes;
  SnapshotList snapshots;
  int64_t interval = 64;
  int64_t num_sequences = 0;

  __device__ const StateAccess& written() const { return staged.data != nullptr ? staged : states; }
  /// Pool entry of the final state of a sequence of `length` rows; -1: none.
  __device__ int64_t final_slot(int64_t n, int64_t length) const {
    return length == 0 && routes.in_place(n) ? -1 : routes.finish(n);
  }
  /// Pool entry of snapshot m of a sequence of `length` rows; -1: none.
  __device__ int64_t snapshot_slot(int64_t m, int64_t length) const {
    const int32_t slot = snapshots.slot[m];
    const bool legal = snapshot_is_legal(snapshots.position[m], length, interval);
    return legal && slot >= 0 && slot < states.entries ? slot : -1;
  }
  /// The same as entries of written().
  __device__ int64_t final_entry(int64_t n, int64_t length) const {
    const int64_t slot = final_slot(n, length);
    return slot >= 0 && staged.data != nullptr ? n : slot;
  }
  __device__ int64_t snapshot_entry(int64_t m, int64_t length) const {
    const int64_t slot = snapshot_slot(m, length);
    return slot >= 0 && staged.data != nullptr ? num_sequences + m : slot;
  }
};

/// Finds the snapshots of a sequence n as a chain over its rows passes them. A call may list
/// hundreds, most of other sequences or later rows: a position where none is due costs one
/// comparison. Whole warps call it.
class SnapshotCursor {
 public:
  __device__ SnapshotCursor(const SnapshotList& snapshots, int n, bool any)
      : snapshots_(snapshots) {
    if (any) advance(n, -1);
  }

  __device__ int64_t end() const { return snapshots_.count; }
  __device__ bool is_due(int position) const { return next_ <= position; }
  /// The first snapshot of `position` from entry m on; end() when there is none.
  __device__ int64_t find(int n, int64_t m, int position) const {
    if (!is_due(position)) return end();
    for (int64_t base = m; base < end(); base += kWarpThreads) {
      const int64_t own = base + threadIdx.x % kWarpThreads;
      const unsigned found =
          __ballot_sync(0xFFFFFFFF, own < end() && snapshots_.sequence[own] == n &&
                                        snapshots_.position[own] == position);
      if (found != 0) return base + __ffs(static_cast<int>(found)) - 1;
    }
    return end();
  }
  /// Goes on behind `position`.
  __device__ void advance(int n, int position) {
    int32_t least = kNone;
    for (int64_t m = threadIdx.x % kWarpThreads; m < end(); m += kWarpThreads) {
      const int32_t p = snapshots_.position[m];
      if (snapshots_.sequence[m] == n && p > position) least = min(least, p);
    }
    next_ = __reduce_min_sync(0xFFFFFFFF, least);
  }

 private:
  static constexpr int32_t kNone = std::numeric_limits<int32_t>::max();

  const SnapshotList& snapshots_;
  int32_t next_ = kNone;
};

struct CommitParams {
  PrefillTargets targets;
  SequenceTable table;
  int64_t head_elements;  // V * K
  int head_dim_k;
};

inline constexpr int kCommitThreads = 256;

/// Copies what is staged into the pool, byte for byte; a block per staged state and value head.
static __global__ void __launch_bounds__(kCommitThreads)
    commit_states(const __grid_constant__ CommitParams params) {
  if (params.table.is_refused()) return;
  const PrefillTargets& targets = params.targets;
  const int64_t staged = blockIdx.x;
  const int hv = static_cast<int>(blockIdx.y);
  int64_t slot = -1;
  if (staged < targets.num_sequences) {
    const int64_t length = params.table.offsets[staged + 1] - params.table.offsets[staged];
    slot = targets.final_slot(staged, length);
  } else {
    const int64_t m = staged - targets.num_sequences;
    const int32_t n = targets.snapshots.sequence[m];
    if (n < 0 || n >= targets.num_sequences) return;
    slot = targets.snapshot_slot(m, params.table.offsets[n + 1] - params.table.offsets[n]);
  }
  if (slot < 0) return;
  for (int64_t i = threadIdx.x; i < params.head_elements; i += kCommitThreads) {
    const auto v = static_cast<int>(i / params.head_dim_k),
               k = static_cast<int>(i % params.head_dim_k);
    // A bf16 value survives the way through fp32.
    targets.states.store(slot, hv, v, k, targets.staged.load(staged, hv, v, k));
  }
}

}  // namespace fovea::internal::cuda
