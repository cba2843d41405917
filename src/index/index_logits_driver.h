#pragma once

#include <algorithm>
#include <limits>
#include <span>

#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "src/index/index_logits_work.h"

/// The loops around the vector kernels of index_logits.
///
/// A kernel is a type with
///
///   Word             what a channel, or a pair of channels, of one head or key is decoded to
///   kKeyTile         keys that it scores at once
///   kHeadBlock       heads that stand side by side in decoded queries
///   steps(dims)      words of one decoded head or key, rounded up for decode_*
///   decode_heads(rows, dims, out, nan), decode_keys(rows, dims, out, nan)
///                    out[step][kHeadBlock or kKeyTile] from that many rows of codes; nan[i] is
///                    non-zero when row i has a NaN code, whose decoded value is finite
///   score(q, k, dims, num_heads, weight, scale, logits)
///                    logits[kKeyTile] = scale * sum_h weight[h] * max(0, <q[h], k>) with
///                    q[num_heads / kHeadBlock, rounded up][step][kHeadBlock], k[step][kKeyTile]
///
/// Each logit of a tile must depend on its own key and query only.
namespace fovea::internal {

/// Every kernel's head block divides it.
inline constexpr int64_t kMaxHeadBlock = 16;

/// Scratch memory of one worker. Its size is that of the widest vectors, so that a plan outlives a
/// change of the instruction set in use.
template <class Kernel>
struct LogitsScratch {
  using Word = typename Kernel::Word;

  int64_t steps;
  int64_t padded_heads;
  int64_t max_rows;         ///< Of a group.
  Word* q = nullptr;        ///< [max_rows][padded_heads / kHeadBlock][steps][kHeadBlock]
  float* weight = nullptr;  ///< [max_rows][padded_heads]
  Word* k = nullptr;        ///< [steps][kKeyTile]

  explicit LogitsScratch(const IndexLogitsProblem& problem)
      : steps(Kernel::steps(problem.head_dim)),
        padded_heads((problem.num_heads + kMaxHeadBlock - 1) / kMaxHeadBlock * kMaxHeadBlock),
        max_rows(std::clamp<int64_t>(kQueryBytes / query_bytes(), 1, kMaxRows)) {}

  void take(WorkspaceCutter& cutter) {
    q = cutter.take<Word>(max_rows * padded_heads * steps);
    weight = cutter.take<float>(max_rows * padded_heads);
    k = cutter.take<Word>(steps * kMaxKeyTile);
  }

 private:
  // A group's queries should stay in the L2 cache while key tiles pass; with 8 rows the decoding of
  // keys costs less than 1 %.
  static constexpr int64_t kQueryBytes = 256 << 10;
  static constexpr int64_t kMaxRows = 8;

  int64_t query_bytes() const { return padded_heads * steps * static_cast<int64_t>(sizeof(Word)); }
};

/// One run of the operator.
template <class Kernel>
class LogitsScorer {
 public:
  using Scratch = LogitsScratch<Kernel>;

  LogitsScorer(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors,
               const LogitsWork& work)
      : head_dim_(problem.head_dim),
        num_heads_(problem.num_heads),
        work_(work),
        q_fp8_(access<const uint8_t, 3>(tensors.q_fp8)),
        head_weight_(access<const float, 2>(tensors.head_weight)),
        logits_(access<float, 2>(tensors.logits)) {}

  void score(const LogitsUnit& unit, const Scratch& scratch) const {
    const RowGroup& group = *unit.group;
    const int64_t request = work_.window(group.first_row).request;
    for (int64_t i = 0; i < group.num_rows; ++i) {
      const KeyWindow window = work_.window(group.first_row + i);
      if (std::max(window.begin, unit.key_begin) < std::min(window.end, unit.key_end)) {
        decode_query(group.first_row + i, i, scratch);
      }
    }
    KeyTile tiles[2];
    const auto locate = [&](int64_t first, KeyTile* tile) {
      work_.locate(request, first, std::min(Kernel::kKeyTile, unit.key_end - first),
                   Kernel::kKeyTile, q_fp8_.row(group.first_row, 0), tile);
    };
    locate(unit.key_begin, &tiles[0]);
    int parity = 0;
    for (int64_t first = unit.key_begin; first < unit.key_end; first += Kernel::kKeyTile) {
      KeyTile& tile = tiles[parity];
      parity ^= 1;
      decode_keys(scratch, &tile);
      const int64_t next = first + Kernel::kKeyTile;
      if (next < unit.key_end) {
        locate(next, &tiles[parity]);
        prefetch(tiles[parity]);
      }
      score_rows(group, first, std::min(next, unit.key_end), tile, scratch);
    }
  }

