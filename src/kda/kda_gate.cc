#include "fovea/kda_gate.h"

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/kda/kda_checks.h"
#include "src/kda/kda_gate_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "kda_gate";

constexpr internal::Implementation<KdaGateProblem, KdaGateTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, internal::kda_gate_cuda_supports,
     nullptr, nullptr, internal::kda_gate_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::kda_gate_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::kda_gate_ref},
};

const internal::OperatorRegistration kRegistration("kda", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const KdaGateProblem& problem) {
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, internal::kMaxKdaCount);
  internal::check_range(kOp, "num_value_heads", problem.num_value_heads, 1, internal::kMaxKdaCount);
  internal::check_range(kOp, "head_dim_k", problem.head_dim_k, 1, 256);
  internal::check_kda_gate(kOp, problem.gate);
}

void check_tensors(const KdaGateProblem& problem, const KdaGateTensors& tensors) {
  const int64_t heads = problem.num_value_heads;
  internal::check_tensor(kOp, "g", tensors.g, problem.gate.dtype,
                         {internal::kAnyExtent, heads, problem.head_dim_k});
  const int64_t rows = tensors.g.shape[0];
  internal::check_range(kOp, "g.shape[0]", rows, 0, problem.max_rows);
  internal::check_gate_tensors(kOp, problem.gate, heads, problem.head_dim_k, tensors.a_log,
                               tensors.dt_bias);
  internal::check_tensor(kOp, "log_decay", tensors.log_decay, DType::kF32,
                         {rows, heads, problem.head_dim_k});
  internal::check_no_aliasing(kOp, "log_decay", tensors.log_decay);
}

}  // namespace

KdaGateActivation KdaGateActivation::plan(const KdaGateProblem& problem, const Device& device,
                                          const Options& options) {
  check_problem(problem);
  return KdaGateActivation(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
