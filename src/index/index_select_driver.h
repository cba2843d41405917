#pragma once

#include "fovea/index_logits.h"
#include "fovea/index_select.h"
#include "fovea/topk_select.h"
#include "src/core/implementation_list.h"

/// The driver of index_select: chunks of rows through an implementation of index_logits, then one
/// of topk_select.
namespace fovea::internal {

/// The two implementations that one of index_select is made of. A null workspace function: none
/// needed.
struct IndexSelectParts {
  RunFunction<IndexLogitsProblem, IndexLogitsTensors> logits;
  size_t (*logits_workspace)(const IndexLogitsProblem& problem, const Device& device);
  RunFunction<TopkSelectProblem, TopkSelectTensors> topk;
  size_t (*topk_workspace)(const TopkSelectProblem& problem, const Device& device);
};

/// The problems that the parts see.
IndexLogitsProblem index_select_logits_problem(const IndexSelectProblem& problem);
TopkSelectProblem index_select_topk_problem(const IndexSelectProblem& problem);

size_t index_select_workspace(const IndexSelectProblem& problem, const Device& device,
                              const IndexSelectParts& parts);
void run_index_select(const IndexSelectProblem& problem, const Device& device,
                      const IndexSelectTensors& tensors, Workspace workspace,
                      const IndexSelectParts& parts);

}  // namespace fovea::internal
