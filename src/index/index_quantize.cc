#include "fovea/index_quantize.h"

#include <bit>
#include <limits>
#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/index/index_page.h"
#include "src/index/index_quantize_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "index_quantize";

constexpr internal::Implementation<IndexQuantizeProblem, IndexQuantizeTensors> kImplementations[] =
    {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, nullptr, nullptr,
         internal::index_quantize_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::index_quantize_cpu_bytes,
         internal::index_quantize_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::index_quantize_ref_bytes,
         internal::index_quantize_ref},
};

const internal::OperatorRegistration kRegistration("index", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const IndexQuantizeProblem& problem) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMax);
  internal::check_range(kOp, "num_heads", problem.num_heads, 1, internal::kMaxIndexHeads);
  internal::check_range(kOp, "head_dim", problem.head_dim, 1, internal::kMaxIndexHeadDim);
  internal::check_range(kOp, "rope_dim", problem.rope_dim, 0, problem.head_dim);
  if (problem.rope_dim % 2 != 0) {
    internal::invalid(kOp, "rope_dim = " + std::to_string(problem.rope_dim) +
                               ", expected an even number (channels rotate in pairs)");
  }
  if (problem.hadamard && !std::has_single_bit(static_cast<uint64_t>(problem.head_dim))) {
    internal::invalid(kOp, "head_dim = " + std::to_string(problem.head_dim) +
                               ", but hadamard needs a power of two; set hadamard = false");
  }
}

// The tensors that belong to q; false when they are left out together.
bool check_q(const IndexQuantizeProblem& problem, const IndexQuantizeTensors& tensors,
             int64_t rows) {
  if (!tensors.q.defined() && !tensors.head_gate.defined() && !tensors.q_fp8.defined() &&
      !tensors.q_scale.defined() && !tensors.head_weight.defined()) {
    return false;
  }
  const int64_t heads = problem.num_heads;
  internal::check_tensor(kOp, "q", tensors.q, DType::kBf16, {rows, heads, problem.head_dim});
  internal::check_tensor(kOp, "head_gate", tensors.head_gate, DType::kF32, {rows, heads});
  internal::check_tensor(kOp, "q_fp8", tensors.q_fp8, DType::kU8, {rows, heads, problem.head_dim});
  internal::check_tensor(kOp, "q_scale", tensors.q_scale, DType::kF32, {rows, heads});
  internal::check_tensor(kOp, "head_weight", tensors.head_weight, DType::kF32, {rows, heads});
  return true;
}

// The same for k.
bool check_k(const IndexQuantizeProblem& problem, const IndexQuantizeTensors& tensors,
             int64_t rows) {
  if (!tensors.k.defined() && !tensors.norm_weight.defined() && !tensors.norm_bias.defined() &&
      !tensors.k_fp8.defined() && !tensors.k_scale.defined()) {
    return false;
  }
  internal::check_tensor(kOp, "k", tensors.k, DType::kBf16, {rows, problem.head_dim});
  internal::check_tensor(kOp, "norm_weight", tensors.norm_weight, DType::kF32, {problem.head_dim});
  internal::check_tensor(kOp, "norm_bias", tensors.norm_bias, DType::kF32, {problem.head_dim});
  internal::check_tensor(kOp, "k_fp8", tensors.k_fp8, DType::kU8, {rows, problem.head_dim});
  internal::check_tensor(kOp, "k_scale", tensors.k_scale, DType::kF32, {rows});
  return true;
}

void check_tensors(const IndexQuantizeProblem& problem, const IndexQuantizeTensors& tensors) {
  using internal::kAnyExtent;
  const int64_t rows = tensors.q.defined() && tensors.q.rank > 0   ? tensors.q.shape[0]
                       : tensors.k.defined() && tensors.k.rank > 0 ? tensors.k.shape[0]
                                                                   : kAnyExtent;
  const bool has_q = check_q(problem, tensors, rows);
  const bool has_k = check_k(problem, tensors, rows);
  if (!has_q && !has_k) {
    internal::invalid(kOp, "q and k are both missing, expected at least one of them");
  }
  internal::check_range(kOp, has_q ? "q.shape[0]" : "k.shape[0]", rows, 0, problem.max_rows);
  if (problem.rope_dim == 0) return;
  internal::check_tensor(kOp, "positions", tensors.positions, DType::kI32, {rows});
  internal::check_tensor(kOp, "cos_sin", tensors.cos_sin, DType::kF32,
                         {kAnyExtent, problem.rope_dim});
  if (tensors.cos_sin.shape[0] == 0 && rows > 0) {
    internal::invalid(kOp, "cos_sin.shape[0] = 0, expected at least one position");
  }
}

}  // namespace

IndexQuantize IndexQuantize::plan(const IndexQuantizeProblem& problem, const Device& device,
                                  const Options& options) {
  check_problem(problem);
  return IndexQuantize(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
