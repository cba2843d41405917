#include "fovea/msa_attend.h"

#include <cmath>
#include <limits>
#include <string>

#include "src/core/check.h"
#include "src/msa/msa_attend_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "msa_attend";

constexpr internal::Implementation<MsaAttendProblem, MsaAttendTensors> kImplementations[] = {
    {"cuda_sm90", DeviceKind::kCuda, internal::cuda_sm90_available,
     internal::msa_attend_cuda_sm90_supports, internal::msa_attend_cuda_sm90_workspace, nullptr,
     internal::msa_attend_cuda_sm90, internal::msa_attend_cuda_sm90_preferred},
    {"cuda_sm90_decode", DeviceKind::kCuda, internal::cuda_sm90_available,
     internal::msa_attend_cuda_sm90_decode_supports,
     internal::msa_attend_cuda_sm90_decode_workspace, nullptr,
     internal::msa_attend_cuda_sm90_decode, internal::msa_attend_cuda_sm90_decode_preferred},
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::msa_attend_cuda_supports, internal::msa_attend_cuda_workspace, nullptr,
     internal::msa_attend_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, internal::msa_attend_cpu_supports,
     internal::msa_attend_cpu_workspace, internal::msa_attend_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::msa_attend_ref_workspace,
     internal::msa_attend_ref},
};

const internal::OperatorRegistration kRegistration("msa", kOp, [] {
  return internal::list_implementations(kImplementations);
});

bool is_q8(MsaKvMode mode) { return mode == MsaKvMode::kQ8Kv8 || mode == MsaKvMode::kQ8Kv4; }

MsaAttendProblem check_problem(MsaAttendProblem problem) {
  constexpr int64_t kMaxHeads = 1 << 16;
  constexpr int64_t kMaxHeadDim = 1024;
  constexpr int64_t kMaxTopk = 1 << 20;
  internal::check_msa_bounds(kOp, problem.max_rows, problem.max_requests, problem.max_pages,
                             problem.block_size, problem.page_size);
  internal::check_range(kOp, "num_kv_heads", problem.num_kv_heads, 1, kMaxHeads);
  internal::check_range(kOp, "num_heads", problem.num_heads, 1, kMaxHeads);
  if (problem.num_heads % problem.num_kv_heads != 0) {
    internal::invalid(
        kOp, "num_heads = " + std::to_string(problem.num_heads) +
                 ", expected a multiple of num_kv_heads = " + std::to_string(problem.num_kv_heads));
  }
  internal::check_range(kOp, "head_dim", problem.head_dim, internal::kMsaKv4Group, kMaxHeadDim);
  if (problem.head_dim % internal::kMsaKv4Group != 0) {
    internal::invalid(kOp, "head_dim = " + std::to_string(problem.head_dim) +
                               ", expected a multiple of " +
                               std::to_string(internal::kMsaKv4Group));
  }
  internal::check_range(kOp, "topk", problem.topk, 0, kMaxTopk);
  if (problem.softmax_scale == 0)
    problem.softmax_scale = 1.0f / std::sqrt(static_cast<float>(problem.head_dim));
  internal::check_positive_finite(kOp, "softmax_scale", problem.softmax_scale);
  if (static_cast<int>(problem.kv_mode) > static_cast<int>(MsaKvMode::kQ8Kv4)) {
    internal::invalid(kOp, "kv_mode = " + std::to_string(static_cast<int>(problem.kv_mode)) +
                               ", expected a value of MsaKvMode");
  }
  if (problem.blocks_layout != BlocksLayout::kHeadMajor &&
      problem.blocks_layout != BlocksLayout::kRowMajor) {
    internal::invalid(kOp,
                      "blocks_layout = " + std::to_string(static_cast<int>(problem.blocks_layout)) +
                          ", expected a value of BlocksLayout");
  }
  return problem;
}

// A pool [slots, Hkv, width] or [pages, Hkv, P, width]; returns its slots.
int64_t check_pool(const char* name, const ConstTensorView& pool, DType dtype,
                   const MsaAttendProblem& problem, int64_t width) {
  using internal::kAnyExtent;
  const bool needs_pages = problem.kv_mode == MsaKvMode::kQ8Kv4;
  if (pool.rank == 4 || needs_pages) {
    internal::check_tensor(kOp, name, pool, dtype,
                           {kAnyExtent, problem.num_kv_heads, problem.block_size, width});
    internal::check_msa_alignment(kOp, name, pool);
    return pool.shape[0] * problem.block_size;
  }
  internal::check_tensor(kOp, name, pool, dtype, {kAnyExtent, problem.num_kv_heads, width});
  internal::check_msa_slots(kOp, name, pool.shape[0], problem.block_size);
  internal::check_msa_alignment(kOp, name, pool);
  return pool.shape[0];
}

void check_pools(const MsaAttendProblem& problem, const MsaAttendTensors& tensors) {
  const DType dtype = problem.kv_mode == MsaKvMode::kBf16 ? DType::kBf16 : DType::kU8;
  const int64_t width =
      problem.kv_mode == MsaKvMode::kQ8Kv4 ? problem.head_dim / 2 : problem.head_dim;
  check_pool("k_pool", tensors.k_pool, dtype, problem, width);
  check_pool("v_pool", tensors.v_pool, dtype, problem, width);
  bool equal = tensors.k_pool.rank == tensors.v_pool.rank;
  for (int axis = 0; axis < tensors.k_pool.rank && equal; ++axis) {
    const auto i = static_cast<size_t>(axis);
    equal = tensors.k_pool.shape[i] == tensors.v_pool.shape[i] &&
            (tensors.k_pool.shape[i] <= 1 || tensors.k_pool.stride[i] == tensors.v_pool.stride[i]);
  }
  if (!equal) {
    internal::invalid(kOp,
                      "v_pool = " + to_string(tensors.v_pool) +
                          ", expected shape and strides of k_pool = " + to_string(tensors.k_pool));
  }
}

