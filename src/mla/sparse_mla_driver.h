#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fovea/sparse_mla.h"
#include "src/core/access.h"
#include "src/core/workspace.h"
#include "src/mla/sparse_mla_cache.h"
#include "src/mla/sparse_mla_parts.h"

/// What the SIMD implementations of sparse_mla share: the cut into tasks, the workspace, the order
/// of additions. A kernel supplies the arithmetic of one instruction set.
///
/// Every (row, head) is computed in the same way whatever runs beside it: each part of the row
/// (sparse_mla_parts.h) by itself, tile after tile with a running maximum, then the parts folded in
/// their order. Threads share out (row, head group) or (row, head group, part); that moves the
/// intermediate results, not a bit of them.
namespace fovea::internal {

/// Heads come in groups that a kernel treats together; padded to 8 with zero queries.
inline constexpr int64_t kHeadPadding = 8;
/// Largest group: its accumulators, 256 KiB, still share the second-level cache with the queries.
inline constexpr int64_t kMaxGroupHeads = 128;

inline int64_t padded_heads(int64_t heads) {
  return (heads + kHeadPadding - 1) / kHeadPadding * kHeadPadding;
}

/// Softmax state of the heads of a group, over a part or over the parts folded so far. `out` is the
/// sum of exp(s_j - max) * v_j.
struct HeadState {
  float* max;  // [heads], -inf: no key with any weight
  float* sum;  // [heads], of exp(s_j - max)
  float* out;  // [heads, 512]

  HeadState from_head(int64_t head) const {
    return {max + head, sum + head, out + head * kLatentDim};
  }
};

/// What a kernel sees of one (row, head group).
struct GroupShape {
  int64_t head_dim_qk;
  int64_t num_heads;  // real ones
  int64_t padded_heads;
  RowFormat row_format;
  RowFormat extra_row_format;
  float logit_scale;
  float logit_cap;
};

/// Memory of one worker.
struct SparseMlaScratch {
  void* query;     // in the kernel's own layout
  bf16_t* codes;   // [heads, 576], decoded e4m3 queries (f576)
  void* tile;      // decoded keys, likewise
  float* logits;   // [64, at most 32 heads]
  float* weights;  // [padded_heads / 4, 64, 4]: exp(s_j - max) of 4 heads at a time
  float* alpha;    // [padded_heads]: what a new maximum leaves of the old sums
  HeadState part;
  HeadState run;
  int64_t loaded_row;  // whose queries `query` holds; -1: nobody's
  int64_t loaded_head;
};

/// Results of one (row, head).
struct HeadOutput {
  bf16_t* out;
  float* lse;
  float* max_logit;   // may be null
  const float* sink;  // may be null
  float value_scale;  // k_scale
  EmptyLse empty_lse;
  const float* rotation = nullptr;  // cosines, then sines, of the last rope_dim channels
  int64_t rope_dim = 0;
};

struct SparseMlaKernel {
  size_t (*query_bytes)(int64_t head_dim_qk, int64_t padded_heads);
  size_t (*tile_bytes)();
  /// Brings the queries of `shape.padded_heads` heads into `query`; null: zeros.
  void (*load_query)(const GroupShape& shape, const bf16_t* const* heads, void* query);
  /// Adds the keys of a tile to `state`, which starts anew when `first`. `upcoming` is the next
  /// tile (maybe without keys): its rows are fetched from memory meanwhile.
  void (*attend_tile)(const SparseMlaKernel& kernel, const GroupShape& shape, const KeyTile& tile,
                      const KeyTile& upcoming, bool first, const SparseMlaScratch& scratch,
                      const HeadState& state);
  /// scratch.logits [num_keys, width] of the heads from `head` on (unscaled) become
  /// scratch.weights and scratch.alpha; updates max and sum of `state`. `width` is 8 or a multiple
  /// of 16.
  void (*softmax)(const GroupShape& shape, int64_t head, int64_t width, int64_t num_keys,
                  bool first, const SparseMlaScratch& scratch, const HeadState& state);
  /// One row as bf16 [head_dim_qk]; out is 64-byte aligned.
  void (*unpack_row)(RowFormat format, const LatentKey& key, int64_t head_dim_qk, bf16_t* out);
  /// run += part; `first`: run = part. `heads` is a multiple of 8.
  void (*fold)(int64_t heads, bool first, const HeadState& part, const HeadState& run);
  /// Output of one head from its sums.
  void (*finish)(const float* max, const float* sum, const float* values, const HeadOutput& output);
};

/// The kernel of the best instruction set that Highway dispatches to.
SparseMlaKernel sparse_mla_cpu_kernel();
/// The kernel with dot products of bf16; refuses where sparse_mla_cpu_avx512bf16_available() does.
SparseMlaKernel sparse_mla_cpu_avx512bf16_kernel();

/// Cuts the state of `heads` heads, and a worker's memory for groups of `heads` heads; null while
/// measuring.
HeadState cut_head_state(int64_t heads, WorkspaceCutter& cutter);
SparseMlaScratch cut_scratch(const SparseMlaKernel& kernel, int64_t head_dim_qk, bool has_codes,
                             int64_t heads, WorkspaceCutter& cutter);

/// Asks for the rows of the next tile while this one is computed, cache line by cache line: a core
/// has a few dozen miss buffers, and a burst that fills them stops the arithmetic too. A kernel
/// calls step() every few hundred cycles.
class Prefetcher {
 public:
  /// The lines are spread over `num_steps` steps.
  Prefetcher(const GroupShape& shape, const KeyTile& upcoming, int64_t num_steps)
      : upcoming_(upcoming),
        primary_bytes_(sparse_mla_row_bytes(shape.row_format, shape.head_dim_qk)),
        extra_bytes_(sparse_mla_row_bytes(shape.extra_row_format, shape.head_dim_qk)) {
    const int64_t num_extra = upcoming.num_keys - upcoming.num_primary;
    const int64_t num_lines = upcoming.num_primary * (primary_bytes_ / kLineBytes + 1) +
                              num_extra * (extra_bytes_ / kLineBytes + 1);
    lines_per_step_ = (num_lines + num_steps - 1) / std::max<int64_t>(1, num_steps);
  }

