#include "src/batch/split_schedule_impl.h"
#include "src/core/check.h"
#include "src/core/implementation_list.h"

namespace fovea {
namespace {

constexpr char kOp[] = "split_schedule";

constexpr internal::Implementation<SplitScheduleProblem, SplitScheduleTensors> kImplementations[] =
    {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available, nullptr,
         internal::split_schedule_cuda_workspace, nullptr, internal::split_schedule_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::split_schedule_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, internal::split_schedule_ref},
};

const internal::OperatorRegistration kRegistration("batch", kOp, [] {
  return internal::list_implementations(kImplementations);
});

// Row numbers and piece counts, of which there are fewer than T + P, are stored as i32.
using internal::kMaxInt32;

void check_tensors(const SplitScheduleProblem& problem, const SplitScheduleTensors& tensors) {
  internal::check_tensor(kOp, "topk_length", tensors.topk_length, DType::kI32,
                         {internal::kAnyExtent});
  const int64_t rows = tensors.topk_length.shape[0];
  internal::check_range(kOp, "topk_length.shape[0]", rows, 0, problem.max_rows);
  internal::check_tensor(kOp, "split_schedule", tensors.split_schedule, DType::kI32,
                         {problem.parts, 8});
  internal::check_tensor(kOp, "split_indptr", tensors.split_indptr, DType::kI32, {rows + 1});
}

}  // namespace

SplitSchedule SplitSchedule::plan(const SplitScheduleProblem& problem, const Device& device,
                                  const Options& options) {
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMaxInt32 - 1);
  internal::check_range(kOp, "parts", problem.parts, 1, kMaxInt32 - problem.max_rows);
  return SplitSchedule(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
