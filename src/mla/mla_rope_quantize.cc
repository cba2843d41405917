#include "fovea/mla_inputs.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/mla/mla_inputs_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "mla_rope_quantize";

constexpr internal::Implementation<MlaRopeQuantizeProblem, MlaRopeQuantizeTensors>
    kImplementations[] = {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
         internal::mla_rope_quantize_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::mla_rope_quantize_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::mla_rope_quantize_ref},
};

const internal::OperatorRegistration kRegistration("mla", kOp, [] {
  return internal::list_implementations(kImplementations);
});

// The tensors that belong to q; false when they are left out together.
bool check_q(const MlaRopeQuantizeProblem& problem, const MlaRopeQuantizeTensors& tensors,
             int64_t rows) {
  if (!tensors.q_nope.defined() && !tensors.q_rope.defined() && !tensors.q_fp8.defined())
    return false;
  const int64_t heads = problem.num_heads;
  internal::check_tensor(kOp, "q_nope", tensors.q_nope, DType::kBf16,
                         {rows, heads, internal::kNopeDim});
  internal::check_tensor(kOp, "q_rope", tensors.q_rope, DType::kBf16,
                         {rows, heads, internal::kRopeDim});
  internal::check_tensor(kOp, "q_fp8", tensors.q_fp8, DType::kU8,
                         {rows, heads, internal::kAbsorbedDim});
  return true;
}

// The same for k.
bool check_k(const MlaRopeQuantizeTensors& tensors, int64_t rows) {
  if (!tensors.k_nope.defined() && !tensors.k_rope.defined() && !tensors.k_fp8.defined())
    return false;
  internal::check_tensor(kOp, "k_nope", tensors.k_nope, DType::kBf16, {rows, internal::kNopeDim});
  internal::check_tensor(kOp, "k_rope", tensors.k_rope, DType::kBf16, {rows, internal::kRopeDim});
  internal::check_tensor(kOp, "k_fp8", tensors.k_fp8, DType::kU8, {rows, internal::kAbsorbedDim});
  return true;
}

void check_tensors(const MlaRopeQuantizeProblem& problem, const MlaRopeQuantizeTensors& tensors) {
  using internal::kAnyExtent;
  const auto rows_of = [](const ConstTensorView& tensor) {
    return tensor.defined() && tensor.rank > 0 ? tensor.shape[0] : kAnyExtent;
  };
  const int64_t q_rows = rows_of(tensors.q_nope);
  const int64_t rows = q_rows != kAnyExtent ? q_rows : rows_of(tensors.k_nope);
  const bool has_q = check_q(problem, tensors, rows);
  const bool has_k = check_k(tensors, rows);
  if (!has_q && !has_k)
    internal::invalid(kOp, "q_nope and k_nope are both missing, expected at least one of them");
  internal::check_range(kOp, has_q ? "q_nope.shape[0]" : "k_nope.shape[0]", rows, 0,
                        problem.max_rows);
  internal::check_tensor(kOp, "positions", tensors.positions, DType::kI32, {rows});
  internal::check_tensor(kOp, "cos_sin", tensors.cos_sin, DType::kF32,
                         {kAnyExtent, internal::kRopeDim});
  if (tensors.cos_sin.shape[0] == 0 && rows > 0)
    internal::invalid(kOp, "cos_sin.shape[0] = 0, expected at least one position");
}

}  // namespace

MlaRopeQuantize MlaRopeQuantize::plan(const MlaRopeQuantizeProblem& problem, const Device& device,
                                      const Options& options) {
  internal::check_input_bounds(kOp, problem);
  internal::check_positive_finite(kOp, "q_scale", problem.q_scale);
  internal::check_positive_finite(kOp, "k_scale", problem.k_scale);
  return MlaRopeQuantize(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
