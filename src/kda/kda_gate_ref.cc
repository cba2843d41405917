#include "src/core/access.h"
#include "src/kda/kda_gate_impl.h"
#include "src/kda/kda_ref.h"

namespace fovea::internal {

void kda_gate_ref(const KdaGateProblem& problem, const Device&, const KdaGateTensors& tensors,
                  Workspace) {
  const RowReader g(tensors.g);
  const auto a_log = access<const float, 1>(tensors.a_log);
  const auto dt_bias = access<const float, 2>(tensors.dt_bias);
  const auto out = access<float, 3>(tensors.log_decay);
  for (int64_t t = 0; t < out.shape[0]; ++t) {
    for (int64_t h = 0; h < problem.num_value_heads; ++h) {
      const double rate = a_log ? std::exp(static_cast<double>(a_log(h))) : 1.0;
      for (int64_t c = 0; c < problem.head_dim_k; ++c) {
        out(t, h, c) = static_cast<float>(
            ref_log_decay(problem.gate, g(t, h, c), dt_bias ? dt_bias(h, c) : 0.0f, rate));
      }
    }
  }
}

}  // namespace fovea::internal
