#include "fovea/move_rows.h"

#include <limits>

#include "src/cache/move_rows_impl.h"
#include "src/cache/row_codec.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/core/row_layout.h"
#include "src/core/workspace.h"

namespace fovea {
namespace {

constexpr char kOp[] = "move_rows";

int64_t row_bytes_of(const MoveRowsProblem& problem) {
  return internal::row_bytes(problem.row_format, problem.width);
}

size_t workspace_bytes(const MoveRowsProblem& problem, const Device&) {
  internal::WorkspaceCutter cutter({});
  cutter.take<uint8_t>(problem.max_rows * row_bytes_of(problem));
  return cutter.used_bytes();
}

constexpr internal::Implementation<MoveRowsProblem, MoveRowsTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr, workspace_bytes,
     nullptr, internal::move_rows_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, workspace_bytes, internal::move_rows_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, workspace_bytes, internal::move_rows_ref},
};

const internal::OperatorRegistration kRegistration("cache", kOp, [] {
  return internal::list_implementations(kImplementations);
});

// What the checks of the codecs look at.
RowCodecProblem codec_problem(const MoveRowsProblem& problem) {
  return {problem.max_rows, problem.row_format, problem.page_size, problem.width};
}

void check_tensors(const MoveRowsProblem& problem, const MoveRowsTensors& tensors) {
  using internal::check_tensor;
  internal::check_codec_pool(kOp, codec_problem(problem), tensors.pool);
  check_tensor(kOp, "src_slots", tensors.src_slots, DType::kI32, {internal::kAnyExtent});
  const int64_t num_rows = tensors.src_slots.shape[0];
  internal::check_range(kOp, "src_slots.shape[0]", num_rows, 0, problem.max_rows);
  check_tensor(kOp, "dst_slots", tensors.dst_slots, DType::kI32, {num_rows});
  const int64_t page_elements = tensors.pool.dtype == DType::kBf16
                                    ? problem.width
                                    : problem.page_size * row_bytes_of(problem);
  internal::check_no_overlap(kOp, "pool", tensors.pool, page_elements);
}

}  // namespace

MoveRows MoveRows::plan(const MoveRowsProblem& problem, const Device& device,
                        const Options& options) {
  if (problem.row_format == RowFormat::kR512) {
    internal::invalid(kOp,
                      "row_format = r512, whose scales lie in another tensor; move its pages as "
                      "bf16 rows of width 256 and inv_scale as a bf16 pool [S, 1] (fp32: [S, 2])");
  }
  internal::check_codec_problem(kOp, codec_problem(problem));
  // The workspace and its rounding must be countable.
  constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max() / 2;
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMaxBytes / row_bytes_of(problem));
  return MoveRows(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
