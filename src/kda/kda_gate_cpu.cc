#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kda/kda_gate_cpu.cc"
#include "src/core/simd.h"
// This needs the helpers of simd.h.
#include "src/kda/kda_row_simd.h"

#include <algorithm>

#include "src/core/parallel.h"
#include "src/kda/kda_gate_impl.h"
#include "src/kda/kda_inputs.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

constexpr int64_t kMostChannels = 256;  // K

void kda_gate(const KdaGateProblem& problem, const Device& device, const KdaGateTensors& tensors,
              Workspace /*workspace*/) {
  const FloatRows g(tensors.g);
  const auto a_log = access<const float, 1>(tensors.a_log);
  const auto dt_bias = access<const float, 2>(tensors.dt_bias);
  const auto log_decay = access<float, 3>(tensors.log_decay);
  const int64_t channels = problem.head_dim_k, padded = kda_padded(channels);
  const int64_t heads = problem.num_value_heads, rows = log_decay.shape[0];
  // Pieces of one head, so that rate and bias are found once, and about 64 rows.
  constexpr int64_t kPieceRows = 64;
  const int64_t blocks = (rows + kPieceRows - 1) / kPieceRows;
  const ThreadScope threads(device.num_threads);
  ParallelFor(blocks * heads, 1, [&](int64_t begin, int64_t end, int) {
    HWY_ALIGN float bias[kMostChannels], row[kMostChannels];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % heads, first = i / heads * kPieceRows;
      const GateHead gate = gate_head(problem.gate, a_log ? &a_log(head) : nullptr,
                                      dt_bias ? dt_bias.row(head) : nullptr);
      std::fill_n(bias, padded, 0.0f);
      if (gate.dt_bias != nullptr) std::copy_n(gate.dt_bias, channels, bias);
      for (int64_t t = first; t < std::min(rows, first + kPieceRows); ++t) {
        if (g.is_bf16)
          load_row(g.bf16(t, head), channels, padded, row);
        else
          load_row(g.f32(t, head), channels, padded, row);
        log_decay_row(gate, bias, padded, row);
        store_row(row, channels, log_decay.row(t, head));
      }
    }
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(kda_gate);

void kda_gate_cpu(const KdaGateProblem& problem, const Device& device,
                  const KdaGateTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(kda_gate)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
