#include "fovea/dense_mla.h"

#include <cmath>
#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/mla/dense_mla_impl.h"
#include "src/mla/sparse_mla_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "dense_mla";

constexpr internal::Implementation<DenseMlaProblem, DenseMlaTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::dense_mla_cuda_supports, internal::dense_mla_cuda_workspace, nullptr,
     internal::dense_mla_cuda_portable},
    {"cpu_avx512bf16", DeviceKind::kCpu, internal::sparse_mla_cpu_avx512bf16_available, nullptr,
     internal::dense_mla_cpu_avx512bf16_workspace, internal::dense_mla_cpu_avx512bf16},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::dense_mla_cpu_workspace,
     internal::dense_mla_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::dense_mla_ref_workspace,
     internal::dense_mla_ref},
};

const internal::OperatorRegistration kRegistration("mla", kOp, [] {
  return internal::list_implementations(kImplementations);
});

std::string text(RowFormat format) { return std::string(to_string(format)); }

void check_format(const DenseMlaProblem& problem) {
  const RowFormat format = problem.row_format;
  if (format != RowFormat::kBf16 && format != RowFormat::kV32 && format != RowFormat::kF576) {
    internal::invalid(kOp, "row_format = " + text(format) + ", expected bf16, v32 or f576");
  }
  if (problem.head_dim_qk != 576 && problem.head_dim_qk != 512) {
    internal::invalid(
        kOp, "head_dim_qk = " + std::to_string(problem.head_dim_qk) + ", expected 576 or 512");
  }
  if (format == RowFormat::kBf16) return;
  if (problem.head_dim_qk != 576) {
    internal::invalid(kOp, "head_dim_qk = " + std::to_string(problem.head_dim_qk) +
                               ", but row_format " + text(format) +
                               " needs 576; append zeros as the rope part of q or use bf16");
  }
  if (problem.num_heads_kv != 1) {
    internal::invalid(kOp, "num_heads_kv = " + std::to_string(problem.num_heads_kv) +
                               ", but row_format " + text(format) +
                               " holds one KV head; use bf16 [pages, page_size, h_kv, Dqk]");
  }
}

void check_scales(const DenseMlaProblem& problem) {
  internal::check_positive_finite(kOp, "softmax_scale", problem.softmax_scale);
  internal::check_positive_finite(kOp, "q_scale", problem.q_scale);
  internal::check_positive_finite(kOp, "k_scale", problem.k_scale);
  if (problem.row_format != RowFormat::kF576) {
    const auto expect_one = [&](const char* name, float scale) {
      if (scale == 1) return;
      internal::invalid(kOp, std::string(name) + " = " + std::to_string(scale) +
                                 ", but row_format " + text(problem.row_format) +
                                 " has no such scale: expected 1");
    };
    expect_one("q_scale", problem.q_scale);
    expect_one("k_scale", problem.k_scale);
  }
  const auto product = static_cast<float>(internal::logit_scale(problem));
  if (!std::isfinite(product) || product == 0) {
    internal::invalid(kOp, "softmax_scale * q_scale * k_scale = " + std::to_string(product) +
                               " leaves the range of fp32");
  }
}

void check_problem(const DenseMlaProblem& problem) {
  // Offsets, lengths and page ids are int32, so no batch has more rows, pages or keys.
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, internal::kMaxInt32);
  internal::check_range(kOp, "max_requests", problem.max_requests, 0, internal::kMaxInt32);
  internal::check_range(kOp, "max_pages", problem.max_pages, 0, internal::kMaxInt32);
  internal::check_range(kOp, "num_heads", problem.num_heads, 1, internal::kMaxInt32);
  internal::check_range(kOp, "num_heads_kv", problem.num_heads_kv, 1, problem.num_heads);
  internal::check_range(kOp, "page_size", problem.page_size, 1, internal::kMaxInt32);
  internal::check_range(kOp, "split_keys", problem.split_keys, 0, internal::kMaxInt32);
  if (problem.num_heads % problem.num_heads_kv != 0) {
    internal::invalid(
        kOp, "num_heads = " + std::to_string(problem.num_heads) +
                 ", expected a multiple of num_heads_kv = " + std::to_string(problem.num_heads_kv));
  }
  if (problem.split_keys % internal::kBlockSlots != 0) {
    internal::invalid(kOp, "split_keys = " + std::to_string(problem.split_keys) +
                               ", expected a multiple of " + std::to_string(internal::kBlockSlots) +
                               " (0: chosen by the operator)");
  }
  check_format(problem);
  check_scales(problem);
}

