#include "fovea/kda_prefill.h"

#include <string>

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/kda/kda_checks.h"
#include "src/kda/kda_prefill_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "kda_prefill";

constexpr internal::Implementation<KdaPrefillProblem, KdaPrefillTensors> kImplementations[] = {
    {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
     internal::kda_prefill_cuda_supports, internal::kda_prefill_cuda_workspace, nullptr,
     internal::kda_prefill_cuda_portable},
    {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::kda_prefill_cpu_workspace,
     internal::kda_prefill_cpu},
    {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::kda_prefill_ref_workspace,
     internal::kda_prefill_ref},
};

const internal::OperatorRegistration kRegistration("kda", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const KdaPrefillProblem& problem) {
  internal::check_range(kOp, "max_rows", problem.max_rows, 0, internal::kMaxKdaCount);
  internal::check_range(kOp, "max_sequences", problem.max_sequences, 0, internal::kMaxKdaCount);
  internal::check_range(kOp, "max_snapshots", problem.max_snapshots, 0, internal::kMaxKdaCount);
  internal::check_kda_layer(kOp, problem.layer);
  if (problem.chunk != 0 && problem.chunk != 16 && problem.chunk != 32 && problem.chunk != 64) {
    internal::invalid(kOp, "chunk = " + std::to_string(problem.chunk) +
                               ", expected 16, 32, 64, or 0 for the implementation's choice");
  }
  const int64_t columns = problem.v_columns;
  if (columns != 0 && ((columns != 16 && columns != 32 && columns != 64 && columns != 128) ||
                       problem.layer.head_dim_v % columns != 0)) {
    internal::invalid(kOp, "v_columns = " + std::to_string(columns) +
                               ", expected 16, 32, 64 or 128 that divides head_dim_v = " +
                               std::to_string(problem.layer.head_dim_v) +
                               ", or 0 for the implementation's choice");
  }
  if (problem.state_layout > StateLayout::kKv) internal::invalid(kOp, "state_layout is unknown");
  if (problem.commit > CommitMode::kStaged) internal::invalid(kOp, "commit is unknown");
  if (problem.state_layout == StateLayout::kKv && problem.max_snapshots != 0) {
    internal::invalid(kOp, "state_layout kv has no slots, so max_snapshots must be 0; use vk");
  }
}

void check_states(const KdaPrefillProblem& problem, const ConstTensorView& state, const char* name,
                  int64_t entries) {
  const KdaLayer& layer = problem.layer;
  const bool vk = problem.state_layout == StateLayout::kVk;
  internal::check_optional(
      kOp, name, state, layer.state_dtype,
      {entries, layer.num_value_heads, vk ? layer.head_dim_v : layer.head_dim_k,
       vk ? layer.head_dim_k : layer.head_dim_v});
  if (state.defined()) internal::check_no_aliasing(kOp, name, state);
}

void check_snapshots(const KdaPrefillProblem& problem, const KdaPrefillTensors& tensors,
                     bool listed) {
  if (!tensors.snapshot_seq.defined()) {
    if (tensors.snapshot_pos.defined() || tensors.snapshot_slot.defined()) {
      internal::invalid(kOp, "snapshot_seq is missing beside snapshot_pos or snapshot_slot");
    }
    return;
  }
  if (!listed) {
    internal::invalid(kOp, "snapshots need a pool, that is in_slot or out_slot; pass one of them");
  }
  internal::check_tensor(kOp, "snapshot_seq", tensors.snapshot_seq, DType::kI32,
                         {internal::kAnyExtent});
  const int64_t count = tensors.snapshot_seq.shape[0];
  internal::check_range(kOp, "snapshot_seq.shape[0]", count, 0, problem.max_snapshots);
  internal::check_tensor(kOp, "snapshot_pos", tensors.snapshot_pos, DType::kI32, {count});
  internal::check_tensor(kOp, "snapshot_slot", tensors.snapshot_slot, DType::kI32, {count});
}

void check_tensors(const KdaPrefillProblem& problem, const KdaPrefillTensors& tensors) {
  const KdaLayer& layer = problem.layer;
  internal::check_tensor(kOp, "out", tensors.out, DType::kBf16,
                         {internal::kAnyExtent, layer.num_value_heads, layer.head_dim_v});
  internal::check_no_aliasing(kOp, "out", tensors.out);
  const int64_t rows = tensors.out.shape[0];
  internal::check_range(kOp, "out.shape[0]", rows, 0, problem.max_rows);
  internal::check_kda_rows(kOp, layer, internal::rows_of(tensors), rows);
  internal::check_indptr(kOp, tensors.q_indptr, problem.max_sequences);
  const int64_t sequences = tensors.q_indptr.shape[0] - 1;
  const bool listed = tensors.in_slot.defined() || tensors.out_slot.defined();
  if (listed && problem.state_layout == StateLayout::kKv) {
    internal::invalid(kOp, "in_slot and out_slot address a pool, whose state_layout is vk");
  }
  if (listed && !tensors.state.defined()) {
    internal::invalid(kOp, "state is missing beside in_slot or out_slot");
  }
  internal::check_slots(kOp, "in_slot", tensors.in_slot, sequences);
  internal::check_slots(kOp, "out_slot", tensors.out_slot, sequences);
  internal::check_optional(kOp, "has_initial_state", tensors.has_initial_state, DType::kU8,
                           {sequences});
  check_states(problem, tensors.state, "state", listed ? internal::kAnyExtent : sequences);
  if (tensors.state.defined()) {
    internal::check_range(kOp, "state.shape[0]", tensors.state.shape[0], 0, internal::kMaxKdaCount);
  }
  check_snapshots(problem, tensors, listed);
  check_states(problem, tensors.chunk_states, "chunk_states", internal::kAnyExtent);
  internal::check_report(kOp, tensors.report, problem.check);
}

}  // namespace

namespace internal {

int64_t kda_prefill_check_elements(const KdaPrefillProblem& problem) {
  return problem.check ? fault_scratch_elements(problem.max_sequences, problem.max_snapshots) : 0;
}

void judge_kda_prefill(const KdaPrefillProblem& problem, const KdaPrefillTensors& tensors,
                       int64_t* scratch) {
  if (!problem.check) return;
  const KdaContents contents{.q_indptr = tensors.q_indptr,
                             .num_rows = tensors.q.shape[0],
                             .in_slot = tensors.in_slot,
                             .out_slot = tensors.out_slot,
                             .slots = tensors.state.defined() ? tensors.state.shape[0] : 0,
                             .snapshot_seq = tensors.snapshot_seq,
                             .snapshot_pos = tensors.snapshot_pos,
                             .snapshot_slot = tensors.snapshot_slot,
                             .snapshot_interval = snapshot_interval(problem.chunk)};
  report_fault(kOp, find_fault(contents, scratch), tensors.report);
}

}  // namespace internal

KdaPrefill KdaPrefill::plan(const KdaPrefillProblem& problem, const Device& device,
                            const Options& options) {
  check_problem(problem);
  return KdaPrefill(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
