#include "fovea/sparse_mla.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/mla/sparse_mla_cache.h"
#include "src/mla/sparse_mla_impl.h"
#include "src/mla/sparse_mla_schedule.h"

namespace fovea {
namespace {

constexpr char kOp[] = "sparse_mla";
// Far more than any device has workers; bounds the workspace.
constexpr int64_t kMaxSplitParts = 65536;

internal::Refusal refuse_logit_cap(const SparseMlaProblem& problem) {
  if (problem.logit_cap == 0) return {};
  return "has no logit_cap, got " + std::to_string(problem.logit_cap);
}

constexpr internal::Implementation<SparseMlaProblem, SparseMlaTensors> kImplementations[] = {
    {"cuda_sm90_few_heads", DeviceKind::kCuda, internal::cuda_sm90_available,
     internal::sparse_mla_cuda_supports, internal::sparse_mla_cuda_sm90_few_heads_workspace,
     nullptr, internal::sparse_mla_cuda_sm90_few_heads,
     internal::sparse_mla_cuda_sm90_few_heads_preferred},
    {"cuda_sm90_rows", DeviceKind::kCuda, internal::cuda_sm90_available,
     internal::sparse_mla_cuda_sm90_rows_supports, internal::sparse_mla_cuda_sm90_rows_workspace,
     nullptr, internal::sparse_mla_cuda_sm90_rows, internal::sparse_mla_cuda_sm90_rows_preferred},
    {"cuda_sm90_window", DeviceKind::kCuda, internal::cuda_sm90_available,
     internal::sparse_mla_cuda_sm90_window_supports, nullptr, nullptr,
     internal::sparse_mla_cuda_sm90_window},
    {"cuda_sm90", DeviceKind::kCuda, internal::cuda_sm90_available,
     internal::sparse_mla_cuda_supports, internal::sparse_mla_cuda_sm90_workspace, nullptr,
     internal::sparse_mla_cuda_sm90, internal::sparse_mla_cuda_sm90_preferred},
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::sparse_mla_cuda_supports, internal::sparse_mla_cuda_workspace, nullptr,
     internal::sparse_mla_cuda_portable},
    {"cpu_avx512bf16", DeviceKind::kCpu, internal::sparse_mla_cpu_avx512bf16_available,
     refuse_logit_cap, internal::sparse_mla_cpu_avx512bf16_workspace,
     internal::sparse_mla_cpu_avx512bf16},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::sparse_mla_cpu_workspace,
     internal::sparse_mla_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::sparse_mla_ref_workspace,
     internal::sparse_mla_ref},
};

const internal::OperatorRegistration kRegistration("mla", kOp, [] {
  return internal::list_implementations(kImplementations);
});

// `prefix` is "" or "extra_".
void check_cache_problem(const std::string& prefix, RowFormat format, int64_t page_size,
                         int64_t head_dim_qk) {
  const std::string row_format = prefix + "row_format";
  const std::string name = prefix + "page_size";
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (format == RowFormat::kI132) {
    internal::invalid(kOp, row_format + " = i132, expected bf16, v32, v4, r512 or f576");
  }
  internal::check_range(kOp, name.c_str(), page_size, 0, kMax);
  if (format == RowFormat::kBf16) return;
  const std::string packed = row_format + " " + std::string(to_string(format));
  if (page_size == 0) {
    internal::invalid(
        kOp, name + " = 0, but " + packed + " needs a packed pool; give the tokens per page");
  }
  const bool is_512 = format == RowFormat::kV4 || format == RowFormat::kR512;
  if (is_512 && head_dim_qk != 512) {
    internal::invalid(kOp, "head_dim_qk = " + std::to_string(head_dim_qk) + ", but " + packed +
                               " needs 512; use bf16, v32 or f576 rows for 576 channels");
  }
  if (!is_512 && head_dim_qk != 576) {
    internal::invalid(kOp, "head_dim_qk = " + std::to_string(head_dim_qk) + ", but " + packed +
                               " needs 576; append zeros as the rope part of q or use bf16");
  }
}

