#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fovea/dsa_backend.h"
#include "src/replay/batch_arrays.h"
#include "src/replay/model_family.h"

/// What engines have in common: which batches a step runs through which layers, and what it adds
/// up to.
namespace fovea::internal {

/// Batches that are begun together.
enum class GroupKind : uint8_t {
  kBatch,        ///< A prefill, mixed, decode or idle step: one batch without a step plan.
  kChain,        ///< The decode steps of a draft model, one batch each.
  kVerify,       ///< TARGET_VERIFY.
  kDraftExtend,  ///< DRAFT_EXTEND or DRAFT_EXTEND_V2.
};

struct StepGroup {
  GroupKind kind = GroupKind::kBatch;
  int64_t bucket = 0;  ///< Requests of the step plan, padded ones included; kBatch: 0.
  std::span<const BatchArrays> batches;
  ConstTensorView req_to_token;  ///< As the backend sees it.
  const StepBatch* step = nullptr;
  const Scheduler* scheduler = nullptr;
};

/// One batch on one layer.
struct LayerCall {
  const StepGroup& group;
  int64_t batch_index = 0;  ///< Into the group.
  int64_t layer_index = 0;  ///< Into the simulated layers.
  int64_t layer = 0;        ///< Model layer id.
  bool draft = false;       ///< Of the draft model.

  const BatchArrays& rows() const { return group.batches[static_cast<size_t>(batch_index)]; }
  const StepEntry& entry(const StepRow& row) const {
    return group.step->entries[static_cast<size_t>(row.entry)];
  }
};

/// A prefill, mixed or decode step is one batch that every layer runs, the draft model's included,
/// so that its cache is complete. A round of drafts is
///   1. draft_tokens - 1 decode steps of the draft model (the draft extend of the round before
///      would give the first drafted token);
///   2. TARGET_VERIFY on the layers of the target;
///   3. DRAFT_EXTEND or DRAFT_EXTEND_V2 on the draft model's layer,
/// in step plans, padded to the next power of two of requests. Which drafted tokens are right is
/// known in advance; a wrong one gets a token id of its own, so that its rows hold other keys.
/// An idle step is a batch without requests: a rank without work still takes part in the step of
/// its group, with rows of padding.
///
/// A family derives its engine and fills in what a layer does. The order of the calls for a group:
/// make_plans (first time only), begin, then per batch and layer: stage, forward, read.
class StepEngine : public ModelEngine {
 public:
  void run_step(int64_t step, Scheduler* scheduler, StepBatch* batch) final;
  const EngineTotals& totals() const final { return totals_; }

 protected:
  StepEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config);

  /// Before anything of a step: forgets what a step that threw has left.
  virtual void start_step() = 0;
  /// Buffers and step plans of a bucket, which live on. Not kBatch.
  virtual void make_plans(GroupKind kind, int64_t bucket) = 0;
  /// Makes the group current: refreshes metadata, copies what all layers read. Timed.
  virtual void begin(const StepGroup& group) = 0;
  /// Makes the inputs of a layer. Not timed.
  virtual void stage(const LayerCall& call) = 0;
  /// Runs the layer. Timed.
  virtual void forward(const LayerCall& call) = 0;
  /// Digest of the rows that count, zero on the draft model's layer; takes samples. Not called for
  /// a chain.
  virtual Digest read(const LayerCall& call) = 0;
  /// All of the step has run: its samples count, states advance to kept_end. Must not throw.
  virtual void commit_step(const StepBatch& batch) = 0;

  const RunSetup& setup() const { return setup_; }
  const EngineConfig& config() const { return config_; }
  const RowFilter& filter() const { return filter_; }
  const Fault& fault() const { return plan_.fault; }
  /// Whether the step that runs is that of the planned fault.
  bool fault_is_due() const { return fault_is_due_; }
  int64_t num_layers() const { return static_cast<int64_t>(setup_.layers.size()); }
  int64_t num_draft_steps() const { return std::max<int64_t>(setup_.draft_tokens - 1, 0); }
  /// Most rows of one batch, padding included.
  int64_t max_rows() const;
  /// Where backends append their operator calls.
  std::vector<OperatorCall>* profile() { return &calls_; }

  /// Calls make(t, token) for every row t of the call, in parallel.
  void for_each_row(const LayerCall& call,
                    const std::function<void(int64_t t, const RowToken& token)>& make) const;

 private:
  struct StepResult;

  void run_batch(const StepGroup& group, StepResult* result);
  void run_round(const StepGroup& group, StepResult* result);
  void run_group(StepGroup group, std::span<const BatchArrays> batches,
                 std::pair<int64_t, int64_t> layers, StepResult* result);
  void run_layer(const LayerCall& call, StepResult* result);
  void add_calls(const std::string& layer_kind, StepResult* result);
  int64_t bucket_of(int64_t requests) const;
  int64_t num_target_layers() const { return num_layers() - (setup_.draft_tokens > 0 ? 1 : 0); }

  const RunSetup& setup_;
  const RunPlan& plan_;
  EngineConfig config_;
  RowFilter filter_;
  bool fault_is_due_ = false;
  std::set<std::pair<GroupKind, int64_t>> made_plans_;
  std::vector<OperatorCall> calls_;
  EngineTotals totals_;
  std::vector<BatchArrays> rows_;        // one
  std::vector<BatchArrays> chain_rows_;  // per step of a chain of drafts
};

}  // namespace fovea::internal
