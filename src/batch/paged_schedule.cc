#include "src/batch/paged_schedule_impl.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"

namespace fovea {
namespace {

constexpr char kOp[] = "paged_schedule";

constexpr internal::Implementation<PagedScheduleProblem, PagedScheduleTensors> kImplementations[] =
    {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr,
         internal::paged_schedule_cuda_workspace, nullptr, internal::paged_schedule_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::paged_schedule_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::paged_schedule_ref},
};

const internal::OperatorRegistration kRegistration("batch", kOp, [] {
  return internal::list_implementations(kImplementations);
});

// Group numbers and worker counts are stored as i32.
using internal::kMaxInt32;

void check_tensors(const PagedScheduleProblem& problem, const PagedScheduleTensors& tensors) {
  internal::check_tensor(kOp, "row_len", tensors.row_len, DType::kI32, {internal::kAnyExtent});
  const int64_t rows = tensors.row_len.shape[0];
  internal::check_range(kOp, "row_len.shape[0]", rows, 0, problem.max_rows);
  if (rows % problem.rows_per_group != 0) {
    internal::invalid(kOp, "row_len.shape[0] = " + std::to_string(rows) +
                               ", expected a multiple of rows_per_group = " +
                               std::to_string(problem.rows_per_group));
  }
  internal::check_tensor(kOp, "schedule", tensors.schedule, DType::kI32, {problem.workers + 1, 2});
}

}  // namespace

PagedSchedule PagedSchedule::plan(const PagedScheduleProblem& problem, const Device& device,
                                  const Options& options) {
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMaxInt32);
  internal::check_range(kOp, "workers", problem.workers, 1, kMaxInt32 - 1);
  internal::check_range(kOp, "rows_per_group", problem.rows_per_group, 1, kMaxInt32);
  return PagedSchedule(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
