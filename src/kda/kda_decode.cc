#include "fovea/kda_decode.h"

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/kda/kda_checks.h"
#include "src/kda/kda_decode_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "kda_decode";

constexpr internal::Implementation<KdaDecodeProblem, KdaDecodeTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::kda_decode_cuda_supports, internal::kda_decode_cuda_workspace, nullptr,
     internal::kda_decode_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::kda_decode_cpu_workspace,
     internal::kda_decode_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::kda_decode_ref_workspace,
     internal::kda_decode_ref},
};

const internal::OperatorRegistration kRegistration("kda", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const KdaDecodeProblem& problem) {
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, internal::kMaxKdaCount);
  internal::check_kda_layer(kOp, problem.layer);
}

void check_tensors(const KdaDecodeProblem& problem, const KdaDecodeTensors& tensors) {
  const KdaLayer& layer = problem.layer;
  internal::check_tensor(kOp, "out", tensors.out, DType::kBf16,
                         {internal::kAnyExtent, layer.num_value_heads, layer.head_dim_v});
  internal::check_no_aliasing(kOp, "out", tensors.out);
  const int64_t rows = tensors.out.shape[0];
  internal::check_range(kOp, "out.shape[0]", rows, 0, problem.max_rows);
  internal::check_kda_rows(kOp, layer, internal::rows_of(tensors), tensors.qkv, rows);
  internal::check_tensor(
      kOp, "state", tensors.state, layer.state_dtype,
      {internal::kAnyExtent, layer.num_value_heads, layer.head_dim_v, layer.head_dim_k});
  internal::check_no_aliasing(kOp, "state", tensors.state);
  internal::check_slots(kOp, "slot", tensors.slot, rows);
  const int64_t slots = tensors.state.shape[0];
  internal::check_range(kOp, "state.shape[0]", slots, tensors.slot.defined() ? 0 : rows,
                        internal::kMaxKdaCount);
  internal::check_optional(kOp, "has_initial_state", tensors.has_initial_state, DType::kU8, {rows});
  internal::check_report(kOp, tensors.report, problem.check);
}

}  // namespace

namespace internal {

int64_t kda_decode_check_elements(const KdaDecodeProblem& problem) {
  return problem.check ? fault_scratch_elements(problem.max_rows, 0) : 0;
}

void judge_kda_decode(const KdaDecodeProblem& problem, const KdaDecodeTensors& tensors,
                      int64_t* scratch) {
  if (!problem.check) return;
  const KdaContents contents{.out_slot = tensors.slot, .slots = tensors.state.shape[0]};
  report_fault(kOp, find_fault(contents, scratch), tensors.report);
}

}  // namespace internal

KdaDecode KdaDecode::plan(const KdaDecodeProblem& problem, const Device& device,
                          const Options& options) {
  check_problem(problem);
  return KdaDecode(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
