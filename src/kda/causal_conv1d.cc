#include "fovea/causal_conv1d.h"

#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/kda/causal_conv1d_impl.h"
#include "src/kda/kda_checks.h"

namespace fovea {

std::string_view to_string(ConvMode mode) noexcept {
  switch (mode) {
    case ConvMode::kPrefill:
      return "prefill";
    case ConvMode::kUpdate:
      return "update";
    case ConvMode::kVerify:
      return "verify";
  }
  return "?";
}

std::string_view to_string(WindowLayout layout) noexcept {
  return layout == WindowLayout::kWd ? "wd" : "dw";
}

std::string_view to_string(ConvActivation activation) noexcept {
  return activation == ConvActivation::kSilu ? "silu" : "none";
}

namespace {

constexpr char kOp[] = "causal_conv1d";

size_t cpu_workspace_bytes(const CausalConv1dProblem& problem, const Device& device) {
  internal::WorkspaceCutter cutter({});
  internal::cut_conv_scratch(problem, device, &cutter);
  return cutter.used_bytes();
}

size_t ref_workspace_bytes(const CausalConv1dProblem& problem, const Device&) {
  internal::WorkspaceCutter cutter({});
  internal::cut_conv_check_scratch(problem, &cutter);
  return cutter.used_bytes();
}

constexpr internal::Implementation<CausalConv1dProblem, CausalConv1dTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::causal_conv1d_cuda_supports, internal::causal_conv1d_cuda_workspace, nullptr,
     internal::causal_conv1d_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, cpu_workspace_bytes, internal::causal_conv1d_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, ref_workspace_bytes, internal::causal_conv1d_ref},
};

const internal::OperatorRegistration kRegistration("kda", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const CausalConv1dProblem& problem) {
  constexpr int64_t kMax = internal::kMaxKdaCount;
  if (problem.mode > ConvMode::kVerify) internal::invalid(kOp, "mode is none of ConvMode");
  if (problem.activation > ConvActivation::kNone) {
    internal::invalid(kOp, "activation is none of ConvActivation");
  }
  if (problem.window_layout > WindowLayout::kDw) {
    internal::invalid(kOp, "window_layout is none of WindowLayout");
  }
  internal::check_range(kOp, "num_channels", problem.num_channels, 1, kMax);
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, kMax);
  const bool is_prefill = problem.mode == ConvMode::kPrefill;
  internal::check_range(kOp, "max_sequences", problem.max_sequences, 0, is_prefill ? kMax : 0);
  internal::check_range(kOp, "max_snapshots", problem.max_snapshots, 0, is_prefill ? kMax : 0);
  internal::check_range(kOp, "rows_per_request", problem.rows_per_request, 1,
                        problem.mode == ConvMode::kVerify ? kMax : 1);
  internal::check_float_type(kOp, "weight_dtype", problem.weight_dtype);
  internal::check_float_type(kOp, "bias_dtype", problem.bias_dtype);
}

// Entries (sequences, rows or requests) of the call.
int64_t check_mode(const CausalConv1dProblem& problem, const CausalConv1dTensors& tensors,
                   int64_t num_rows) {
  const auto refuse = [&](const ConstTensorView& tensor, const char* name) {
    if (!tensor.defined()) return;
    internal::invalid(
        kOp, std::string(name) + " is not taken in mode " + std::string(to_string(problem.mode)));
  };
  if (problem.mode != ConvMode::kPrefill) {
    refuse(tensors.q_indptr, "q_indptr");
    refuse(tensors.in_slot, "in_slot");
    refuse(tensors.out_slot, "out_slot");
    refuse(tensors.snapshot_seq, "snapshot_seq");
  }
  if (problem.mode != ConvMode::kVerify) {
    refuse(tensors.parent, "parent");
    refuse(tensors.window_scratch, "window_scratch");
  }
  switch (problem.mode) {
    case ConvMode::kPrefill:
      refuse(tensors.slot, "slot");
      internal::check_indptr(kOp, tensors.q_indptr, problem.max_sequences);
      return tensors.q_indptr.shape[0] - 1;
    case ConvMode::kUpdate:
      return num_rows;
    case ConvMode::kVerify:
      break;
  }
  if (num_rows % problem.rows_per_request != 0) {
    internal::invalid(kOp, "x.shape[0] = " + std::to_string(num_rows) +
                               ", expected a multiple of rows_per_request = " +
                               std::to_string(problem.rows_per_request));
  }
  const int64_t requests = num_rows / problem.rows_per_request;
  internal::check_slots(kOp, "parent", tensors.parent, problem.rows_per_request);
  internal::check_optional(
      kOp, "window_scratch", tensors.window_scratch, DType::kBf16,
      {requests, problem.rows_per_request, kConvHistory, problem.num_channels});
  if (tensors.window_scratch.defined()) {
    internal::check_no_aliasing(kOp, "window_scratch", tensors.window_scratch);
  }
  return requests;
}

