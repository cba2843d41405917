// fovea run: the operators of the room index.

#include <algorithm>
#include <cstdint>

#include "cli/run_bindings.h"
#include "fovea/topk_select.h"

namespace fovea::cli {
namespace {

// The part of topk_select and index_select that turns positions into indices. The axis T is known.
template <class Problem, class Tensors>
void bind_transform(OperatorCall& call, Problem& problem, Tensors& tensors) {
  problem.topk = call.integer("topk");
  problem.transform = call.choice<IndexTransform>("transform",
                                                  {{"local", IndexTransform::kLocal},
                                                   {"paged", IndexTransform::kPaged},
                                                   {"ragged", IndexTransform::kRagged}},
                                                  IndexTransform::kLocal);
  const bool paged = problem.transform == IndexTransform::kPaged;
  if (paged && call.has("token_table")) {
    tensors.token_table = call.in("token_table", "i32 [Rt, max_len]");
    tensors.row_to_request = call.opt("row_to_request", "i32 [T]");
    if (call.has("page_table")) {
      call.refuse("page_table and token_table are both given, expected one");
    }
    problem.page_size = call.integer("page_size", 0);
  } else if (paged) {
    tensors.page_table = call.in("page_table", "i32 [R, max_pages]");
    tensors.row_to_request = call.in("row_to_request", "i32 [T]");
    problem.page_size = call.integer("page_size");
  } else {
    problem.page_size = call.integer("page_size", 0);
  }
  if (problem.transform == IndexTransform::kRagged) {
    tensors.row_offset = call.in("row_offset", "i32 [T]");
  }
  call.set_extent("K", problem.topk, "params.topk");
  tensors.indices = call.out("indices", "i32 [T, K]");
}

}  // namespace

void run_topk_select(OperatorCall& call) {
  TopkSelectProblem problem;
  TopkSelectTensors tensors;
  tensors.logits = call.in("logits", "f32 [T, W]");
  tensors.row_len = call.in("row_len", "i32 [T]");
  tensors.row_start = call.opt("row_start", "i32 [T]");
  bind_transform(call, problem, tensors);
  call.unused({"page_table", "token_table", "row_to_request", "row_offset"}, "by this transform");
  problem.max_rows = call.extent("T");
  problem.max_width = call.extent("W");
  call.run<TopkSelect>(problem, tensors);
}

}  // namespace fovea::cli
