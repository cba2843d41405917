#include "src/core/workspace.h"
#include "src/kda/kda_decode_impl.h"
#include "src/kda/kda_ref.h"

namespace fovea::internal {
namespace {

struct Scratch {
  int64_t* check;
  RefToken token;
  double* state;  // [V][K]
  double* out;    // [V]

  Scratch(const KdaDecodeProblem& problem, WorkspaceCutter* cutter)
      : check(cutter->take<int64_t>(kda_decode_check_elements(problem))),
        token(RefToken::take(problem.layer, cutter)),
        state(cutter->take<double>(problem.layer.head_dim_v * problem.layer.head_dim_k)),
        out(cutter->take<double>(problem.layer.head_dim_v)) {}
};

}  // namespace

size_t kda_decode_ref_workspace(const KdaDecodeProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  Scratch(problem, &cutter);
  return cutter.used_bytes();
}

void kda_decode_ref(const KdaDecodeProblem& problem, const Device&, const KdaDecodeTensors& tensors,
                    Workspace workspace) {
  const KdaLayer& layer = problem.layer;
  WorkspaceCutter cutter(workspace);
  Scratch scratch(problem, &cutter);
  judge_kda_decode(problem, tensors, scratch.check);
  const RefInputs inputs(layer, split_qkv(layer, tensors));
  const StateAccess states(tensors.state, StateLayout::kVk);
  const StateRoutes routes(tensors.state, tensors.slot, tensors.slot, tensors.has_initial_state);
  const auto out = access<bf16_t, 3>(tensors.out);
  for (int64_t t = 0; t < out.shape[0]; ++t) {
    const int64_t slot = routes.finish(t);
    for (int64_t h = 0; h < layer.num_value_heads; ++h) {
      if (slot < 0) {
        for (int64_t d = 0; d < layer.head_dim_v; ++d) out(t, h, d) = bf16_from_float(0.0f);
        continue;
      }
      inputs.read(t, h, &scratch.token);
      ref_load(layer, states, routes.start(t), h, scratch.state);
      ref_step(layer, scratch.token, scratch.state, scratch.out);
      ref_store(layer, states, slot, h, scratch.state);
      for (int64_t d = 0; d < layer.head_dim_v; ++d) {
        out(t, h, d) = bf16_from_float(static_cast<float>(scratch.out[d]));
      }
    }
  }
}

}  // namespace fovea::internal