// The scales of f576. One k_scale serves both caches, so rows that are no codes leave it at 1.
void check_scales(const SparseMlaProblem& problem) {
  internal::check_positive_finite(kOp, "softmax_scale", problem.softmax_scale);
  internal::check_positive_finite(kOp, "q_scale", problem.q_scale);
  internal::check_positive_finite(kOp, "k_scale", problem.k_scale);
  if (problem.q_scale != 1 && problem.row_format != RowFormat::kF576) {
    internal::invalid(kOp, "q_scale = " + std::to_string(problem.q_scale) + ", but row_format " +
                               std::string(to_string(problem.row_format)) +
                               " takes bf16 queries: expected 1");
  }
  for (const RowFormat format : {problem.row_format, *problem.extra_row_format}) {
    if (problem.k_scale == 1 || format == RowFormat::kF576) continue;
    internal::invalid(kOp, "k_scale = " + std::to_string(problem.k_scale) + ", but rows of " +
                               std::string(to_string(format)) +
                               " carry their own scale: expected 1");
  }
  const auto product = static_cast<float>(internal::logit_scale(problem));
  if (!std::isfinite(product) || product == 0) {
    internal::invalid(kOp, "softmax_scale * q_scale * k_scale = " + std::to_string(product) +
                               " leaves the range of fp32");
  }
}

// What extends the lists: a page table, the inverse rotation.
void check_extensions(const SparseMlaProblem& problem) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  internal::check_range(kOp, "extra_max_pages", problem.extra_max_pages, 0, kMax);
  internal::check_range(kOp, "inverse_rope_dim", problem.inverse_rope_dim, 0, kLatentDim);
  if (problem.inverse_rope_dim % 2 != 0) {
    internal::invalid(kOp, "inverse_rope_dim = " + std::to_string(problem.inverse_rope_dim) +
                               ", expected an even number of channels");
  }
  if (problem.inverse_rope_dim > 0 && problem.head_dim_qk != kLatentDim) {
    internal::invalid(kOp, "inverse_rope_dim = " + std::to_string(problem.inverse_rope_dim) +
                               " with head_dim_qk = " + std::to_string(problem.head_dim_qk) +
                               ", whose values hold no rope part; expected head_dim_qk = 512");
  }
}

SparseMlaProblem check_problem(SparseMlaProblem problem) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMaxWidth = std::numeric_limits<int32_t>::max();
  if (!problem.extra_row_format) problem.extra_row_format = problem.row_format;
  if (!problem.extra_page_size) problem.extra_page_size = problem.page_size;
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMax);
  internal::check_range(kOp, "num_heads", problem.num_heads, 1, kMaxWidth);
  internal::check_range(kOp, "topk", problem.topk, 0, kMaxWidth);
  internal::check_range(kOp, "extra_topk", problem.extra_topk, 0, kMaxWidth);
  internal::check_range(kOp, "fixed_splits", problem.fixed_splits, 0, kMax);
  internal::check_range(kOp, "split_parts", problem.split_parts, 0, kMaxSplitParts);
  if (problem.split_parts > 0 && problem.fixed_splits > 0) {
    internal::invalid(kOp, "split_parts = " + std::to_string(problem.split_parts) +
                               " and fixed_splits = " + std::to_string(problem.fixed_splits) +
                               " both cut the rows; give one of them");
  }
  if (problem.head_dim_qk != 576 && problem.head_dim_qk != 512) {
    internal::invalid(
        kOp, "head_dim_qk = " + std::to_string(problem.head_dim_qk) + ", expected 576 or 512");
  }
  if (!std::isfinite(problem.logit_cap) || problem.logit_cap < 0) {
    internal::invalid(kOp, "logit_cap = " + std::to_string(problem.logit_cap) +
                               ", expected a finite value >= 0 (0: no cap)");
  }
  check_cache_problem("", problem.row_format, problem.page_size, problem.head_dim_qk);
  check_cache_problem("extra_", *problem.extra_row_format, *problem.extra_page_size,
                      problem.head_dim_qk);
  check_scales(problem);
  check_extensions(problem);
  return problem;
}