// An optional f32 scale [1], or, where allowed, [Hkv] or [rows, Hkv].
void check_scale(const char* name, const ConstTensorView& scale, bool only_scalar, int64_t kv_heads,
                 int64_t rows) {
  if (!scale.defined()) return;
  if (scale.rank == 2 && !only_scalar)
    internal::check_tensor(kOp, name, scale, DType::kF32, {rows, kv_heads});
  else if (only_scalar || (scale.rank == 1 && scale.shape[0] == 1))
    internal::check_tensor(kOp, name, scale, DType::kF32, {1});
  else
    internal::check_tensor(kOp, name, scale, DType::kF32, {kv_heads});
}

void refuse_scale(const char* name, const ConstTensorView& scale, const char* mode) {
  if (scale.defined())
    internal::invalid(kOp, std::string(name) + " is given, but kv_mode " + mode +
                               " has no such scale; leave it out");
}

void check_scales(const MsaAttendProblem& problem, const MsaAttendTensors& tensors) {
  const int64_t rows = tensors.q.shape[0];
  const int64_t kv_heads = problem.num_kv_heads;
  const int64_t slots = tensors.k_pool.rank == 4 ? tensors.k_pool.shape[0] * problem.block_size
                                                 : tensors.k_pool.shape[0];
  if (problem.kv_mode != MsaKvMode::kQ8Kv4) {
    refuse_scale("k_global_scale", tensors.k_global_scale, "other than q8kv4");
    refuse_scale("v_global_scale", tensors.v_global_scale, "other than q8kv4");
  }
  switch (problem.kv_mode) {
    case MsaKvMode::kBf16:
      refuse_scale("q_scale", tensors.q_scale, "bf16");
      refuse_scale("k_scale", tensors.k_scale, "bf16");
      refuse_scale("v_scale", tensors.v_scale, "bf16");
      return;
    case MsaKvMode::kKv8:
      refuse_scale("q_scale", tensors.q_scale, "kv8");
      check_scale("k_scale", tensors.k_scale, true, kv_heads, slots);
      check_scale("v_scale", tensors.v_scale, true, kv_heads, slots);
      return;
    case MsaKvMode::kQ8Kv8:
      check_scale("q_scale", tensors.q_scale, false, kv_heads, rows);
      check_scale("k_scale", tensors.k_scale, false, kv_heads, slots);
      check_scale("v_scale", tensors.v_scale, false, kv_heads, slots);
      return;
    case MsaKvMode::kQ8Kv4:
      check_scale("q_scale", tensors.q_scale, true, kv_heads, rows);
      for (const auto& [name, scale] :
           {std::pair{"k_scale", &tensors.k_scale}, std::pair{"v_scale", &tensors.v_scale}}) {
        internal::check_tensor(kOp, name, *scale, DType::kU8,
                               {tensors.k_pool.shape[0], kv_heads, problem.block_size,
                                problem.head_dim / internal::kMsaKv4Group});
      }
      check_scale("k_global_scale", tensors.k_global_scale, true, kv_heads, slots);
      check_scale("v_global_scale", tensors.v_global_scale, true, kv_heads, slots);
      return;
  }
}

void check_tensors(const MsaAttendProblem& problem, const MsaAttendTensors& tensors) {
  using internal::kAnyExtent;
  const int64_t heads = problem.num_heads;
  internal::check_tensor(kOp, "q", tensors.q, is_q8(problem.kv_mode) ? DType::kU8 : DType::kBf16,
                         {kAnyExtent, heads, problem.head_dim});
  const int64_t rows = tensors.q.shape[0];
  internal::check_range(kOp, "q.shape[0]", rows, 0, problem.max_rows);
  internal::check_msa_alignment(kOp, "q", tensors.q);
  check_pools(problem, tensors);
  internal::check_msa_batch(kOp, tensors.kv_len, tensors.q_indptr, tensors.q_offset,
                            problem.max_requests);
  internal::check_msa_page_table(kOp, tensors.page_table, tensors.kv_len.shape[0],
                                 problem.max_pages);
  internal::check_msa_blocks(kOp, tensors.blocks, problem.blocks_layout, problem.num_kv_heads, rows,
                             problem.topk);
  internal::check_optional(kOp, "sink", tensors.sink, DType::kF32, {heads});
  check_scales(problem, tensors);
  internal::check_tensor(kOp, "out", tensors.out, DType::kBf16, {rows, heads, problem.head_dim});
  internal::check_msa_alignment(kOp, "out", tensors.out);
  internal::check_optional(kOp, "lse", tensors.lse, DType::kF32, {rows, heads});
}

}  // namespace

MsaAttend MsaAttend::plan(const MsaAttendProblem& problem, const Device& device,
                          const Options& options) {
  return MsaAttend(internal::make_plan(kOp, kImplementations, check_problem(problem), device,
                                       options, check_tensors));
}

}  // namespace fovea
