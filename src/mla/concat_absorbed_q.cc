#include "fovea/mla_inputs.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/mla/mla_inputs_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "concat_absorbed_q";

constexpr internal::Implementation<ConcatAbsorbedQProblem, ConcatAbsorbedQTensors>
    kImplementations[] = {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
         internal::concat_absorbed_q_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::concat_absorbed_q_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::concat_absorbed_q_ref},
};

const internal::OperatorRegistration kRegistration("mla", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_tensors(const ConcatAbsorbedQProblem& problem, const ConcatAbsorbedQTensors& tensors) {
  const int64_t heads = problem.num_heads;
  internal::check_tensor(kOp, "q_nope", tensors.q_nope, DType::kBf16,
                         {internal::kAnyExtent, heads, internal::kNopeDim});
  const int64_t rows = tensors.q_nope.shape[0];
  internal::check_range(kOp, "q_nope.shape[0]", rows, 0, problem.max_rows);
  internal::check_tensor(kOp, "q_rope", tensors.q_rope, DType::kBf16,
                         {rows, heads, internal::kRopeDim});
  internal::check_tensor(kOp, "q", tensors.q, DType::kBf16, {rows, heads, internal::kAbsorbedDim});
}

}  // namespace

ConcatAbsorbedQ ConcatAbsorbedQ::plan(const ConcatAbsorbedQProblem& problem, const Device& device,
                                      const Options& options) {
  internal::check_input_bounds(kOp, problem);
  return ConcatAbsorbedQ(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
