#pragma once

#include <cstdint>

#include "fovea/kda_commit.h"
#include "src/core/access.h"
#include "src/core/implementation_list.h"
#include "src/kda/kda_checks.h"
#include "src/kda/kda_state.h"
#include "src/kda/kda_verify_impl.h"
#include "src/kda/window_pool.h"

/// The implementations of kda_commit.
namespace fovea::internal {

size_t kda_commit_ref_workspace(const KdaCommitProblem& problem, const Device& device);
void kda_commit_ref(const KdaCommitProblem& problem, const Device& device,
                    const KdaCommitTensors& tensors, Workspace workspace);
size_t kda_commit_cpu_workspace(const KdaCommitProblem& problem, const Device& device);
void kda_commit_cpu(const KdaCommitProblem& problem, const Device& device,
                    const KdaCommitTensors& tensors, Workspace workspace);
Refusal kda_commit_cuda_supports(const KdaCommitProblem& problem);
size_t kda_commit_cuda_workspace(const KdaCommitProblem& problem, const Device& device);
void kda_commit_cuda_portable(const KdaCommitProblem& problem, const Device& device,
                              const KdaCommitTensors& tensors, Workspace workspace, Stream stream);

/// Elements of int64_t that judge_kda_commit needs: 0 without `check`.
int64_t kda_commit_check_elements(const KdaCommitProblem& problem);
/// What an implementation on the host does first: with `check` a fault of the contents throws.
void judge_kda_commit(const KdaCommitProblem& problem, const KdaCommitTensors& tensors,
                      int64_t* scratch);

/// The part of a call that belongs to one layer: views without the axis [L].
struct CommitLayer {
  VerifyScratch kept;
  StateAccess states;
  Accessor<const bf16_t, 4> windows;  // [R, Td, 3, D]
  WindowPool<bf16_t> window_pool;

  CommitLayer(const KdaCommitProblem& problem, const KdaCommitTensors& tensors, int64_t layer)
      : kept(scratch_of(problem, tensors.scratch, layer)),
        states(without_layer(problem, tensors.state, layer), StateLayout::kVk),
        windows(access<const bf16_t, 4>(without_layer(problem, tensors.window_scratch, layer))),
        window_pool(internal::window_pool<bf16_t>(
            without_layer(problem, tensors.window_state, layer), problem.window_layout)) {}

 private:
  static TensorView without_layer(const KdaCommitProblem& problem, const ConstTensorView& tensor,
                                  int64_t layer) {
    TensorView view;
    static_cast<TensorShape&>(view) = tensor;
    view.data = const_cast<void*>(tensor.data);
    if (!tensor.defined() || problem.num_layers == 0) return view;
    view.data = static_cast<char*>(view.data) +
                layer * tensor.stride[0] * static_cast<int64_t>(size_of(tensor.dtype));
    --view.rank;
    for (size_t axis = 0; axis + 1 < kMaxRank; ++axis) {
      view.shape[axis] = tensor.shape[axis + 1];
      view.stride[axis] = tensor.stride[axis + 1];
    }
    return view;
  }
  static VerifyScratch scratch_of(const KdaCommitProblem& problem, const ConstTensorView& tensor,
                                  int64_t layer) {
    TensorView view = without_layer(problem, tensor, layer);
    // V and K share the last axis of the states of many layers.
    if (problem.num_layers > 0) view.stride[3] = problem.head_dim_k;
    return VerifyScratch(view);
  }
};

/// Where a request's state goes and which draft row it is; slot -1: nowhere.
struct CommitTarget {
  int64_t slot = -1;
  int64_t node = -1;
};

/// The lists of a call, masked.
struct CommitLists {
  const int32_t* accepted = nullptr;
  const int32_t* slot = nullptr;
  const int32_t* in_slot = nullptr;
  const uint8_t* has_initial_state = nullptr;
  const int32_t* parent = nullptr;
  const int32_t* track_slot = nullptr;
  const int32_t* track_accepted = nullptr;
  int64_t slots = 0;
  int64_t rows_per_request = 0;
  bool reads_pool = false;  // records

  CommitLists() = default;
  CommitLists(const KdaCommitProblem& problem, const KdaCommitTensors& tensors)
      : accepted(list(tensors.accepted)),
        slot(list(tensors.slot)),
        in_slot(tensors.in_slot.defined() ? list(tensors.in_slot) : slot),
        has_initial_state(static_cast<const uint8_t*>(tensors.has_initial_state.data)),
        parent(list(tensors.parent)),
        track_slot(list(tensors.track_slot)),
        track_accepted(list(tensors.track_accepted)),
        slots(tensors.state.shape[problem.num_layers > 0 ? 1 : 0]),
        rows_per_request(problem.rows_per_request),
        reads_pool(problem.mode == VerifyMode::kRecords) {}

  /// Destination 0 (slot) or 1 (track slot) of request r.
  FOVEA_HOST_DEVICE CommitTarget target(int64_t r, int which) const {
    const int32_t* const counts = which == 0 ? accepted : track_accepted;
    const int32_t* const destinations = which == 0 ? slot : track_slot;
    if (destinations == nullptr) return {};
    const int64_t count = counts[r], to = destinations[r];
    if (count < 1 || count > rows_per_request || to < 0 || to >= slots) return {};
    if (reads_pool && (in_slot[r] < 0 || in_slot[r] >= slots)) return {};
    return {to, count - 1};
  }
  /// Records: the entry that the verify of request r started from; -1: zero.
  FOVEA_HOST_DEVICE int64_t start(int64_t r) const {
    return has_initial_state != nullptr && has_initial_state[r] == 0 ? -1 : in_slot[r];
  }

 private:
  static const int32_t* list(const ConstTensorView& tensor) {
    return static_cast<const int32_t*>(tensor.data);
  }
};

}  // namespace fovea::internal