void check_cache(const std::string& prefix, const ConstTensorView& kv,
                 const ConstTensorView& inv_scale, RowFormat format, int64_t page_size,
                 int64_t head_dim_qk) {
  using internal::kAnyExtent;
  const std::string name = prefix + "kv", scale_name = prefix + "inv_scale";
  if (format != RowFormat::kR512 && inv_scale.defined()) {
    internal::invalid(kOp, scale_name + " is given, but rows of " + std::string(to_string(format)) +
                               " carry their own scale");
  }
  if (page_size == 0) {
    internal::check_tensor(kOp, name.c_str(), kv, DType::kBf16, {kAnyExtent, head_dim_qk});
    return;
  }
  internal::check_tensor(kOp, name.c_str(), kv, DType::kU8, {kAnyExtent, kAnyExtent});
  if (format == RowFormat::kR512) {
    const DType type = inv_scale.dtype == DType::kBf16 ? DType::kBf16 : DType::kF32;
    internal::check_tensor(kOp, scale_name.c_str(), inv_scale, type, {kv.shape[0] * page_size, 1});
  }
  const int64_t needed = page_size * internal::row_bytes(format, head_dim_qk);
  if (kv.shape[1] < needed) {
    internal::invalid(kOp, name + ".shape[1] = " + std::to_string(kv.shape[1]) +
                               " page bytes, expected at least " + std::to_string(needed) + " (" +
                               prefix + "page_size " + std::to_string(page_size) + " rows of " +
                               std::string(to_string(format)) + ")");
  }
}

// The keys of the second cache as the leading ones of a request.
void check_page_table(const SparseMlaProblem& problem, const SparseMlaTensors& tensors,
                      int64_t rows) {
  using internal::check_tensor;
  if (tensors.extra_indices.defined() || tensors.extra_topk_length.defined()) {
    internal::invalid(kOp,
                      "extra_indices or extra_topk_length is given, but the plan has "
                      "extra_max_pages > 0; give extra_page_table, extra_len and row_to_request");
  }
  check_tensor(kOp, "extra_page_table", tensors.extra_page_table, DType::kI32,
               {internal::kAnyExtent, problem.extra_max_pages});
  check_tensor(kOp, "extra_len", tensors.extra_len, DType::kI32, {rows});
  check_tensor(kOp, "row_to_request", tensors.row_to_request, DType::kI32, {rows});
}

void check_extra(const SparseMlaProblem& problem, const SparseMlaTensors& tensors, int64_t rows) {
  if (problem.extra_max_pages > 0) {
    check_page_table(problem, tensors, rows);
  } else if (tensors.extra_page_table.defined() || tensors.extra_len.defined() ||
             tensors.row_to_request.defined()) {
    internal::invalid(kOp,
                      "extra_page_table, extra_len or row_to_request is given, but the plan has "
                      "extra_max_pages = 0; plan with the columns of the table");
  } else if (!tensors.extra_kv.defined() && !tensors.extra_indices.defined() &&
             problem.extra_topk == 0) {
    if (tensors.extra_topk_length.defined() || tensors.extra_inv_scale.defined()) {
      internal::invalid(
          kOp, "extra_topk_length or extra_inv_scale is given without extra_kv and extra_indices");
    }
    return;
  } else {
    internal::check_tensor(kOp, "extra_indices", tensors.extra_indices, DType::kI32,
                           {rows, problem.extra_topk});
    internal::check_optional(kOp, "extra_topk_length", tensors.extra_topk_length, DType::kI32,
                             {rows});
  }
  check_cache("extra_", tensors.extra_kv, tensors.extra_inv_scale, *problem.extra_row_format,
              *problem.extra_page_size, problem.head_dim_qk);
}

void check_rotation(const SparseMlaProblem& problem, const SparseMlaTensors& tensors,
                    int64_t rows) {
  if (problem.inverse_rope_dim == 0) {
    if (!tensors.inverse_rope.defined() && !tensors.positions.defined()) return;
    internal::invalid(kOp,
                      "inverse_rope or positions is given, but the plan has inverse_rope_dim = 0; "
                      "plan with the width of the table");
  }
  internal::check_tensor(kOp, "inverse_rope", tensors.inverse_rope, DType::kF32,
                         {internal::kAnyExtent, problem.inverse_rope_dim});
  internal::check_range(kOp, "inverse_rope.shape[0]", tensors.inverse_rope.shape[0], 1,
                        std::numeric_limits<int64_t>::max());
  internal::check_tensor(kOp, "positions", tensors.positions, DType::kI32, {rows});
}