  [[gnu::always_inline]] inline void step() {
    for (int64_t i = 0; i < lines_per_step_; ++i) line();
  }

  /// Asks for what is left.
  void finish() {
    while (cursor_ < end_ || next_key_ < upcoming_.num_keys) line();
  }

 private:
  static constexpr int64_t kLineBytes = 64;

  [[gnu::always_inline]] inline void line() {
    if (cursor_ >= end_) {
      if (next_key_ >= upcoming_.num_keys) return;
      const auto row = reinterpret_cast<uintptr_t>(upcoming_.rows[next_key_]);
      cursor_ = row / kLineBytes * kLineBytes;
      end_ = row + static_cast<uintptr_t>(next_key_ < upcoming_.num_primary ? primary_bytes_
                                                                            : extra_bytes_);
      ++next_key_;
    }
    // Into the second-level cache: a tile is larger than the first.
    __builtin_prefetch(reinterpret_cast<const void*>(cursor_), 0, 2);  // NOLINT
    cursor_ += kLineBytes;
  }

  const KeyTile& upcoming_;
  int64_t primary_bytes_;
  int64_t extra_bytes_;
  int64_t lines_per_step_ = 0;
  int next_key_ = 0;
  uintptr_t cursor_ = 0;
  uintptr_t end_ = 0;
};

size_t sparse_mla_workspace(const SparseMlaKernel& kernel, const SparseMlaProblem& problem,
                            const Device& device);
void run_sparse_mla(const SparseMlaKernel& kernel, const SparseMlaProblem& problem,
                    const Device& device, const SparseMlaTensors& tensors, Workspace workspace);

}  // namespace fovea::internal
