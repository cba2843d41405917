#include "fovea/mha_varlen.h"

#include <limits>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/mla/mha_varlen_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "mha_varlen";

constexpr internal::Implementation<MhaVarlenProblem, MhaVarlenTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::mha_varlen_cuda_supports, internal::mha_varlen_cuda_workspace, nullptr,
     internal::mha_varlen_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::mha_varlen_cpu_workspace,
     internal::mha_varlen_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::mha_varlen_ref_workspace,
     internal::mha_varlen_ref},
};

const internal::OperatorRegistration kRegistration("mla", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const MhaVarlenProblem& problem) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  // Offsets are int32, so no batch has more rows or keys. Channels are bounded by what a head can
  // sensibly have; it keeps tile sizes far from overflow.
  constexpr int64_t kMaxOffset = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMaxHeadDim = 1 << 16;
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMaxOffset);
  internal::check_range(kOp, "max_keys", problem.max_keys, 0, kMaxOffset);
  internal::check_range(kOp, "max_requests", problem.max_requests, 0, kMaxOffset);
  internal::check_range(kOp, "num_heads", problem.num_heads, 1, kMax);
  internal::check_range(kOp, "head_dim_qk", problem.head_dim_qk, 1, kMaxHeadDim);
  internal::check_range(kOp, "head_dim_v", problem.head_dim_v, 1, kMaxHeadDim);
  internal::check_positive_finite(kOp, "softmax_scale", problem.softmax_scale);
}

void check_tensors(const MhaVarlenProblem& problem, const MhaVarlenTensors& tensors) {
  using internal::kAnyExtent;
  const int64_t heads = problem.num_heads;
  internal::check_tensor(kOp, "q", tensors.q, DType::kBf16,
                         {kAnyExtent, heads, problem.head_dim_qk});
  internal::check_tensor(kOp, "k", tensors.k, DType::kBf16,
                         {kAnyExtent, heads, problem.head_dim_qk});
  const int64_t rows = tensors.q.shape[0];
  const int64_t keys = tensors.k.shape[0];
  internal::check_range(kOp, "q.shape[0]", rows, 0, problem.max_rows);
  internal::check_range(kOp, "k.shape[0]", keys, 0, problem.max_keys);
  internal::check_tensor(kOp, "v", tensors.v, DType::kBf16, {keys, heads, problem.head_dim_v});
  internal::check_tensor(kOp, "q_indptr", tensors.q_indptr, DType::kI32, {kAnyExtent});
  const int64_t offsets = tensors.q_indptr.shape[0];
  internal::check_range(kOp, "q_indptr.shape[0]", offsets, 1, problem.max_requests + 1);
  internal::check_tensor(kOp, "kv_indptr", tensors.kv_indptr, DType::kI32, {offsets});
  internal::check_tensor(kOp, "out", tensors.out, DType::kBf16, {rows, heads, problem.head_dim_v});
  internal::check_tensor(kOp, "lse", tensors.lse, DType::kF32, {rows, heads});
}

}  // namespace

MhaVarlen MhaVarlen::plan(const MhaVarlenProblem& problem, const Device& device,
                          const Options& options) {
  check_problem(problem);
  return MhaVarlen(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
