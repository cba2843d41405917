#include "fovea/kda_stages.h"

#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/kda/kda_checks.h"
#include "src/kda/kda_stages_impl.h"

namespace fovea {
namespace {

constexpr char kGateOp[] = "kda_stage_gate";
constexpr char kIntraOp[] = "kda_stage_intra";
constexpr char kInterOp[] = "kda_stage_inter";
constexpr char kOutputOp[] = "kda_stage_output";

constexpr internal::Implementation<KdaStageProblem, KdaStageGateTensors> kGateList[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::kda_stage_cuda_supports, internal::kda_stage_cuda_workspace, nullptr,
     internal::kda_stage_gate_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::kda_stage_gate_cpu_workspace,
     internal::kda_stage_gate_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::kda_stage_gate_ref},
};
constexpr internal::Implementation<KdaStageProblem, KdaStageIntraTensors> kIntraList[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::kda_stage_cuda_supports, internal::kda_stage_cuda_workspace, nullptr,
     internal::kda_stage_intra_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::kda_stage_intra_cpu_workspace,
     internal::kda_stage_intra_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::kda_stage_intra_ref_workspace,
     internal::kda_stage_intra_ref},
};
constexpr internal::Implementation<KdaStageProblem, KdaStageInterTensors> kInterList[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::kda_stage_cuda_supports, internal::kda_stage_cuda_workspace, nullptr,
     internal::kda_stage_inter_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::kda_stage_inter_cpu_workspace,
     internal::kda_stage_inter_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::kda_stage_inter_ref_workspace,
     internal::kda_stage_inter_ref},
};
constexpr internal::Implementation<KdaStageProblem, KdaStageOutputTensors> kOutputList[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::kda_stage_cuda_supports, internal::kda_stage_cuda_workspace, nullptr,
     internal::kda_stage_output_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::kda_stage_output_cpu_workspace,
     internal::kda_stage_output_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::kda_stage_output_ref},
};

const internal::OperatorRegistration kGateRegistration("kda", kGateOp, [] {
  return internal::list_implementations(kGateList);
});
const internal::OperatorRegistration kIntraRegistration("kda", kIntraOp, [] {
  return internal::list_implementations(kIntraList);
});
const internal::OperatorRegistration kInterRegistration("kda", kInterOp, [] {
  return internal::list_implementations(kInterList);
});
const internal::OperatorRegistration kOutputRegistration("kda", kOutputOp, [] {
  return internal::list_implementations(kOutputList);
});

void check_problem(const char* op, const KdaStageProblem& problem) {
  internal::check_kda_layer(op, problem.layer);
  internal::check_range(op, "max_rows", problem.max_rows, 0, internal::kMaxKdaCount);
  internal::check_range(op, "max_sequences", problem.max_sequences, 0, internal::kMaxKdaCount);
  if (problem.chunk != 16 && problem.chunk != 32 && problem.chunk != 64) {
    internal::invalid(op, "chunk = " + std::to_string(problem.chunk) + ", expected 16, 32 or 64");
  }
  internal::check_float_type(op, "stage_dtype", problem.stage_dtype);
}

// [T, heads, width], with T within the plan.
int64_t check_rows(const char* op, const KdaStageProblem& problem, const char* name,
                   const ConstTensorView& tensor, DType dtype, int64_t heads, int64_t width) {
  internal::check_tensor(op, name, tensor, dtype, {internal::kAnyExtent, heads, width});
  internal::check_range(op, (std::string(name) + ".shape[0]").c_str(), tensor.shape[0], 0,
                        problem.max_rows);
  return tensor.shape[0];
}

void check_gate_stage(const KdaStageProblem& problem, const KdaStageGateTensors& t) {
  const KdaLayer& layer = problem.layer;
  const int64_t heads = layer.num_heads, value_heads = layer.num_value_heads;
  const int64_t dim = layer.head_dim_k;
  const int64_t rows =
      check_rows(kGateOp, problem, "g_sum", t.g_sum, DType::kF32, value_heads, dim);
  internal::check_tensor(kGateOp, "q", t.q, DType::kBf16, {rows, heads, dim});
  internal::check_tensor(kGateOp, "k", t.k, DType::kBf16, {rows, heads, dim});
  internal::check_tensor(kGateOp, "g", t.g, layer.gate.dtype, {rows, value_heads, dim});
  internal::check_gate_tensors(kGateOp, layer.gate, value_heads, dim, t.a_log, t.dt_bias);
  internal::check_indptr(kGateOp, t.q_indptr, problem.max_sequences);
  internal::check_tensor(kGateOp, "q_hat", t.q_hat, problem.stage_dtype, {rows, heads, dim});
  internal::check_tensor(kGateOp, "k_hat", t.k_hat, problem.stage_dtype, {rows, heads, dim});
  internal::check_no_aliasing(kGateOp, "g_sum", t.g_sum);
  internal::check_no_aliasing(kGateOp, "q_hat", t.q_hat);
  internal::check_no_aliasing(kGateOp, "k_hat", t.k_hat);
}

