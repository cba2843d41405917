#include "fovea/kda_verify.h"

#include <string>

#include "src/core/check.h"
#include "src/kda/kda_verify_impl.h"

namespace fovea {

std::string_view to_string(VerifyMode mode) noexcept {
  return mode == VerifyMode::kStates ? "states" : "records";
}

namespace {

constexpr char kOp[] = "kda_verify";

constexpr internal::Implementation<KdaVerifyProblem, KdaVerifyTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::kda_verify_cuda_supports, internal::kda_verify_cuda_workspace, nullptr,
     internal::kda_verify_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::kda_verify_cpu_workspace,
     internal::kda_verify_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::kda_verify_ref_workspace,
     internal::kda_verify_ref},
};

const internal::OperatorRegistration kRegistration("kda", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const KdaVerifyProblem& problem) {
  constexpr int64_t kMax = internal::kMaxKdaCount;
  internal::check_kda_layer(kOp, problem.layer);
  if (problem.mode > VerifyMode::kRecords) internal::invalid(kOp, "mode is none of VerifyMode");
  internal::check_range(kOp, "rows_per_request", problem.rows_per_request, 1, kMax);
  internal::check_range(kOp, "max_requests", problem.max_requests, 0,
                        kMax / problem.rows_per_request);
}

void check_tensors(const KdaVerifyProblem& problem, const KdaVerifyTensors& tensors) {
  const KdaLayer& layer = problem.layer;
  const int64_t draft_rows = problem.rows_per_request;
  internal::check_tensor(kOp, "out", tensors.out, DType::kBf16,
                         {internal::kAnyExtent, layer.num_value_heads, layer.head_dim_v});
  const int64_t rows = tensors.out.shape[0];
  if (rows % draft_rows != 0) {
    internal::invalid(
        kOp, "out.shape[0] = " + std::to_string(rows) +
                 ", expected a multiple of rows_per_request = " + std::to_string(draft_rows));
  }
  const int64_t requests = rows / draft_rows;
  internal::check_range(kOp, "out.shape[0] / rows_per_request", requests, 0, problem.max_requests);
  internal::check_no_aliasing(kOp, "out", tensors.out);
  internal::check_kda_rows(kOp, layer, internal::rows_of(tensors), tensors.qkv, rows);
  internal::check_tensor(
      kOp, "state", tensors.state, layer.state_dtype,
      {internal::kAnyExtent, layer.num_value_heads, layer.head_dim_v, layer.head_dim_k});
  internal::check_slots(kOp, "slot", tensors.slot, requests);
  internal::check_range(kOp, "state.shape[0]", tensors.state.shape[0],
                        tensors.slot.defined() ? 0 : requests, internal::kMaxKdaCount);
  internal::check_optional(kOp, "has_initial_state", tensors.has_initial_state, DType::kU8,
                           {requests});
  internal::check_slots(kOp, "parent", tensors.parent, draft_rows);
  if (problem.mode == VerifyMode::kStates) {
    internal::check_tensor(
        kOp, "scratch", tensors.scratch, DType::kF32,
        {requests, draft_rows, layer.num_value_heads, layer.head_dim_v, layer.head_dim_k});
  } else {
    internal::check_tensor(
        kOp, "scratch", tensors.scratch, DType::kF32,
        {requests, draft_rows, layer.num_value_heads, 2 * layer.head_dim_k + layer.head_dim_v});
  }
  internal::check_no_aliasing(kOp, "scratch", tensors.scratch);
  internal::check_report(kOp, tensors.report, problem.check);
}

}  // namespace

namespace internal {

int64_t kda_verify_check_elements(const KdaVerifyProblem& problem) {
  return problem.check ? fault_scratch_elements(problem.max_requests, 0) : 0;
}

void judge_kda_verify(const KdaVerifyProblem& problem, const KdaVerifyTensors& tensors,
                      int64_t* scratch) {
  if (!problem.check) return;
  const KdaContents contents{
      .out_slot = tensors.slot, .slots = tensors.state.shape[0], .out_slots_are_read = true};
  report_fault(kOp, find_fault(contents, scratch), tensors.report);
}

}  // namespace internal

KdaVerify KdaVerify::plan(const KdaVerifyProblem& problem, const Device& device,
                          const Options& options) {
  check_problem(problem);
  return KdaVerify(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
