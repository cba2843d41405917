#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/stream.h"
#include "src/replay/batch_arrays.h"
#include "src/replay/device_batch.h"
#include "src/replay/model_family.h"

/// What engines have in common: which batches a step runs through which layers, and what it adds
/// up to.
namespace fovea::internal {

/// Batches that are begun together.
enum class GroupKind : uint8_t {
  kBatch,        ///< A prefill, mixed, decode or idle step: one batch without a step plan.
  kDecode,       ///< With graphs: a decode step.
  kChain,        ///< The decode steps of a draft model, one batch each.
  kVerify,       ///< TARGET_VERIFY.
  kDraftExtend,  ///< DRAFT_EXTEND or DRAFT_EXTEND_V2.
};

struct StepGroup {
  GroupKind kind = GroupKind::kBatch;
  int64_t bucket = 0;  ///< Requests of the step plan, padded ones included; kBatch: 0.
  std::vector<BatchArrays> batches;
  /// Per batch, what a backend gets: arrays on the device, at addresses that stay. kBatch has host
  /// lengths.
  std::vector<ForwardBatch> forward;
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
  int64_t slot = 0;         ///< Which set of tensors holds its inputs and outputs.

  const BatchArrays& rows() const { return group.batches[static_cast<size_t>(batch_index)]; }
  const StepEntry& entry(const StepRow& row) const {
    return group.step->entries[static_cast<size_t>(row.entry)];
  }
};

/// Half-open.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
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
/// With graphs a decode step runs in a step plan too, and every group with a plan is captured once:
/// refresh and all its layers.
///
/// A family derives its engine and fills in what a layer does. The order of the calls for a group:
/// make_plans (first time only); prepare; then begin and, per batch and layer, stage, forward,
/// read; with graphs prepare, stage for all of them, begin and forward for all of them (captured or
/// replayed), read for all of them.
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
  /// Uploads what the group's begin and forwards read beside its batches. Not timed, never
  /// captured: runs before every begin, and before every replay.
  virtual void prepare(const StepGroup& /*group*/) {}
  /// Makes the group current: refreshes metadata. Timed. Submits to stream(), waits for nothing and
  /// may be captured, as may forward.
  virtual void begin(const StepGroup& group) = 0;
  /// Makes the inputs of a layer and copies them to the device. Not timed.
  virtual void stage(const LayerCall& call) = 0;
  /// Runs the layer. Timed.
  virtual void forward(const LayerCall& call) = 0;
  /// The work of begin() and forward() so far is done: operator calls that the backend has measured
  /// go to profile().
  virtual void collect_profile() {}
  /// Digest of the rows that count, zero on the draft model's layer; takes samples. Copies what it
  /// needs from the device and waits for it. Not called for a chain.
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
  /// Bound of rows of a backend. Operators on a GPU cut rows into parts by it, to have enough
  /// blocks; with `deterministic` it is so large that none is cut, and a row has the same bits
  /// whatever the schedule of the run needs.
  int64_t backend_rows() const;
  /// Most rows of a call, per slot: an engine has one set of tensors for each.
  std::vector<int64_t> slot_rows() const;
  /// Rows of a request in a bucket of this kind.
  int64_t rows_per_request(GroupKind kind) const {
    return kind == GroupKind::kVerify || kind == GroupKind::kDraftExtend ? setup_.draft_tokens + 1
                                                                         : 1;
  }
  /// Mode of the batches of a group in a step plan.
  ForwardMode plan_mode(GroupKind kind) const;
  /// Where backends append their operator calls.
  std::vector<OperatorCall>* profile() { return &calls_; }
  Stream stream() const { return stream_ ? Stream(*stream_) : Stream{}; }

  /// Calls make(t, token) for every row t of the call, in parallel.
  void for_each_row(const LayerCall& call,
                    const std::function<void(int64_t t, const RowToken& token)>& make) const;
  /// The rows whose results are wanted, and perhaps some between them: those of the digest, on a
  /// layer of the target, and sampled ones.
  RowRange rows_to_read(const LayerCall& call) const;
  /// The range of sampled ones alone.
  RowRange sampled_rows(const LayerCall& call) const;

 private:
  struct StepResult;
  // A group whose memory lives on.
  struct PlannedGroup {
    StepGroup group;
    std::vector<DeviceBatch> arrays;  // per batch
    std::optional<Graph> graph;
  };

  PlannedGroup& planned(GroupKind kind, int64_t bucket);
  void build(const StepBatch& batch, const Scheduler& scheduler, PlannedGroup* planned) const;
  void run_group(PlannedGroup* planned, const Scheduler& scheduler, const StepBatch& batch,
                 StepResult* result);
  void run_eager(const StepGroup& group, StepResult* result);
  void run_graph(PlannedGroup* planned, StepResult* result);
  std::vector<LayerCall> calls_of(const StepGroup& group) const;
  template <class Work>
  double timed(const Work& work, const std::function<void()>& meanwhile = {});
  void timed_stage(const LayerCall& call, StepResult* result);
  void timed_read(const LayerCall& call, StepResult* result);
  void count_call(const LayerCall& call, double elapsed_ms, StepResult* result) const;
  void wait_after_failure() const noexcept;
  void add_calls(const std::string& layer_kind, StepResult* result);
  int64_t bucket_of(int64_t requests) const;
  int64_t num_target_layers() const { return num_layers() - (setup_.draft_tokens > 0 ? 1 : 0); }

  const RunSetup& setup_;
  const RunPlan& plan_;
  EngineConfig config_;
  RowFilter filter_;
  bool fault_is_due_ = false;
  std::optional<OwnedStream> stream_;  // GPU
  Event begin_, end_;
  DeviceTable table_;
  std::map<std::pair<GroupKind, int64_t>, PlannedGroup> groups_;
  std::vector<OperatorCall> calls_;
  EngineTotals totals_;
};

}  // namespace fovea::internal
