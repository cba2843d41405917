#include "fovea/swa_decode.h"

#include <limits>
#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/core/row_layout.h"
#include "src/mla/sparse_mla_impl.h"
#include "src/mla/swa_decode_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "swa_decode";
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

constexpr internal::Implementation<SwaDecodeProblem, SwaDecodeTensors> kImplementations[] = {
    {"cuda_sm90", DeviceKind::kCuda, internal::cuda_sm90_available,
     internal::swa_decode_cuda_supports, internal::swa_decode_cuda_sm90_workspace, nullptr,
     internal::swa_decode_cuda_sm90, internal::swa_decode_cuda_sm90_preferred},
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::swa_decode_cuda_supports, internal::swa_decode_cuda_workspace, nullptr,
     internal::swa_decode_cuda_portable},
    {"cpu_avx512bf16", DeviceKind::kCpu, internal::sparse_mla_cpu_avx512bf16_available, nullptr,
     internal::swa_decode_cpu_avx512bf16_workspace, internal::swa_decode_cpu_avx512bf16},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::swa_decode_cpu_workspace,
     internal::swa_decode_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::swa_decode_ref_workspace,
     internal::swa_decode_ref},
};

const internal::OperatorRegistration kRegistration("mla", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const SwaDecodeProblem& problem) {
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMaxInt32);
  internal::check_range(kOp, "num_heads", problem.num_heads, 1, kMaxInt32);
  internal::check_range(kOp, "width", problem.width, 1, kMaxInt32);
  internal::check_range(kOp, "window", problem.window, 1, kMaxInt32);
  internal::check_range(kOp, "fixed_splits", problem.fixed_splits, 0,
                        std::numeric_limits<int64_t>::max());
  // Bytes of the workspace, a few copies of all lists, are counted in 64 bits.
  constexpr int64_t kMaxElements = std::numeric_limits<int64_t>::max() / 64;
  internal::check_range(kOp, "max_rows", problem.max_rows, 0,
                        kMaxElements / (internal::swa_columns(problem) + problem.num_heads + 1));
  internal::check_positive_finite(kOp, "softmax_scale", problem.softmax_scale);
  const RowFormat format = problem.row_format;
  if (format != RowFormat::kR512 && format != RowFormat::kV4 && format != RowFormat::kBf16) {
    internal::invalid(kOp, "row_format = " + std::string(to_string(format)) +
                               ", expected r512, v4 or bf16: rows of 512 channels");
  }
  internal::check_range(kOp, "page_size", problem.page_size, format == RowFormat::kBf16 ? 0 : 1,
                        kMaxInt32);
}

// A list of at least `rows` rows, of either integer type.
void check_list(const char* name, const ConstTensorView& list, const ConstTensorView& by_rows,
                int64_t rows, int64_t width) {
  const DType type = list.dtype == DType::kI64 ? DType::kI64 : DType::kI32;
  if (width > 0) {
    internal::check_tensor(kOp, name, by_rows, type, {internal::kAnyExtent, width});
  } else {
    internal::check_tensor(kOp, name, by_rows, type, {internal::kAnyExtent});
  }
  if (by_rows.shape[0] < rows) {
    internal::invalid(kOp, std::string(name) + " = " + to_string(list) + ", expected at least " +
                               std::to_string(rows) + " rows, one for each of q");
  }
}

void check_kv(const SwaDecodeProblem& problem, const SwaDecodeTensors& tensors) {
  using internal::kAnyExtent;
  const ConstTensorView& kv = tensors.kv;
  const RowFormat format = problem.row_format;
  if (format != RowFormat::kR512 && tensors.inv_scale.defined()) {
    internal::invalid(kOp, "inv_scale is given, but rows of " + std::string(to_string(format)) +
                               " carry their own scale");
  }
  if (problem.page_size == 0) {
    internal::check_tensor(kOp, "kv", kv, DType::kBf16, {kAnyExtent, kLatentDim});
    return;
  }
  internal::check_tensor(kOp, "kv", kv, DType::kU8, {kAnyExtent, kAnyExtent});
  const int64_t needed = problem.page_size * internal::row_bytes(format, kLatentDim);
  if (kv.shape[1] < needed) {
    internal::invalid(kOp, "kv.shape[1] = " + std::to_string(kv.shape[1]) +
                               " page bytes, expected at least " + std::to_string(needed) +
                               " (page_size " + std::to_string(problem.page_size) + " rows of " +
                               std::string(to_string(format)) + ")");
  }
  if (format != RowFormat::kR512) return;
  const DType type = tensors.inv_scale.dtype == DType::kBf16 ? DType::kBf16 : DType::kF32;
  internal::check_tensor(kOp, "inv_scale", tensors.inv_scale, type,
                         {kv.shape[0] * problem.page_size, 1});
}

