#include "src/core/access.h"
#include "src/mla/mla_inputs_impl.h"

namespace fovea::internal {

void concat_absorbed_q_ref(const ConcatAbsorbedQProblem& problem, const Device&,
                           const ConcatAbsorbedQTensors& tensors, Workspace) {
  const auto q_nope = access<const bf16_t, 3>(tensors.q_nope);
  const auto q_rope = access<const bf16_t, 3>(tensors.q_rope);
  const auto q = access<bf16_t, 3>(tensors.q);
  for (int64_t t = 0; t < q.shape[0]; ++t) {
    for (int64_t h = 0; h < problem.num_heads; ++h) {
      for (int64_t d = 0; d < kAbsorbedDim; ++d)
        q(t, h, d) = d < kNopeDim ? q_nope(t, h, d) : q_rope(t, h, d - kNopeDim);
    }
  }
}

}  // namespace fovea::internal