void check_schedule(const SparseMlaProblem& problem, const SparseMlaTensors& tensors,
                    int64_t rows) {
  if (problem.split_parts > 0) {
    internal::check_tensor(kOp, "split_schedule", tensors.split_schedule, DType::kI32,
                           {problem.split_parts, internal::kSplitPartFields});
    internal::check_tensor(kOp, "split_indptr", tensors.split_indptr, DType::kI32, {rows + 1});
  } else if (tensors.split_schedule.defined() || tensors.split_indptr.defined()) {
    internal::invalid(kOp,
                      "split_schedule or split_indptr is given, but the plan has split_parts = 0; "
                      "plan with the number of parts");
  }
}

void check_tensors(const SparseMlaProblem& problem, const SparseMlaTensors& tensors) {
  using internal::check_optional;
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
  check_cache("", tensors.kv, tensors.inv_scale, problem.row_format, problem.page_size,
              problem.head_dim_qk);
  check_tensor(kOp, "indices", tensors.indices, DType::kI32, {rows, problem.topk});
  check_optional(kOp, "topk_length", tensors.topk_length, DType::kI32, {rows});
  check_optional(kOp, "sink", tensors.sink, DType::kF32, {heads});
  check_extra(problem, tensors, rows);
  check_schedule(problem, tensors, rows);
  check_rotation(problem, tensors, rows);
  check_tensor(kOp, "out", tensors.out, DType::kBf16, {rows, heads, kLatentDim});
  check_tensor(kOp, "lse", tensors.lse, DType::kF32, {rows, heads});
  check_optional(kOp, "max_logits", tensors.max_logits, DType::kF32, {rows, heads});
}

}  // namespace

