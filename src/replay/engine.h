#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/kv_pool.h"
#include "src/replay/check.h"
#include "src/replay/row_inputs.h"
#include "src/replay/row_reader.h"
#include "src/replay/run_plan.h"
#include "src/replay/scheduler.h"

/// Runs the rows of scheduled steps through a serving backend.
namespace fovea::internal {

struct EngineConfig {
  std::vector<int64_t> layers;  ///< Model layer ids.
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
};

/// One run. A step that throws leaves totals and samples as they were and may be run again: its
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
  void list_rows(const Scheduler& scheduler, const StepBatch& batch);
  void begin_step(const RequestTable& table, const StepBatch& batch);
  void generate(int64_t layer, const StepBatch& batch);
  DsaForwardTensors tensors(int64_t layer_index);
  void read_layer(int64_t layer_index, const StepBatch& batch, const RequestTable& table,
                  StepResult* result);

  EngineConfig config_;
  const RowInputs& inputs_;
  const RunPlan& plan_;
  std::vector<int64_t> digest_from_;
  DsaBackend backend_;
  KvPool kv_pool_;
  KvPool index_pool_;
  RowReader reader_;
  std::vector<OperatorCall> calls_;
  EngineTotals totals_;
  std::vector<CheckSample> samples_;

  // One step, reused; shapes as in ForwardBatch and DsaForwardTensors.
  std::vector<StepRow> rows_;
  std::vector<int32_t> seq_len_, pool_row_, ext_len_, positions_, out_cache_loc_;
  HostBuffer q_, k_, index_q_, index_k_, head_gate_, out_, lse_, indices_;
  std::vector<std::vector<float>> norm_weight_, norm_bias_;  // per simulated layer
  std::vector<float> cos_sin_;
};

}  // namespace fovea::internal
