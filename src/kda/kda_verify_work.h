#pragma once

#include <cstdint>

#include "src/core/access.h"
#include "src/core/workspace.h"
#include "src/kda/kda_chunk_scratch.h"
#include "src/kda/kda_inputs.h"
#include "src/kda/kda_state.h"
#include "src/kda/kda_verify_impl.h"

/// What kda_verify on the CPU works on, for every instruction set.
namespace fovea::internal {

/// State rows that a worker takes through all draft rows at a time.
inline constexpr int64_t kVerifyRows = 4;

/// Memory of one worker: the draft rows of one value head, and some state rows after each of them.
struct VerifyWork {
  int64_t padded;
  float* bias;       ///< [K]
  float* log_decay;  ///< [K]
  float* beta;       ///< [Td]
  float* query_key;  ///< [Td]
  float* decay;      ///< [Td][K]
  float* key;        ///< [Td][K]
  float* query;      ///< [Td][K], times scale
  float* nodes;      ///< [1 + Td][kVerifyRows][K]: committed rows, then the rows after each token

  VerifyWork(const KdaVerifyProblem& problem, WorkspaceCutter* cutter)
      : padded(kda_padded(problem.layer.head_dim_k)) {
    const int64_t rows = problem.rows_per_request;
    for (float** row : {&bias, &log_decay}) *row = cutter->take<float>(padded);
    for (float** row : {&beta, &query_key}) *row = cutter->take<float>(kda_padded(rows));
    for (float** block : {&decay, &key, &query}) *block = cutter->take<float>(rows * padded);
    nodes = cutter->take<float>((1 + rows) * kVerifyRows * padded);
  }

  float* node(int64_t index) const { return nodes + index * kVerifyRows * padded; }
};

struct VerifyCall {
  const KdaVerifyProblem& problem;
  const KdaLayer& layer;
  KdaInputs inputs;
  StateAccess states;
  StateRoutes routes;
  const int32_t* parent;
  VerifyScratch kept;
  Accessor<bf16_t, 3> out;
};

}  // namespace fovea::internal