namespace internal {

namespace {

bool all_rows_are_v32(const SparseMlaProblem& problem) {
  return problem.row_format == RowFormat::kV32 && *problem.extra_row_format == RowFormat::kV32;
}

}  // namespace

Refusal sparse_mla_cuda_sm90_few_heads_preferred(const SparseMlaProblem& problem) {
  // Blocks of 16 heads, so that more heads repeat the decoding; two are still faster than 64 heads.
  if (problem.num_heads > 32) {
    return "multiplies 16 heads, got num_heads " + std::to_string(problem.num_heads);
  }
  if (!all_rows_are_v32(problem)) return "is made for v32 rows";
  return {};
}

Refusal sparse_mla_cuda_sm90_rows_supports(const SparseMlaProblem& problem) {
  if (Refusal refusal = sparse_mla_cuda_supports(problem); !refusal.empty()) return refusal;
  for (const RowFormat format : {problem.row_format, *problem.extra_row_format}) {
    if (format != RowFormat::kBf16) {
      return "takes bf16 rows, got rows of " + std::string(to_string(format));
    }
  }
  if (problem.fixed_splits > 1) {
    return "takes rows whole, got fixed_splits " + std::to_string(problem.fixed_splits);
  }
  return refuse_logit_cap(problem);
}

Refusal sparse_mla_cuda_sm90_rows_preferred(const SparseMlaProblem& problem) {
  if (problem.num_heads <= 16) {
    return "multiplies 64 heads, got num_heads " + std::to_string(problem.num_heads);
  }
  // One for most multiprocessors of a GPU, each 64 heads of a row. max_rows may be any number.
  constexpr int64_t kFewUnits = 128;
  const int64_t groups = (problem.num_heads + 63) / 64;
  if (problem.max_rows < (kFewUnits + groups - 1) / groups) {
    return "takes rows whole, got max_rows " + std::to_string(problem.max_rows) +
           ", too few for all multiprocessors (2048 bf16 slots, 128 heads, 66 rows: 72 us, "
           "cuda_sm90 98)";
  }
  return {};
}

namespace {

bool has_scales_apart(RowFormat format) {
  return format == RowFormat::kV4 || format == RowFormat::kR512;
}

// Keys of a row. Slots of the first list count as whole groups of 8 where another list follows.
int64_t window_keys(const SparseMlaProblem& problem) {
  constexpr int64_t kStep = 8;
  if (problem.extra_topk == 0) return problem.topk;
  return (problem.topk + kStep - 1) / kStep * kStep + problem.extra_topk;
}
constexpr int64_t kWindowKeys = 128;

}  // namespace

bool sparse_mla_cuda_sm90_window_takes(const SparseMlaProblem& problem) {
  return has_scales_apart(problem.row_format) && has_scales_apart(*problem.extra_row_format) &&
         window_keys(problem) <= kWindowKeys && problem.fixed_splits <= 1 && problem.logit_cap == 0;
}

Refusal sparse_mla_cuda_sm90_window_supports(const SparseMlaProblem& problem) {
  if (Refusal refusal = sparse_mla_cuda_supports(problem);
      !refusal.empty() || sparse_mla_cuda_sm90_window_takes(problem)) {
    return refusal;
  }
  for (const RowFormat format : {problem.row_format, *problem.extra_row_format}) {
    if (!has_scales_apart(format))
      return "takes v4 and r512 rows, got rows of " + std::string(to_string(format));
  }
  if (window_keys(problem) > kWindowKeys) {
    return "takes lists of up to 128 slots, got topk " + std::to_string(problem.topk) +
           " and extra_topk " + std::to_string(problem.extra_topk);
  }
  if (problem.fixed_splits > 1) {
    return "takes rows whole, got fixed_splits " + std::to_string(problem.fixed_splits);
  }
  return refuse_logit_cap(problem);
}

Refusal sparse_mla_cuda_sm90_preferred(const SparseMlaProblem& problem) {
  if (problem.num_heads <= 16) {
    return "multiplies 64 heads, got num_heads " + std::to_string(problem.num_heads) +
           " (128 rows of 2048 v32 slots, 16 heads: 173 us, cuda_portable 176: no gain)";
  }
  return {};
}

namespace {

SparseMlaSegment make_segment(const ConstTensorView& kv, const ConstTensorView& inv_scale,
                              RowFormat format, int64_t page_size, int64_t head_dim_qk) {
  SparseMlaSegment segment;
  if (!kv.defined()) return segment;
  segment.base = static_cast<const uint8_t*>(kv.data);
  segment.num_pages = kv.shape[0];
  segment.page_size = std::max<int64_t>(page_size, 1);
  segment.page_stride_bytes = kv.stride[0] * static_cast<int64_t>(size_of(kv.dtype));
  segment.row_bytes = sparse_mla_row_bytes(format, head_dim_qk);
  segment.format = format;
  segment.inv_scale = row_scales<const uint8_t>(inv_scale);
  return segment;
}

}  // namespace

SparseMlaSegment primary_segment(const SparseMlaProblem& problem, const SparseMlaTensors& tensors) {
  SparseMlaSegment segment = make_segment(tensors.kv, tensors.inv_scale, problem.row_format,
                                          problem.page_size, problem.head_dim_qk);
  segment.indices = access<const int32_t, 2>(tensors.indices);
  segment.topk_length = access<const int32_t, 1>(tensors.topk_length);
  return segment;
}

SparseMlaSegment extra_segment(const SparseMlaProblem& problem, const SparseMlaTensors& tensors) {
  SparseMlaSegment segment =
      make_segment(tensors.extra_kv, tensors.extra_inv_scale, *problem.extra_row_format,
                   *problem.extra_page_size, problem.head_dim_qk);
  if (problem.extra_max_pages > 0) {
    segment.page_table = access<const int32_t, 2>(tensors.extra_page_table);
    segment.topk_length = access<const int32_t, 1>(tensors.extra_len);
    segment.row_to_request = access<const int32_t, 1>(tensors.row_to_request);
    segment.max_length = std::min(problem.extra_topk, problem.extra_max_pages * segment.page_size);
    return segment;
  }
  segment.indices = access<const int32_t, 2>(tensors.extra_indices);
  segment.topk_length = access<const int32_t, 1>(tensors.extra_topk_length);
  return segment;
}

}  // namespace internal

bool SparseMla::reads_split_schedule() const noexcept {
  return problem().split_parts > 0 && implementation().name.starts_with("cpu");
}

SparseMla SparseMla::plan(const SparseMlaProblem& problem, const Device& device,
                          const Options& options) {
  return SparseMla(internal::make_plan(kOp, kImplementations, check_problem(problem), device,
                                       options, check_tensors));
}

}  // namespace fovea