void check_tensors(const SwaDecodeProblem& problem, const SwaDecodeTensors& tensors) {
  using internal::check_tensor;
  const int64_t heads = problem.num_heads;
  check_tensor(kOp, "q", tensors.q, DType::kBf16, {internal::kAnyExtent, heads, kLatentDim});
  const int64_t rows = tensors.q.shape[0];
  internal::check_range(kOp, "q.shape[0]", rows, 0, problem.max_rows);
  check_kv(problem, tensors);
  check_list("swa_indices", tensors.swa_indices, internal::swa_index_rows(tensors), rows,
             problem.width);
  check_list("swa_lens", tensors.swa_lens, tensors.swa_lens, rows, 0);
  internal::check_optional(kOp, "sink", tensors.sink, DType::kF32, {heads});
  check_tensor(kOp, "out", tensors.out, DType::kBf16, {rows, heads, kLatentDim});
  internal::check_optional(kOp, "lse", tensors.lse, DType::kF32, {rows, heads});
}

}  // namespace

namespace internal {

ConstTensorView swa_index_rows(const SwaDecodeTensors& tensors) {
  ConstTensorView rows = tensors.swa_indices;
  if (rows.rank != 3 || (rows.shape[0] != 1 && rows.shape[1] != 1)) return rows;
  // [1, T, Wi] loses its first axis, [T, 1, Wi] its second; with one row they are the same.
  const int taken = rows.shape[0] == 1 ? 1 : 0;
  rows.shape[0] = rows.shape[static_cast<size_t>(taken)];
  rows.stride[0] = rows.stride[static_cast<size_t>(taken)];
  rows.shape[1] = rows.shape[2];
  rows.stride[1] = rows.stride[2];
  rows.rank = 2;
  return rows;
}

SparseMlaProblem swa_sparse_problem(const SwaDecodeProblem& problem) {
  SparseMlaProblem sparse;
  sparse.max_rows = problem.max_rows;
  sparse.num_heads = problem.num_heads;
  sparse.head_dim_qk = kLatentDim;
  sparse.topk = swa_columns(problem);
  sparse.softmax_scale = problem.softmax_scale;
  sparse.row_format = problem.row_format;
  sparse.page_size = problem.page_size;
  sparse.extra_row_format = problem.row_format;
  sparse.extra_page_size = problem.page_size;
  sparse.empty_lse = problem.empty_lse;
  sparse.fixed_splits = problem.fixed_splits;
  return sparse;
}

Refusal swa_decode_cuda_sm90_preferred(const SwaDecodeProblem& problem) {
  const SparseMlaProblem sparse = swa_sparse_problem(problem);
  if (sparse_mla_cuda_sm90_window_takes(sparse)) return {};
  return sparse_mla_cuda_sm90_preferred(sparse);
}

SwaMemory::SwaMemory(const SwaDecodeProblem& problem, WorkspaceCutter& cutter)
    : indices(cutter.take<int32_t>(problem.max_rows * swa_columns(problem))),
      lens(cutter.take<int32_t>(problem.max_rows)),
      lse(cutter.take<float>(problem.max_rows * problem.num_heads)) {}

size_t swa_memory_bytes(const SwaDecodeProblem& problem) {
  WorkspaceCutter cutter(Workspace{});
  SwaMemory(problem, cutter);
  return cutter.used_bytes();
}

SparseMlaTensors swa_sparse_tensors(const SwaDecodeProblem& problem,
                                    const SwaDecodeTensors& tensors, const SwaMemory& memory) {
  const int64_t rows = tensors.q.shape[0], columns = swa_columns(problem);
  SparseMlaTensors sparse;
  sparse.q = tensors.q;
  sparse.kv = tensors.kv;
  sparse.inv_scale = tensors.inv_scale;
  sparse.sink = tensors.sink;
  sparse.out = tensors.out;
  sparse.lse = tensors.lse.defined()
                   ? tensors.lse
                   : make_tensor(memory.lse, DType::kF32, {rows, problem.num_heads});
  if (tensors.swa_indices.dtype == DType::kI64) {
    sparse.indices =
        make_tensor(static_cast<const void*>(memory.indices), DType::kI32, {rows, columns});
  } else {
    sparse.indices = swa_index_rows(tensors);
    sparse.indices.shape[0] = rows;
    sparse.indices.shape[1] = columns;
  }
  if (tensors.swa_lens.dtype == DType::kI64) {
    sparse.topk_length = make_tensor(static_cast<const void*>(memory.lens), DType::kI32, {rows});
  } else {
    sparse.topk_length = tensors.swa_lens;
    sparse.topk_length.shape[0] = rows;
  }
  return sparse;
}

}  // namespace internal

SwaDecode SwaDecode::plan(const SwaDecodeProblem& problem, const Device& device,
                          const Options& options) {
  check_problem(problem);
  return SwaDecode(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
