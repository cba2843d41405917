#pragma once

#include <array>
#include <cstdint>

#include "src/core/workspace.h"
#include "src/kda/kda_chunk_scratch.h"
#include "src/kda/kda_commit_impl.h"

/// What kda_commit on the CPU works on, for every instruction set.
namespace fovea::internal {

/// State rows that are rebuilt at a time: they share the loads of the keys.
inline constexpr int64_t kCommitRows = 4;

/// What a path of records contributes to a state.
struct CommitPath {
  float* keys;           ///< [Td][K] k_j exp(G_m - G_j), the last node first
  const float** values;  ///< [Td] u_j
  float* decay;          ///< [K] exp(G_m)
};

/// Memory of one worker. States that are copied need none.
struct CommitWork {
  int64_t padded;
  float* log_sum;    ///< [K]
  float* log_decay;  ///< [K]
  float* start;      ///< [kCommitRows][K] rows of S0
  float* rows;       ///< [kCommitRows][K] rows of S
  std::array<CommitPath, 2> paths;

  CommitWork(const KdaCommitProblem& problem, WorkspaceCutter* cutter)
      : padded(kda_padded(problem.head_dim_k)) {
    const int64_t nodes = problem.mode == VerifyMode::kRecords ? problem.rows_per_request : 0;
    for (float** row : {&log_sum, &log_decay}) *row = cutter->take<float>(padded);
    for (float** group : {&start, &rows}) *group = cutter->take<float>(kCommitRows * padded);
    for (CommitPath& path : paths) {
      path.keys = cutter->take<float>(nodes * padded);
      path.values = cutter->take<const float*>(nodes);
      path.decay = cutter->take<float>(padded);
    }
  }
};

}  // namespace fovea::internal
