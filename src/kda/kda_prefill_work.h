#pragma once

#include <algorithm>
#include <cstdint>

#include "src/core/workspace.h"
#include "src/kda/kda_prefill_impl.h"

/// How the vector implementation of kda_prefill cuts a call into pieces of work.
namespace fovea::internal {

/// Rows of the chunks that are computed together.
inline int64_t kda_chunk_of(const KdaPrefillProblem& problem) {
  constexpr int64_t kBestChunk = 16;  // docs/perf/kda.md
  return problem.chunk == 0 ? kBestChunk : problem.chunk;
}

/// One sequence of the call.
struct KdaSequence {
  int64_t index;
  SequenceRows rows;
  int64_t first_chunk;  ///< its first entry of chunk_states
};

/// The sequences, longest first, and the snapshots of each in order of position.
class KdaPrefillWork {
 public:
  KdaPrefillWork(WorkspaceCutter& cutter, const KdaPrefillProblem& problem)
      : sequences_(cutter.take<KdaSequence>(problem.max_sequences)),
        snapshots_(cutter.take<int32_t>(problem.max_snapshots)) {}

  void fill(const KdaPrefillProblem& problem, const KdaPrefillTensors& tensors) {
    const PackedOffsets offsets(tensors.q_indptr, tensors.q.shape[0]);
    const int64_t interval = snapshot_interval(problem.chunk);
    SequenceReader reader(offsets);
    int64_t chunks = 0;
    count_ = offsets.sequences;
    for (int64_t n = 0; n < count_; ++n) {
      sequences_[n] = {n, reader.next(), chunks};
      chunks += (sequences_[n].rows.length() + interval - 1) / interval;
    }
    std::sort(sequences_, sequences_ + count_, [](const KdaSequence& a, const KdaSequence& b) {
      const int64_t length_a = a.rows.length(), length_b = b.rows.length();
      return length_a != length_b ? length_a > length_b : a.index < b.index;
    });
    if (!tensors.snapshot_seq.defined()) return;
    num_snapshots_ = tensors.snapshot_seq.shape[0];
    snapshot_seq_ = static_cast<const int32_t*>(tensors.snapshot_seq.data);
    snapshot_pos_ = static_cast<const int32_t*>(tensors.snapshot_pos.data);
    for (int64_t m = 0; m < num_snapshots_; ++m) snapshots_[m] = static_cast<int32_t>(m);
    std::sort(snapshots_, snapshots_ + num_snapshots_, [this](int32_t a, int32_t b) {
      if (snapshot_seq_[a] != snapshot_seq_[b]) return snapshot_seq_[a] < snapshot_seq_[b];
      if (snapshot_pos_[a] != snapshot_pos_[b]) return snapshot_pos_[a] < snapshot_pos_[b];
      return a < b;
    });
  }

  int64_t num_sequences() const { return count_; }
  const KdaSequence& sequence(int64_t i) const { return sequences_[i]; }

  /// The snapshots of one sequence, for positions that only rise.
  class Snapshots {
   public:
    Snapshots(const KdaPrefillWork& work, int64_t sequence) : work_(work), sequence_(sequence) {
      next_ = std::lower_bound(
          work.snapshots_, work.snapshots_ + work.num_snapshots_, sequence,
          [&](int32_t m, int64_t n) { return int64_t{work.snapshot_seq_[m]} < n; });
    }

    /// Calls `found` with each snapshot at position p.
    template <class Found>
    void at(int64_t p, Found&& found) {
      for (; next_ != work_.snapshots_ + work_.num_snapshots_ &&
             work_.snapshot_seq_[*next_] == sequence_ && work_.snapshot_pos_[*next_] <= p;
           ++next_) {
        if (work_.snapshot_pos_[*next_] == p) found(*next_);
      }
    }

   private:
    const KdaPrefillWork& work_;
    int64_t sequence_;
    const int32_t* next_;
  };

 private:
  KdaSequence* sequences_;
  int32_t* snapshots_;
  int64_t count_ = 0;
  int64_t num_snapshots_ = 0;
  const int32_t* snapshot_seq_ = nullptr;
  const int32_t* snapshot_pos_ = nullptr;
};

/// State rows of one piece: V is cut when there are too few sequences and heads for the threads.
/// Any cut gives the same bits.
inline int64_t kda_rows_per_piece(int64_t head_dim_v, int64_t heads_in_all, int num_threads) {
  // Each piece prepares its chunks anew, which costs as much as a third of 64 rows.
  constexpr int64_t kFewestRows = 32;
  int64_t rows = (head_dim_v + 3) / 4 * 4;
  while (rows > kFewestRows &&
         heads_in_all * ((head_dim_v + rows - 1) / rows) < 2 * int64_t{num_threads}) {
    rows = (rows / 2 + 3) / 4 * 4;
  }
  return std::min(rows, head_dim_v);
}

}  // namespace fovea::internal
