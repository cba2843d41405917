#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "src/core/workspace.h"
#include "src/msa/msa_index_impl.h"

/// The selection of one row on the CPU.
namespace fovea::internal {

/// Memory of one worker, and the walk over the scores. The blocks that are not forced are one range
/// of consecutive ids, of which the best F = K - forced are kept.
class MsaRowSelector {
 public:
  MsaRowSelector(WorkspaceCutter& cutter, const MsaSelectBlocksProblem& problem)
      : problem_(problem),
        per_group_(problem.index_reduce == IndexReduce::kUnion
                       ? problem.num_heads / problem.num_kv_heads
                       : 1),
        ranks_(cutter.take<uint32_t>(kShortList)),
        free_(cutter.take<int32_t>(std::max(kShortList, problem.max_pages))),
        list_(cutter.take<int32_t>(per_group_ * problem.topk)),
        reduced_(cutter.take<float>(problem.index_reduce == IndexReduce::kMaxAll ? problem.max_pages
                                                                                 : 0)) {}

  /// Writes the lists of row t. scores[h * head_stride + n] is read only where own >= K.
  void select(const MsaRow& row, int64_t t, const float* scores, int64_t head_stride,
              const Accessor<int32_t, 3>& lists) {
    if (row.is_empty() || row.own < problem_.topk) {
      for (int64_t g = 0; g < problem_.num_kv_heads; ++g)
        write_identity(row, lists.row(g, t), lists);
      return;
    }
    if (problem_.index_reduce == IndexReduce::kMaxAll) {
      reduce(scores, head_stride, row.own);
      const int64_t count = choose(reduced_, row.own, list_);
      for (int64_t g = 0; g < problem_.num_kv_heads; ++g) write(count, lists.row(g, t), lists);
      return;
    }
    for (int64_t g = 0; g < problem_.num_kv_heads; ++g) {
      int64_t count = 0;
      for (int64_t i = 0; i < per_group_; ++i)
        count += choose(scores + (g * per_group_ + i) * head_stride, row.own, list_ + count);
      if (per_group_ > 1) {
        std::sort(list_, list_ + count);
        count = std::unique(list_, list_ + count) - list_;
      }
      write(count, lists.row(g, t), lists);
    }
  }

 private:
  // Up to this many kept blocks insertion into a sorted list is the fastest.
  static constexpr int64_t kShortList = 128;

  void write_identity(const MsaRow& row, int32_t* to, const Accessor<int32_t, 3>& lists) const {
    std::iota(to, to + row.own + 1, 0);
    std::fill(to + row.own + 1, to + lists.shape[2], -1);
  }

  void write(int64_t count, int32_t* to, const Accessor<int32_t, 3>& lists) const {
    std::copy(list_, list_ + count, to);
    std::fill(to + count, to + lists.shape[2], -1);
  }

  void reduce(const float* scores, int64_t head_stride, int64_t own) const {
    std::copy(scores, scores + own + 1, reduced_);
    for (int64_t h = 1; h < problem_.num_heads; ++h) {
      for (int64_t n = 0; n <= own; ++n) {
        const float other = scores[h * head_stride + n];
        if (msa_score_rank(other) > msa_score_rank(reduced_[n])) reduced_[n] = other;
      }
    }
  }

  // The K chosen blocks of a row with more candidates, ascending.
  int64_t choose(const float* scores, int64_t own, int32_t* list) const {
    const int64_t begin = problem_.init_blocks;
    const int64_t end = own + 1 - problem_.local_blocks;
    const int64_t count = problem_.topk - problem_.init_blocks - problem_.local_blocks;
    std::iota(list, list + begin, 0);
    if (count <= kShortList)
      keep_few(scores, begin, end, count);
    else
      keep_many(scores, begin, end, count);
    std::copy(free_, free_ + count, list + begin);
    std::sort(list + begin, list + begin + count);
    std::iota(list + begin + count, list + problem_.topk, static_cast<int32_t>(end));
    return problem_.topk;
  }

  // free_[0 .. count) = the best of [begin, end), which has more. A list sorted by rank; ids come
  // in ascending order, so that one of equal rank never displaces another.
  void keep_few(const float* scores, int64_t begin, int64_t end, int64_t count) const {
    if (count == 0) return;
    int64_t kept = 0;
    for (int64_t n = begin; n < end; ++n) {
      const uint32_t rank = msa_score_rank(scores[n]);
      if (kept == count) {
        if (rank <= ranks_[count - 1]) continue;
        --kept;
      }
      int64_t i = kept++;
      for (; i > 0 && ranks_[i - 1] < rank; --i) {
        ranks_[i] = ranks_[i - 1];
        free_[i] = free_[i - 1];
      }
      ranks_[i] = rank;
      free_[i] = static_cast<int32_t>(n);
    }
  }

  void keep_many(const float* scores, int64_t begin, int64_t end, int64_t count) const {
    std::iota(free_, free_ + (end - begin), static_cast<int32_t>(begin));
    std::nth_element(free_, free_ + count, free_ + (end - begin), [scores](int32_t a, int32_t b) {
      const uint32_t rank_a = msa_score_rank(scores[a]);
      const uint32_t rank_b = msa_score_rank(scores[b]);
      return rank_a != rank_b ? rank_a > rank_b : a < b;
    });
  }

  const MsaSelectBlocksProblem& problem_;
  int64_t per_group_;
  uint32_t* ranks_;
  int32_t* free_;
  int32_t* list_;
  float* reduced_;
};

}  // namespace fovea::internal
