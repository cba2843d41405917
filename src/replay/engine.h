#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/kv_pool.h"
#include "src/replay/batch_arrays.h"
#include "src/replay/check.h"
#include "src/replay/row_inputs.h"
#include "src/replay/row_reader.h"
#include "src/replay/run_plan.h"
#include "src/replay/scheduler.h"

/// Runs the rows of scheduled steps through a serving backend.
namespace fovea::internal {

struct EngineConfig {
  std::vector<int64_t>
      layers;  ///< Model layer ids; with drafts the draft model's layer is the last.
  int64_t draft_tokens = 0;
  DraftMode draft_mode = DraftMode::kV1;
  int64_t topk = 0;
  int64_t page_size = 0;
  int64_t num_pages = 0;     ///< Usable pages, without the dummy page.
  int64_t table_width = 0;   ///< Columns of the request table.
  int64_t max_requests = 0;  ///< Of one step.
  int64_t max_rows = 0;      ///< Of one step.
  bool deterministic = true;
  std::string implementation;
  Device device;
  std::optional<ThroughputLimits> ceilings;
};

/// What all steps so far add up to.
struct EngineTotals {
  Digest digest;
  double generate_s = 0;
  double attention_s = 0;
  double read_s = 0;
  std::vector<double> layer_ms;  ///< Per simulated layer.
  std::vector<ReplayOperator> operators;
  std::vector<ReplayMode> modes;
};

/// One run. A prefill, mixed or decode step is one batch that every layer runs, the draft model's
/// included, so that its cache is complete. A round of drafts is
///   1. draft_tokens - 1 decode steps of the draft model (the draft extend of the round before
///      would give the first drafted token);
///   2. TARGET_VERIFY on the layers of the target;
///   3. DRAFT_EXTEND or DRAFT_EXTEND_V2 on the draft model's layer,
/// in step plans, padded to the next power of two of requests. Which drafted tokens are right is
/// known in advance; a wrong one gets a token id of its own, so that its rows hold other keys.
/// An idle step is a batch without requests: a rank without work still takes part in the step of
/// its group, with rows of padding.
///
/// A step that throws leaves totals and samples as they were and may be run again: its
/// rows go to the same slots.
class Engine {
 public:
  /// Keeps references to `inputs` and `plan`. digest_from[r]: rows of request r before this
  /// position belong to an earlier request and enter no digest.
  Engine(const EngineConfig& config, const RowInputs& inputs, const RunPlan& plan,
         std::vector<int64_t> digest_from);

  /// Runs the step that `scheduler` has formed and sets its step_ms.
  void run_step(int64_t step, Scheduler* scheduler, StepBatch* batch);

  const EngineTotals& totals() const { return totals_; }
  int64_t cache_bytes() const { return kv_pool_.bytes() + index_pool_.bytes(); }

  /// The checked rows of the steps since the last call.
  std::vector<CheckSample> take_samples() { return std::exchange(samples_, {}); }
  int64_t num_samples() const { return static_cast<int64_t>(samples_.size()); }

 private:
  struct StepResult;
  // The step plans of a round with so many requests, padded ones included.
  struct RoundPlans {
    std::vector<DsaStepPlan> chain, verify, extend;  // the latter two hold one each
  };
  // One layer's forward over rows that have begun.
  struct LayerCall {
    const BatchArrays* rows = nullptr;
    const DsaStepPlan* plan = nullptr;  // null: the backend's own step
    int64_t layer_index = 0;
    bool read = true;  // digests and samples
  };

  bool is_draft(int64_t layer_index) const {
    return config_.draft_tokens > 0 && layer_index == num_target_layers_;
  }
  int64_t bucket_of(int64_t requests) const;
  RoundPlans& round_plans(int64_t bucket);
  void run_batch(const Scheduler& scheduler, const StepBatch& batch, const RequestTable& table,
                 StepResult* result);
  void run_round(const Scheduler& scheduler, const StepBatch& batch, const RequestTable& table,
                 StepResult* result);
  void run_chain(int64_t bucket, const Scheduler& scheduler, const StepBatch& batch,
                 const RequestTable& table, StepResult* result);
  template <class Begin>
  void begin(const BatchArrays& rows, bool draft, const Begin& begin, StepResult* result);
  void run_layer(const LayerCall& call, const StepBatch& batch, const RequestTable& table,
                 StepResult* result);
  void generate(int64_t layer, const StepBatch& batch, const std::vector<StepRow>& rows);
  DsaForwardTensors tensors(int64_t layer_index, int64_t num_rows);
  void read_layer(const LayerCall& call, const StepBatch& batch, const RequestTable& table,
                  StepResult* result);
  void add_calls(const std::string& layer_kind, StepResult* result);

  EngineConfig config_;
  const RowInputs& inputs_;
  const RunPlan& plan_;
  std::vector<int64_t> digest_from_;
  int64_t num_target_layers_;
  DsaBackend backend_;
  std::map<int64_t, RoundPlans> round_plans_;  // by bucket
  KvPool kv_pool_;
  KvPool index_pool_;
  RowReader reader_;
  std::vector<OperatorCall> calls_;
  EngineTotals totals_;
  std::vector<CheckSample> samples_;

  // One forward call, reused; shapes as in DsaForwardTensors.
  BatchArrays rows_;
  std::vector<BatchArrays> chain_rows_;  // per step of a chain of drafts
  HostBuffer q_, k_, index_q_, index_k_, head_gate_, out_, lse_, indices_;
  std::vector<std::vector<float>> norm_weight_, norm_bias_;  // per simulated layer
  std::vector<float> cos_sin_;
};

}  // namespace fovea::internal
