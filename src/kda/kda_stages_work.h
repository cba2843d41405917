#pragma once

#include <cstdint>

#include "fovea/kda_stages.h"
#include "src/core/workspace.h"
#include "src/kda/kda_chunk_scratch.h"
#include "src/kda/kda_stages_impl.h"

/// How the vector implementations of the stages cut a call into pieces of work, and the memory of
/// one worker.
namespace fovea::internal {

/// The chunks of the call, in workspace memory.
class StageChunkList {
 public:
  static StageChunk* take(const KdaStageProblem& problem, WorkspaceCutter* cutter) {
    // A sequence of len rows has at most len / C + 1 chunks.
    return cutter->take<StageChunk>(problem.max_rows / problem.chunk + problem.max_sequences);
  }
  StageChunkList(const KdaStageProblem& problem, const PackedOffsets& offsets,
                 WorkspaceCutter* cutter)
      : chunks_(take(problem, cutter)) {
    for_each_chunk(offsets, problem.chunk,
                   [&](const StageChunk& chunk) { chunks_[count_++] = chunk; });
  }
  int64_t count() const { return count_; }
  const StageChunk& operator[](int64_t i) const { return chunks_[i]; }

 private:
  StageChunk* chunks_;
  int64_t count_ = 0;
};

/// The sequences of the call, in workspace memory.
class StageSequenceList {
 public:
  struct Sequence {
    SequenceRows rows;
    int64_t first_chunk;
  };
  static Sequence* take(const KdaStageProblem& problem, WorkspaceCutter* cutter) {
    return cutter->take<Sequence>(problem.max_sequences);
  }
  StageSequenceList(const KdaStageProblem& problem, const PackedOffsets& offsets,
                    WorkspaceCutter* cutter)
      : sequences_(take(problem, cutter)) {
    SequenceReader reader(offsets);
    int64_t chunks = 0;
    for (int64_t n = 0; n < offsets.sequences; ++n) {
      sequences_[n] = {reader.next(), chunks};
      chunks += (sequences_[n].rows.length() + problem.chunk - 1) / problem.chunk;
    }
  }
  const Sequence& operator[](int64_t n) const { return sequences_[n]; }

 private:
  Sequence* sequences_;
};

/// Padded widths of rows over K, V and C.
struct StageWidths {
  int64_t c, k, v;
  explicit StageWidths(const KdaStageProblem& problem)
      : c(kda_padded(problem.chunk)),
        k(kda_padded(problem.layer.head_dim_k)),
        v(kda_padded(problem.layer.head_dim_v)) {}
};

struct StageIntraScratch {
  float *key, *query, *g_sum, *column;  // [C][K]
  float* value;                         // [C][V]
  float *a, *p, *x;                     // [C][C]; rows of x are padded
  float *beta, *row_key, *row_query;    // [C], [K], [K]
  float* row_value;                     // [V]

  StageIntraScratch(const KdaStageProblem& problem, WorkspaceCutter* cutter) {
    const StageWidths width(problem);
    for (float** rows : {&key, &query, &g_sum, &column}) {
      *rows = cutter->take<float>(problem.chunk * width.k);
    }
    value = cutter->take<float>(problem.chunk * width.v);
    for (float** square : {&a, &p, &x}) *square = cutter->take<float>(problem.chunk * width.c);
    beta = cutter->take<float>(width.c);
    for (float** row : {&row_key, &row_query}) *row = cutter->take<float>(width.k);
    row_value = cutter->take<float>(width.v);
  }
};

/// Columns of V in one piece of the chain.
inline constexpr int64_t kStageStateRows = 32;

struct StageInterScratch {
  float *w, *kr;  // [C][K]
  float* u;       // [C][kStageStateRows]
  float* state;   // [kStageStateRows][K]
  float* decay;   // [K]

  StageInterScratch(const KdaStageProblem& problem, WorkspaceCutter* cutter) {
    const StageWidths width(problem);
    for (float** rows : {&w, &kr}) *rows = cutter->take<float>(problem.chunk * width.k);
    u = cutter->take<float>(problem.chunk * kStageStateRows);
    state = cutter->take<float>(kStageStateRows * width.k);
    decay = cutter->take<float>(width.k);
  }
};

struct StageOutputScratch {
  float* query;    // [C][K]
  float *u, *out;  // [C][V]
  float* row;      // [max(K, C)]

  StageOutputScratch(const KdaStageProblem& problem, WorkspaceCutter* cutter) {
    const StageWidths width(problem);
    query = cutter->take<float>(problem.chunk * width.k);
    for (float** rows : {&u, &out}) *rows = cutter->take<float>(problem.chunk * width.v);
    row = cutter->take<float>(std::max(width.k, width.c));
  }
};

/// The scratch memory of every worker, behind what `cutter` has taken of the workspace.
template <class Scratch>
class StageWorkers {
 public:
  static int64_t bytes_each(const KdaStageProblem& problem) {
    WorkspaceCutter cutter({});
    Scratch(problem, &cutter);
    return static_cast<int64_t>(cutter.used_bytes());
  }
  StageWorkers(const KdaStageProblem& problem, Workspace workspace, const WorkspaceCutter& cutter)
      : problem_(problem),
        memory_(static_cast<char*>(workspace.data) + cutter.used_bytes()),
        bytes_(bytes_each(problem)) {}

  Scratch scratch(int worker) const {
    WorkspaceCutter mine({memory_ + worker * bytes_, 0});
    return Scratch(problem_, &mine);
  }

 private:
  const KdaStageProblem& problem_;
  char* memory_;
  int64_t bytes_;
};

}  // namespace fovea::internal
