#include "fovea/merge_lse.h"

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/mla/merge_lse_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "merge_lse";

constexpr internal::Implementation<MergeLseProblem, MergeLseTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
     internal::merge_lse_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::merge_lse_cpu_workspace_bytes,
     internal::merge_lse_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::merge_lse_ref},
};

const internal::OperatorRegistration kRegistration("mla", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const MergeLseProblem& problem) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  internal::check_range(kOp, "num_parts", problem.num_parts, 1, kMax);
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMax);
  internal::check_range(kOp, "num_heads", problem.num_heads, 1, kMax);
  internal::check_range(kOp, "head_dim", problem.head_dim, 1, kMax);
  if (problem.dtype != DType::kBf16 && problem.dtype != DType::kF32) {
    internal::invalid(
        kOp, "dtype = " + std::string(to_string(problem.dtype)) + ", expected bf16 or f32");
  }
}

void check_tensors(const MergeLseProblem& problem, const MergeLseTensors& tensors) {
  using internal::kAnyExtent;
  const int64_t rows = tensors.out.rank == 3 ? tensors.out.shape[0] : kAnyExtent;
  internal::check_tensor(kOp, "out", tensors.out, problem.dtype,
                         {kAnyExtent, problem.num_heads, problem.head_dim});
  internal::check_range(kOp, "out.shape[0]", rows, 0, problem.max_rows);
  internal::check_tensor(kOp, "out_parts", tensors.out_parts, problem.dtype,
                         {problem.num_parts, rows, problem.num_heads, problem.head_dim});
  internal::check_tensor(kOp, "lse_parts", tensors.lse_parts, DType::kF32,
                         {problem.num_parts, rows, problem.num_heads});
  internal::check_optional(kOp, "sink", tensors.sink, DType::kF32, {problem.num_heads});
  internal::check_tensor(kOp, "lse", tensors.lse, DType::kF32, {rows, problem.num_heads});
}

}  // namespace

MergeLse MergeLse::plan(const MergeLseProblem& problem, const Device& device,
                        const Options& options) {
  check_problem(problem);
  return MergeLse(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
