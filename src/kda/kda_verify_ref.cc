#include <algorithm>

#include "src/core/workspace.h"
#include "src/kda/kda_ref.h"
#include "src/kda/kda_verify_impl.h"

namespace fovea::internal {
namespace {

struct Scratch {
  int64_t* check;
  RefToken token;
  double* start;   // [V][K] the committed state
  double* states;  // [Td][V][K] the state after every row
  double* out;     // [V]
  double* u;       // [V]

  Scratch(const KdaVerifyProblem& problem, WorkspaceCutter* cutter)
      : check(cutter->take<int64_t>(kda_verify_check_elements(problem))),
        token(RefToken::take(problem.layer, cutter)),
        start(cutter->take<double>(problem.layer.head_dim_v * problem.layer.head_dim_k)),
        states(cutter->take<double>(problem.rows_per_request * problem.layer.head_dim_v *
                                    problem.layer.head_dim_k)),
        out(cutter->take<double>(problem.layer.head_dim_v)),
        u(cutter->take<double>(problem.layer.head_dim_v)) {}
};

struct Call {
  const KdaVerifyProblem& problem;
  const KdaLayer& layer;
  RefInputs inputs;
  StateAccess states;
  StateRoutes routes;
  const int32_t* parent;
  VerifyScratch kept;
  Accessor<bf16_t, 3> out;
};

// What a verify keeps of one row of one value head.
void keep(const Call& call, const Scratch& scratch, const double* state, float* to) {
  const int64_t dim_k = call.layer.head_dim_k, dim_v = call.layer.head_dim_v;
  const auto narrow = [](double value) { return static_cast<float>(value); };
  if (call.problem.mode == VerifyMode::kStates) {
    for (int64_t d = 0; d < dim_v; ++d) {
      std::transform(state + d * dim_k, state + (d + 1) * dim_k, to + d * call.kept.v_stride,
                     narrow);
    }
    return;
  }
  to = std::transform(scratch.token.k, scratch.token.k + dim_k, to, narrow);
  to = std::transform(scratch.token.log_decay, scratch.token.log_decay + dim_k, to, narrow);
  std::transform(scratch.u, scratch.u + dim_v, to, narrow);
}

void clear(const Call& call, int64_t request, int64_t t, int64_t head) {
  const int64_t dim_k = call.layer.head_dim_k, dim_v = call.layer.head_dim_v;
  const int64_t row = request * call.problem.rows_per_request + t;
  std::fill_n(call.out.row(row, head), dim_v, bf16_t{});
  float* to = call.kept.at(request, t, head);
  if (call.problem.mode == VerifyMode::kRecords) {
    std::fill_n(to, 2 * dim_k + dim_v, 0.0f);
    return;
  }
  for (int64_t d = 0; d < dim_v; ++d) std::fill_n(to + d * call.kept.v_stride, dim_k, 0.0f);
}

// One value head of one request: the recurrence along every path of the tree.
void verify_head(const Call& call, Scratch* scratch, int64_t request, int64_t head) {
  const KdaLayer& layer = call.layer;
  const int64_t state_size = layer.head_dim_v * layer.head_dim_k;
  ref_load(layer, call.states, call.routes.start(request), head, scratch->start);
  for (int64_t t = 0; t < call.problem.rows_per_request; ++t) {
    const int64_t parent = parent_row(call.parent, t);
    double* const state = scratch->states + t * state_size;
    std::copy_n(parent < 0 ? scratch->start : scratch->states + parent * state_size, state_size,
                state);
    const int64_t row = request * call.problem.rows_per_request + t;
    call.inputs.read(row, head, &scratch->token);
    ref_step(layer, scratch->token, state, scratch->out, scratch->u);
    for (int64_t d = 0; d < layer.head_dim_v; ++d) {
      call.out(row, head, d) = bf16_from_float(static_cast<float>(scratch->out[d]));
    }
    keep(call, *scratch, state, call.kept.at(request, t, head));
  }
}

}  // namespace

size_t kda_verify_ref_workspace(const KdaVerifyProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  Scratch(problem, &cutter);
  return cutter.used_bytes();
}

void kda_verify_ref(const KdaVerifyProblem& problem, const Device&, const KdaVerifyTensors& tensors,
                    Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  Scratch scratch(problem, &cutter);
  judge_kda_verify(problem, tensors, scratch.check);
  const Call call{problem,
                  problem.layer,
                  RefInputs(problem.layer, split_qkv(problem.layer, tensors)),
                  StateAccess(tensors.state, StateLayout::kVk),
                  StateRoutes(tensors.state, tensors.slot, tensors.slot, tensors.has_initial_state),
                  static_cast<const int32_t*>(tensors.parent.data),
                  VerifyScratch(tensors.scratch),
                  access<bf16_t, 3>(tensors.out)};
  for (int64_t r = 0; r < call.out.shape[0] / problem.rows_per_request; ++r) {
    for (int64_t head = 0; head < problem.layer.num_value_heads; ++head) {
      if (call.routes.is_padding(r)) {
        for (int64_t t = 0; t < problem.rows_per_request; ++t) clear(call, r, t, head);
      } else {
        verify_head(call, &scratch, r, head);
      }
    }
  }
}

}  // namespace fovea::internal