 private:
  // The next tile's codes come from the third-level cache or from memory while this tile is scored.
  void prefetch(const KeyTile& tile) const {
    for (const uint8_t* codes : std::span(tile.codes, Kernel::kKeyTile)) {
      for (int64_t byte = 0; byte < head_dim_; byte += 64) __builtin_prefetch(codes + byte, 0, 2);
    }
  }

  // Row t becomes row i of the scratch. Heads past the last one have weight 0; a head with a NaN
  // code has weight NaN, which is what its dot products would give.
  void decode_query(int64_t t, int64_t i, const Scratch& scratch) const {
    auto* q = scratch.q + i * scratch.padded_heads * scratch.steps;
    float* weight = scratch.weight + i * scratch.padded_heads;
    for (int64_t first = 0; first < num_heads_; first += Kernel::kHeadBlock) {
      const uint8_t* rows[Kernel::kHeadBlock];
      uint32_t nan[Kernel::kHeadBlock];
      for (int64_t h = first; h < first + Kernel::kHeadBlock; ++h) {
        rows[h - first] = q_fp8_.row(t, h < num_heads_ ? h : 0);
      }
      Kernel::decode_heads(rows, head_dim_, q + first * scratch.steps, nan);
      for (int64_t h = first; h < first + Kernel::kHeadBlock; ++h) {
        weight[h] = h >= num_heads_       ? 0.0f
                    : nan[h - first] != 0 ? std::numeric_limits<float>::quiet_NaN()
                                          : head_weight_(t, h);
      }
    }
  }

  // A key with a NaN code gets the scale NaN, which is what its dot products would give.
  void decode_keys(const Scratch& scratch, KeyTile* tile) const {
    uint32_t nan[Kernel::kKeyTile];
    Kernel::decode_keys(tile->codes, head_dim_, scratch.k, nan);
    for (int64_t j = 0; j < Kernel::kKeyTile; ++j) {
      if (nan[j] != 0) tile->scale[j] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  // Keys [first, end) of the tile for the rows of a group that score them.
  void score_rows(const RowGroup& group, int64_t first, int64_t end, const KeyTile& tile,
                  const Scratch& scratch) const {
    for (int64_t i = 0; i < group.num_rows; ++i) {
      const KeyWindow window = work_.window(group.first_row + i);
      const int64_t row_begin = std::max(window.begin, first);
      const int64_t row_end = std::min(window.end, end);
      if (row_begin >= row_end) continue;
      float* to = logits_.row(group.first_row + i) + (row_begin - window.begin);
      score_tile(i, row_begin - first, row_end - first, tile, scratch, to);
    }
  }

  // Keys [begin, end) of the tile for row i of the scratch.
  void score_tile(int64_t i, int64_t begin, int64_t end, const KeyTile& tile,
                  const Scratch& scratch, float* to) const {
    alignas(64) float logits[Kernel::kKeyTile];
    Kernel::score(scratch.q + i * scratch.padded_heads * scratch.steps, scratch.k, head_dim_,
                  num_heads_, scratch.weight + i * scratch.padded_heads, tile.scale, logits);
    std::copy(logits + begin, logits + end, to);
    if (tile.all_held) return;
    for (int64_t j = begin; j < end; ++j) {
      if (!tile.held[j]) to[j - begin] = -std::numeric_limits<float>::infinity();
    }
  }

  int64_t head_dim_;
  int64_t num_heads_;
  const LogitsWork& work_;
  Accessor<const uint8_t, 3> q_fp8_;
  Accessor<const float, 2> head_weight_;
  Accessor<float, 2> logits_;
};

template <class Kernel>
size_t logits_workspace_bytes(const IndexLogitsProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  cutter.take<RowGroup>(problem.max_rows);
  for (int worker = 0; worker < device.num_threads; ++worker) {
    LogitsScratch<Kernel>(problem).take(cutter);
  }
  return cutter.used_bytes();
}

template <class Kernel>
void run_logits(const IndexLogitsProblem& problem, const Device& device,
                const IndexLogitsTensors& tensors, Workspace workspace) {
  static_assert(kMaxKeyTile % Kernel::kKeyTile == 0 && kMaxHeadBlock % Kernel::kHeadBlock == 0);
  WorkspaceCutter cutter(workspace);
  auto* groups = cutter.take<RowGroup>(problem.max_rows);
  const LogitsWork work(problem, tensors, LogitsScratch<Kernel>(problem).max_rows, groups);
  const LogitsScorer<Kernel> scorer(problem, tensors, work);
  const ThreadScope threads(device.num_threads);
  ParallelFor(work.num_units(), 1, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter rest = cutter;
    LogitsScratch<Kernel> scratch(problem);
    for (int i = 0; i <= worker; ++i) scratch.take(rest);
    for (int64_t i = begin; i < end; ++i) scorer.score(work.unit(i), scratch);
  });
}

}  // namespace fovea::internal
