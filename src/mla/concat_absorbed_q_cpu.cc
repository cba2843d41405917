#include <algorithm>
#include <cstring>

#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/mla/mla_inputs_impl.h"

namespace fovea::internal {

void concat_absorbed_q_cpu(const ConcatAbsorbedQProblem& problem, const Device& device,
                           const ConcatAbsorbedQTensors& tensors, Workspace) {
  const auto q_nope = access<const bf16_t, 3>(tensors.q_nope);
  const auto q_rope = access<const bf16_t, 3>(tensors.q_rope);
  const auto q = access<bf16_t, 3>(tensors.q);
  const ThreadScope threads(device.num_threads);
  // 128 heads are 150 KB, which a task may well be.
  const int64_t grain = std::max<int64_t>(1, 128 / problem.num_heads);
  ParallelFor(q.shape[0], grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < problem.num_heads; ++h) {
        bf16_t* to = q.row(t, h);
        std::memcpy(to, q_nope.row(t, h), kNopeDim * sizeof(bf16_t));
        std::memcpy(to + kNopeDim, q_rope.row(t, h), kRopeDim * sizeof(bf16_t));
      }
    }
  });
}

}  // namespace fovea::internal
