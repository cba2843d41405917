#include "src/cache/row_codec.h"

#include <limits>
#include <string>

#include "src/core/check.h"
#include "src/core/row_layout.h"

namespace fovea {
namespace {

// Far above any model, and small enough that no product of page_size and width overflows.
constexpr int64_t kMaxWidth = std::numeric_limits<int32_t>::max();

void check_width(const char* op, RowFormat format, int64_t width) {
  if (format == RowFormat::kV32) {
    internal::check_range(op, "width (v32)", width, internal::kV32Width, internal::kV32Width);
  } else if (format == RowFormat::kV4) {
    internal::check_range(op, "width (v4)", width, internal::kV4Width, internal::kV4Width);
  } else if (format == RowFormat::kR512) {
    internal::check_range(op, "width (r512)", width, internal::kR512Width, internal::kR512Width);
  } else if (format == RowFormat::kF576) {
    internal::check_range(op, "width (f576)", width, internal::kF576Width, internal::kF576Width);
  } else {
    internal::check_range(op, "width", width, 1, kMaxWidth);
  }
}

}  // namespace

int64_t page_bytes(RowFormat format, int64_t page_size, int64_t width) {
  constexpr char kName[] = "page_bytes";
  internal::check_range(kName, "page_size", page_size, 1, 256);
  check_width(kName, format, width);
  const int64_t bytes = page_size * internal::row_bytes(format, width);
  if (format != RowFormat::kV4) return bytes;
  // Pages of public engines are whole data rows.
  return (bytes + internal::kV4DataBytes - 1) / internal::kV4DataBytes * internal::kV4DataBytes;
}

namespace internal {

void check_codec_problem(const char* op, const RowCodecProblem& problem) {
  check_range(op, "max_rows", problem.max_rows, 0, std::numeric_limits<int64_t>::max());
  // Only a pool given as bf16 [S, D] has no pages; whether it is one, the tensor tells.
  check_range(op, "page_size", problem.page_size, problem.row_format == RowFormat::kBf16 ? 0 : 1,
              256);
  check_width(op, problem.row_format, problem.width);
  if (problem.row_format == RowFormat::kF576) check_positive_finite(op, "k_scale", problem.k_scale);
}

void check_codec_pool(const char* op, const RowCodecProblem& problem, const ConstTensorView& pool) {
  if (problem.row_format == RowFormat::kBf16 && pool.dtype == DType::kBf16) {
    check_tensor(op, "pool", pool, DType::kBf16, {kAnyExtent, problem.width});
    return;
  }
  check_tensor(op, "pool", pool, DType::kU8, {kAnyExtent, kAnyExtent});
  if (problem.page_size < 1) {
    invalid(op, "page_size = 0 with pool = " + to_string(pool) +
                    ", expected 1..256; only a pool given as bf16 [S, D] has no pages");
  }
  const int64_t needed = problem.page_size * row_bytes(problem.row_format, problem.width);
  if (pool.shape[1] < needed) {
    invalid(op, "pool = " + to_string(pool) + ", expected at least " + std::to_string(needed) +
                    " bytes per page: " + std::to_string(problem.page_size) + " rows of " +
                    std::string(to_string(problem.row_format)));
  }
}

void check_codec_scales(const char* op, const RowCodecProblem& problem, const ConstTensorView& pool,
                        const ConstTensorView& inv_scale) {
  if (problem.row_format != RowFormat::kR512) {
    if (!inv_scale.defined()) return;
    invalid(op, "inv_scale = " + to_string(inv_scale) +
                    " with row_format = " + std::string(to_string(problem.row_format)) +
                    ", expected none: only r512 rows keep their scales beside the pool");
  }
  const DType type = inv_scale.dtype == DType::kBf16 ? DType::kBf16 : DType::kF32;
  check_tensor(op, "inv_scale", inv_scale, type, {pool.shape[0] * problem.page_size, 1});
}

void check_codec_rows(const char* op, const RowCodecProblem& problem, const ConstTensorView& slots,
                      const char* rows_name, const ConstTensorView& rows, int64_t row_elements) {
  check_tensor(op, "slots", slots, DType::kI32, {kAnyExtent});
  check_range(op, "slots.shape[0]", slots.shape[0], 0, problem.max_rows);
  check_tensor(op, rows_name, rows, DType::kBf16, {slots.shape[0], row_elements});
}

void check_no_overlap(const char* op, const char* name, const ConstTensorView& tensor,
                      int64_t row_elements) {
  if (tensor.shape[0] <= 1 || tensor.stride[0] >= row_elements) return;
  invalid(op, std::string(name) + ".stride[0] = " + std::to_string(tensor.stride[0]) +
                  ", expected at least " + std::to_string(row_elements) +
                  "; its rows overlap and are written");
}

}  // namespace internal
}  // namespace fovea
