#include "fovea/kda_commit.h"

#include <string>

#include "src/core/check.h"
#include "src/kda/kda_commit_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "kda_commit";

constexpr internal::Implementation<KdaCommitProblem, KdaCommitTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::kda_commit_cuda_supports, internal::kda_commit_cuda_workspace, nullptr,
     internal::kda_commit_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::kda_commit_cpu_workspace,
     internal::kda_commit_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::kda_commit_ref_workspace,
     internal::kda_commit_ref},
};

const internal::OperatorRegistration kRegistration("kda", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const KdaCommitProblem& problem) {
  constexpr int64_t kMax = internal::kMaxKdaCount, kMaxHeadDim = 256;
  internal::check_range(kOp, "num_value_heads", problem.num_value_heads, 1, kMax);
  internal::check_range(kOp, "head_dim_k", problem.head_dim_k, 1, kMaxHeadDim);
  internal::check_range(kOp, "head_dim_v", problem.head_dim_v, 1, kMaxHeadDim);
  internal::check_float_type(kOp, "state_dtype", problem.state_dtype);
  if (problem.mode > VerifyMode::kRecords) internal::invalid(kOp, "mode is none of VerifyMode");
  if (problem.window_layout > WindowLayout::kDw) {
    internal::invalid(kOp, "window_layout is none of WindowLayout");
  }
  internal::check_range(kOp, "rows_per_request", problem.rows_per_request, 1, kMax);
  internal::check_range(kOp, "max_requests", problem.max_requests, 0, kMax);
  internal::check_range(kOp, "num_layers", problem.num_layers, 0, kMax);
}

// check_tensor with the axis [L] in front where the call has many layers.
void check_layered(const KdaCommitProblem& problem, const char* name, const ConstTensorView& tensor,
                   DType dtype, std::initializer_list<int64_t> one_layer,
                   std::initializer_list<int64_t> layers) {
  internal::check_tensor(kOp, name, tensor, dtype, problem.num_layers > 0 ? layers : one_layer);
}

// States and records; the pool and what the verify left.
void check_states(const KdaCommitProblem& problem, const KdaCommitTensors& tensors,
                  int64_t requests) {
  const int64_t heads = problem.num_value_heads, rows = problem.rows_per_request;
  const int64_t dim_k = problem.head_dim_k, dim_v = problem.head_dim_v;
  const int64_t layers = problem.num_layers;
  if (problem.mode == VerifyMode::kStates) {
    check_layered(problem, "scratch", tensors.scratch, DType::kF32,
                  {requests, rows, heads, dim_v, dim_k},
                  {layers, requests, rows, heads, dim_v * dim_k});
  } else {
    check_layered(problem, "scratch", tensors.scratch, DType::kF32,
                  {requests, rows, heads, 2 * dim_k + dim_v},
                  {layers, requests, rows, heads, 2 * dim_k + dim_v});
  }
  check_layered(problem, "state", tensors.state, problem.state_dtype,
                {internal::kAnyExtent, heads, dim_v, dim_k},
                {layers, internal::kAnyExtent, heads, dim_v, dim_k});
  internal::check_no_aliasing(kOp, "state", tensors.state);
}

void check_windows(const KdaCommitProblem& problem, const KdaCommitTensors& tensors,
                   int64_t requests, int64_t slots) {
  if (!tensors.window_scratch.defined()) {
    if (tensors.window_state.defined()) {
      internal::invalid(kOp, "window_scratch is missing, but there is a window_state");
    }
    return;
  }
  const int64_t rows = problem.rows_per_request, layers = problem.num_layers;
  check_layered(problem, "window_scratch", tensors.window_scratch, DType::kBf16,
                {requests, rows, kConvHistory, internal::kAnyExtent},
                {layers, requests, rows, kConvHistory, internal::kAnyExtent});
  const int64_t channels =
      tensors.window_scratch.shape[static_cast<size_t>(tensors.window_scratch.rank - 1)];
  if (problem.window_layout == WindowLayout::kWd) {
    check_layered(problem, "window_state", tensors.window_state, DType::kBf16,
                  {slots, kConvHistory, channels}, {layers, slots, kConvHistory, channels});
  } else {
    check_layered(problem, "window_state", tensors.window_state, DType::kBf16,
                  {slots, channels, kConvHistory}, {layers, slots, channels, kConvHistory});
  }
  internal::check_no_aliasing(kOp, "window_state", tensors.window_state);
}

void check_tensors(const KdaCommitProblem& problem, const KdaCommitTensors& tensors) {
  internal::check_tensor(kOp, "accepted", tensors.accepted, DType::kI32, {internal::kAnyExtent});
  const int64_t requests = tensors.accepted.shape[0];
  internal::check_range(kOp, "accepted.shape[0]", requests, 0, problem.max_requests);
  internal::check_tensor(kOp, "slot", tensors.slot, DType::kI32, {requests});
  internal::check_slots(kOp, "in_slot", tensors.in_slot, requests);
  internal::check_optional(kOp, "has_initial_state", tensors.has_initial_state, DType::kU8,
                           {requests});
  internal::check_slots(kOp, "parent", tensors.parent, problem.rows_per_request);
  internal::check_slots(kOp, "track_slot", tensors.track_slot, requests);
  if (tensors.track_slot.defined() != tensors.track_accepted.defined()) {
    internal::invalid(kOp, "track_slot and track_accepted come together; pass both or none");
  }
  internal::check_slots(kOp, "track_accepted", tensors.track_accepted, requests);
  check_states(problem, tensors, requests);
  const int64_t slots = tensors.state.shape[problem.num_layers > 0 ? 1 : 0];
  internal::check_range(kOp, "slots of state", slots, 0, internal::kMaxKdaCount);
  check_windows(problem, tensors, requests, slots);
  internal::check_report(kOp, tensors.report, problem.check);
}

}  // namespace

namespace internal {

int64_t kda_commit_check_elements(const KdaCommitProblem& problem) {
  return problem.check ? fault_scratch_elements(problem.max_requests, 0) : 0;
}

void judge_kda_commit(const KdaCommitProblem& problem, const KdaCommitTensors& tensors,
                      int64_t* scratch) {
  if (!problem.check) return;
  CommitContents contents;
  contents.in_slot = tensors.in_slot;
  contents.slot = tensors.slot;
  contents.accepted = tensors.accepted;
  contents.track_slot = tensors.track_slot;
  contents.track_accepted = tensors.track_accepted;
  contents.slots = CommitLists(problem, tensors).slots;
  contents.rows_per_request = problem.rows_per_request;
  report_fault(kOp, find_commit_fault(contents, scratch), tensors.report);
}

}  // namespace internal

KdaCommit KdaCommit::plan(const KdaCommitProblem& problem, const Device& device,
                          const Options& options) {
  check_problem(problem);
  return KdaCommit(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