void check_windows(const CausalConv1dProblem& problem, const CausalConv1dTensors& tensors,
                   int64_t entries) {
  internal::check_slots(kOp, "in_slot", tensors.in_slot, entries);
  internal::check_slots(kOp, "out_slot", tensors.out_slot, entries);
  internal::check_slots(kOp, "slot", tensors.slot, entries);
  internal::check_optional(kOp, "has_initial_state", tensors.has_initial_state, DType::kU8,
                           {entries});
  const bool has_slots =
      tensors.in_slot.defined() || tensors.out_slot.defined() || tensors.slot.defined();
  const TensorView& pool = tensors.window_state;
  if (!pool.defined()) {
    if (has_slots) internal::invalid(kOp, "window_state is missing, but there are slots for it");
    return;
  }
  const bool is_wd = problem.window_layout == WindowLayout::kWd;
  internal::check_tensor(kOp, "window_state", pool, DType::kBf16,
                         {internal::kAnyExtent, is_wd ? kConvHistory : problem.num_channels,
                          is_wd ? problem.num_channels : kConvHistory});
  // Without a slot list entry n belongs to sequence, row or request n.
  const bool is_exact = !has_slots && problem.mode == ConvMode::kPrefill;
  internal::check_range(kOp, "window_state.shape[0]", pool.shape[0], has_slots ? 0 : entries,
                        is_exact ? entries : internal::kMaxKdaCount);
  internal::check_no_aliasing(kOp, "window_state", pool);
}

void check_snapshots(const CausalConv1dProblem& problem, const CausalConv1dTensors& tensors) {
  if (!tensors.snapshot_seq.defined()) {
    if (tensors.snapshot_pos.defined() || tensors.snapshot_slot.defined()) {
      internal::invalid(kOp, "snapshot_seq is missing, but there are other lists of snapshots");
    }
    return;
  }
  internal::check_tensor(kOp, "snapshot_seq", tensors.snapshot_seq, DType::kI32,
                         {internal::kAnyExtent});
  const int64_t count = tensors.snapshot_seq.shape[0];
  internal::check_range(kOp, "snapshot_seq.shape[0]", count, 0, problem.max_snapshots);
  internal::check_tensor(kOp, "snapshot_pos", tensors.snapshot_pos, DType::kI32, {count});
  internal::check_tensor(kOp, "snapshot_slot", tensors.snapshot_slot, DType::kI32, {count});
  const bool has_slots = tensors.in_slot.defined() || tensors.out_slot.defined();
  if (count > 0 && !(tensors.window_state.defined() && has_slots)) {
    internal::invalid(kOp,
                      "snapshots need window_state as a pool: pass in_slot or out_slot, -1 for "
                      "sequences without one");
  }
}

void check_tensors(const CausalConv1dProblem& problem, const CausalConv1dTensors& tensors) {
  const int64_t rows = tensors.x.rank == 2 ? tensors.x.shape[0] : internal::kAnyExtent;
  internal::check_tensor(kOp, "x", tensors.x, DType::kBf16,
                         {internal::kAnyExtent, problem.num_channels});
  internal::check_range(kOp, "x.shape[0]", rows, 0, problem.max_rows);
  internal::check_tensor(kOp, "weight", tensors.weight, problem.weight_dtype,
                         {problem.num_channels, kConvWidth});
  internal::check_optional(kOp, "bias", tensors.bias, problem.bias_dtype, {problem.num_channels});
  internal::check_tensor(kOp, "out", tensors.out, DType::kBf16, {rows, problem.num_channels});
  internal::check_no_aliasing(kOp, "out", tensors.out);
  const int64_t entries = check_mode(problem, tensors, rows);
  check_windows(problem, tensors, entries);
  check_snapshots(problem, tensors);
  internal::check_report(kOp, tensors.report, problem.check);
}

}  // namespace

namespace internal {

void check_conv_contents(const CausalConv1dProblem& problem, const CausalConv1dTensors& tensors,
                         int64_t* scratch) {
  if (!problem.check) return;
  KdaContents contents;
  contents.num_rows = tensors.x.shape[0];
  contents.slots = tensors.window_state.defined() ? tensors.window_state.shape[0] : 0;
  contents.snapshot_interval = 1;
  contents.q_indptr = tensors.q_indptr;
  contents.in_slot = tensors.in_slot;
  contents.out_slot = tensors.out_slot;
  contents.snapshot_seq = tensors.snapshot_seq;
  contents.snapshot_pos = tensors.snapshot_pos;
  contents.snapshot_slot = tensors.snapshot_slot;
  if (tensors.slot.defined()) contents.out_slot = tensors.slot;
  contents.out_slots_are_read = problem.mode == ConvMode::kVerify;
  report_fault(kOp, find_fault(contents, scratch), tensors.report);
}

}  // namespace internal

CausalConv1d CausalConv1d::plan(const CausalConv1dProblem& problem, const Device& device,
                                const Options& options) {
  check_problem(problem);
  return CausalConv1d(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