void check_kv(const DenseMlaProblem& problem, const ConstTensorView& kv) {
  using internal::kAnyExtent;
  if (kv.rank == 4) {
    if (problem.row_format != RowFormat::kBf16) {
      internal::invalid(kOp, "kv has 4 axes, but rows of " + text(problem.row_format) +
                                 " lie in a pool u8 [pages, page_bytes]");
    }
    if (kv.shape[1] != problem.page_size) {
      internal::invalid(
          kOp, "kv.shape[1] = " + std::to_string(kv.shape[1]) +
                   " tokens per page, expected page_size = " + std::to_string(problem.page_size));
    }
    internal::check_tensor(
        kOp, "kv", kv, DType::kBf16,
        {kAnyExtent, problem.page_size, problem.num_heads_kv, problem.head_dim_qk});
    return;
  }
  if (problem.num_heads_kv != 1) {
    internal::invalid(kOp, "kv has " + std::to_string(kv.rank) +
                               " axes, but num_heads_kv = " + std::to_string(problem.num_heads_kv) +
                               " needs bf16 [pages, page_size, h_kv, Dqk]");
  }
  if (problem.row_format == RowFormat::kBf16 && kv.dtype == DType::kBf16) {
    internal::check_tensor(kOp, "kv", kv, DType::kBf16, {kAnyExtent, problem.head_dim_qk});
    if (kv.shape[0] % problem.page_size != 0) {
      internal::invalid(kOp, "kv.shape[0] = " + std::to_string(kv.shape[0]) +
                                 " rows, expected a multiple of page_size = " +
                                 std::to_string(problem.page_size));
    }
    return;
  }
  internal::check_tensor(kOp, "kv", kv, DType::kU8, {kAnyExtent, kAnyExtent});
  const int64_t needed =
      problem.page_size * internal::sparse_mla_row_bytes(problem.row_format, problem.head_dim_qk);
  if (kv.shape[1] < needed) {
    internal::invalid(kOp, "kv.shape[1] = " + std::to_string(kv.shape[1]) +
                               " page bytes, expected at least " + std::to_string(needed) +
                               " (page_size " + std::to_string(problem.page_size) + " rows of " +
                               text(problem.row_format) + ")");
  }
}

void check_tensors(const DenseMlaProblem& problem, const DenseMlaTensors& tensors) {
  using internal::check_tensor;
  using internal::kAnyExtent;
  const int64_t heads = problem.num_heads;
  const bool q_is_fp8 = problem.row_format == RowFormat::kF576 && tensors.q.dtype == DType::kU8;
  check_tensor(kOp, "q", tensors.q, q_is_fp8 ? DType::kU8 : DType::kBf16,
               {kAnyExtent, heads, problem.head_dim_qk});
  if (!q_is_fp8 && problem.q_scale != 1) {
    internal::invalid(kOp, "q = bf16 with q_scale = " + std::to_string(problem.q_scale) +
                               "; give q as u8 codes, or plan with q_scale 1");
  }
  const int64_t rows = tensors.q.shape[0];
  internal::check_range(kOp, "q.shape[0]", rows, 0, problem.max_rows);
  check_kv(problem, tensors.kv);
  check_tensor(kOp, "page_table", tensors.page_table, DType::kI32, {kAnyExtent, kAnyExtent});
  const int64_t requests = tensors.page_table.shape[0];
  internal::check_range(kOp, "page_table.shape[0]", requests, 0, problem.max_requests);
  internal::check_range(kOp, "page_table.shape[1]", tensors.page_table.shape[1], 0,
                        problem.max_pages);
  check_tensor(kOp, "kv_len", tensors.kv_len, DType::kI32, {requests});
  check_tensor(kOp, "q_indptr", tensors.q_indptr, DType::kI32, {requests + 1});
  check_tensor(kOp, "out", tensors.out, DType::kBf16, {rows, heads, kLatentDim});
  check_tensor(kOp, "lse", tensors.lse, DType::kF32, {rows, heads});
}

}  // namespace

namespace internal {

DenseMlaKeys dense_mla_keys(const DenseMlaProblem& problem, const DenseMlaTensors& tensors) {
  const ConstTensorView& kv = tensors.kv;
  const auto element = static_cast<int64_t>(size_of(kv.dtype));
  DenseMlaKeys keys;
  keys.base = static_cast<const uint8_t*>(kv.data);
  keys.page_size = problem.page_size;
  keys.format = problem.row_format;
  if (kv.dtype == DType::kU8) {
    keys.num_pages = kv.shape[0];
    keys.page_stride_bytes = kv.stride[0];
    keys.row_stride_bytes = sparse_mla_row_bytes(problem.row_format, problem.head_dim_qk);
  } else if (kv.rank == 4) {
    keys.num_pages = kv.shape[0];
    keys.page_stride_bytes = kv.stride[0] * element;
    keys.row_stride_bytes = kv.stride[1] * element;
    keys.head_stride_bytes = kv.stride[2] * element;
  } else {
    keys.num_pages = kv.shape[0] / problem.page_size;
    keys.row_stride_bytes = kv.stride[0] * element;
    keys.page_stride_bytes = problem.page_size * keys.row_stride_bytes;
  }
  keys.page_table = static_cast<const int32_t*>(tensors.page_table.data);
  keys.table_stride = tensors.page_table.stride[0];
  keys.table_width = tensors.page_table.shape[1];
  keys.kv_len = access<const int32_t, 1>(tensors.kv_len);
  return keys;
}

}  // namespace internal

DenseMla DenseMla::plan(const DenseMlaProblem& problem, const Device& device,
                        const Options& options) {
  check_problem(problem);
  return DenseMla(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
