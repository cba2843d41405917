#pragma once

#include <cstdint>

#include "fovea/kda_prefill.h"
#include "src/core/implementation_list.h"
#include "src/core/workspace.h"
#include "src/kda/kda_state.h"

/// The implementations of kda_prefill, and what they share.
namespace fovea::internal {

size_t kda_prefill_ref_workspace(const KdaPrefillProblem& problem, const Device& device);
void kda_prefill_ref(const KdaPrefillProblem& problem, const Device& device,
                     const KdaPrefillTensors& tensors, Workspace workspace);

Refusal kda_prefill_cuda_supports(const KdaPrefillProblem& problem);
size_t kda_prefill_cuda_workspace(const KdaPrefillProblem& problem, const Device& device);
void kda_prefill_cuda_portable(const KdaPrefillProblem& problem, const Device& device,
                               const KdaPrefillTensors& tensors, Workspace workspace,
                               Stream stream);
size_t kda_prefill_cpu_workspace(const KdaPrefillProblem& problem, const Device& device);
void kda_prefill_cpu(const KdaPrefillProblem& problem, const Device& device,
                     const KdaPrefillTensors& tensors, Workspace workspace);

/// Elements of int64_t that judge_kda_prefill needs: 0 without `check`.
int64_t kda_prefill_check_elements(const KdaPrefillProblem& problem);
/// What an implementation on the host does first: with `check` a fault of the contents throws.
void judge_kda_prefill(const KdaPrefillProblem& problem, const KdaPrefillTensors& tensors,
                       int64_t* scratch);

/// Bytes of the staging area of a staged commit: final states, then snapshots; 0 when direct.
int64_t kda_prefill_staging_bytes(const KdaPrefillProblem& problem);

/// Where a state is written: entry -1 is nowhere.
struct StateTarget {
  StateAccess access;
  int64_t entry = -1;
};

/// Which states a prefill reads and writes, for implementations on the host. With a staged commit
/// the targets lie in `staging` (kda_prefill_staging_bytes), and commit() copies them.
class PrefillStates {
 public:
  PrefillStates(const KdaPrefillProblem& problem, const KdaPrefillTensors& tensors, void* staging);

  const StateAccess& states() const { return states_; }
  int64_t num_snapshots() const { return num_snapshots_; }

  /// The entry that sequence n starts from; -1: zero.
  int64_t start(int64_t n) const { return routes_.start(n); }
  /// Where the final state of a sequence of `length` rows goes. Nowhere also when it has no rows
  /// and one entry for both ends.
  StateTarget final_target(int64_t n, int64_t length) const;
  /// Where snapshot m goes when it is that of sequence n, of `length` rows, at position p.
  StateTarget snapshot_target(int64_t m, int64_t n, int64_t length, int64_t p) const;

  /// Announces the last step of the run (which fault injection may refuse) and copies what is
  /// staged. Call it outside parallel loops; direct: nothing.
  void commit() const;

 private:
  int64_t final_entry(int64_t n, int64_t length) const;
  int64_t snapshot_entry(int64_t m, int64_t n, int64_t length) const;
  void copy(int64_t staged, int64_t entry, int64_t head) const;

  const KdaPrefillProblem& problem_;
  StateAccess states_;
  StateAccess staged_;
  StateRoutes routes_;
  PackedOffsets offsets_;
  int64_t num_snapshots_ = 0;
  const int32_t* snapshot_seq_ = nullptr;
  const int32_t* snapshot_pos_ = nullptr;
  const int32_t* snapshot_slot_ = nullptr;
};

}  // namespace fovea::internal