void check_intra_stage(const KdaStageProblem& problem, const KdaStageIntraTensors& t) {
  const KdaLayer& layer = problem.layer;
  const int64_t heads = layer.num_heads, value_heads = layer.num_value_heads;
  const int64_t dim_k = layer.head_dim_k, dim_v = layer.head_dim_v;
  const DType dtype = problem.stage_dtype;
  const int64_t rows =
      check_rows(kIntraOp, problem, "g_sum", t.g_sum, DType::kF32, value_heads, dim_k);
  internal::check_tensor(kIntraOp, "q_hat", t.q_hat, dtype, {rows, heads, dim_k});
  internal::check_tensor(kIntraOp, "k_hat", t.k_hat, dtype, {rows, heads, dim_k});
  internal::check_tensor(kIntraOp, "v", t.v, DType::kBf16, {rows, value_heads, dim_v});
  internal::check_tensor(kIntraOp, "beta", t.beta, layer.beta_dtype, {rows, value_heads});
  internal::check_indptr(kIntraOp, t.q_indptr, problem.max_sequences);
  internal::check_tensor(kIntraOp, "p", t.p, dtype, {rows, value_heads, problem.chunk});
  internal::check_tensor(kIntraOp, "x", t.x, dtype, {rows, value_heads, problem.chunk});
  internal::check_tensor(kIntraOp, "w", t.w, dtype, {rows, value_heads, dim_k});
  internal::check_tensor(kIntraOp, "u0", t.u0, dtype, {rows, value_heads, dim_v});
  internal::check_tensor(kIntraOp, "kr", t.kr, dtype, {rows, value_heads, dim_k});
  internal::check_no_aliasing(kIntraOp, "p", t.p);
  internal::check_no_aliasing(kIntraOp, "x", t.x);
  internal::check_no_aliasing(kIntraOp, "w", t.w);
  internal::check_no_aliasing(kIntraOp, "u0", t.u0);
  internal::check_no_aliasing(kIntraOp, "kr", t.kr);
}

void check_inter_stage(const KdaStageProblem& problem, const KdaStageInterTensors& t) {
  const KdaLayer& layer = problem.layer;
  const int64_t heads = layer.num_value_heads;
  const int64_t dim_k = layer.head_dim_k, dim_v = layer.head_dim_v;
  const DType dtype = problem.stage_dtype;
  const int64_t rows = check_rows(kInterOp, problem, "g_sum", t.g_sum, DType::kF32, heads, dim_k);
  internal::check_tensor(kInterOp, "w", t.w, dtype, {rows, heads, dim_k});
  internal::check_tensor(kInterOp, "kr", t.kr, dtype, {rows, heads, dim_k});
  internal::check_tensor(kInterOp, "u0", t.u0, dtype, {rows, heads, dim_v});
  internal::check_indptr(kInterOp, t.q_indptr, problem.max_sequences);
  const int64_t sequences = t.q_indptr.shape[0] - 1;
  internal::check_optional(kInterOp, "initial_state", t.initial_state, DType::kF32,
                           {sequences, heads, dim_v, dim_k});
  internal::check_tensor(kInterOp, "chunk_states", t.chunk_states, DType::kF32,
                         {internal::kAnyExtent, heads, dim_v, dim_k});
  internal::check_tensor(kInterOp, "u", t.u, dtype, {rows, heads, dim_v});
  internal::check_optional(kInterOp, "final_state", t.final_state, DType::kF32,
                           {sequences, heads, dim_v, dim_k});
  internal::check_no_aliasing(kInterOp, "chunk_states", t.chunk_states);
  internal::check_no_aliasing(kInterOp, "u", t.u);
  if (t.final_state.defined()) internal::check_no_aliasing(kInterOp, "final_state", t.final_state);
}

void check_output_stage(const KdaStageProblem& problem, const KdaStageOutputTensors& t) {
  const KdaLayer& layer = problem.layer;
  const int64_t heads = layer.num_value_heads;
  const int64_t dim_k = layer.head_dim_k, dim_v = layer.head_dim_v;
  const DType dtype = problem.stage_dtype;
  const int64_t rows = check_rows(kOutputOp, problem, "g_sum", t.g_sum, DType::kF32, heads, dim_k);
  internal::check_tensor(kOutputOp, "q_hat", t.q_hat, dtype, {rows, layer.num_heads, dim_k});
  internal::check_tensor(kOutputOp, "p", t.p, dtype, {rows, heads, problem.chunk});
  internal::check_tensor(kOutputOp, "chunk_states", t.chunk_states, DType::kF32,
                         {internal::kAnyExtent, heads, dim_v, dim_k});
  internal::check_tensor(kOutputOp, "u", t.u, dtype, {rows, heads, dim_v});
  internal::check_indptr(kOutputOp, t.q_indptr, problem.max_sequences);
  internal::check_tensor(kOutputOp, "out", t.out, DType::kBf16, {rows, heads, dim_v});
  internal::check_no_aliasing(kOutputOp, "out", t.out);
}

}  // namespace

KdaStageGate KdaStageGate::plan(const KdaStageProblem& problem, const Device& device,
                                const Options& options) {
  check_problem(kGateOp, problem);
  return KdaStageGate(
      internal::make_plan(kGateOp, kGateList, problem, device, options, check_gate_stage));
}

KdaStageIntra KdaStageIntra::plan(const KdaStageProblem& problem, const Device& device,
                                  const Options& options) {
  check_problem(kIntraOp, problem);
  return KdaStageIntra(
      internal::make_plan(kIntraOp, kIntraList, problem, device, options, check_intra_stage));
}

KdaStageInter KdaStageInter::plan(const KdaStageProblem& problem, const Device& device,
                                  const Options& options) {
  check_problem(kInterOp, problem);
  return KdaStageInter(
      internal::make_plan(kInterOp, kInterList, problem, device, options, check_inter_stage));
}

KdaStageOutput KdaStageOutput::plan(const KdaStageProblem& problem, const Device& device,
                                    const Options& options) {
  check_problem(kOutputOp, problem);
  return KdaStageOutput(
      internal::make_plan(kOutputOp, kOutputList, problem, device, options, check_output_stage));
}

}  // namespace fovea
