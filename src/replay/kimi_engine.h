#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "fovea/kda_backend.h"
#include "fovea/kv_pool.h"
#include "fovea/state_pool.h"
#include "src/replay/kimi_check.h"
#include "src/replay/kimi_inputs.h"
#include "src/replay/staged_tensor.h"
#include "src/replay/state_slots.h"
#include "src/replay/step_engine.h"
#include "src/replay/step_samples.h"

namespace fovea::internal {

/// KDA layers among the simulated ones.
int64_t num_kda_layers(const RunSetup& setup);

/// States and windows of a run's KDA layers, at least of one.
StatePoolConfig kimi_state_pool(const RunSetup& setup, int64_t num_slots);

/// Runs rows through the backend of KDA and full-attention layers.
///
/// Every step goes from one slot of a request to the other, see StateSlots.
class KimiEngine final : public StepEngine {
 public:
  KimiEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config);

  int64_t cache_bytes() const override {
    return states_.bytes() + (kv_pool_ ? kv_pool_->bytes() : 0);
  }
  int64_t sample_bytes() const override;
  std::vector<CheckedRow> check_samples() override;

 private:
  void start_step() override;
  void make_plans(GroupKind kind, int64_t bucket) override;
  void prepare(const StepGroup& group) override;
  void begin(const StepGroup& group) override;
  void stage(const LayerCall& call) override;
  void forward(const LayerCall& call) override;
  Digest read(const LayerCall& call) override;
  void collect_profile() override;
  void commit_step(const StepBatch& batch) override;

  bool is_kda(const LayerCall& call) const { return is_kda_layer(setup().model, call.layer); }
  // Index of a simulated layer in its pool.
  int64_t pool_layer(const LayerCall& call) const {
    return pool_layer_[static_cast<size_t>(call.layer_index)];
  }
  void file_wrong_snapshot(const StepGroup& group);
  bool decodes_in_place(const StepGroup& group) const;
  void fill_slots(const StepGroup& group);
  KdaBatch batch_of(const StepGroup& group, size_t index) const;
  void forward_kda(const LayerCall& call);
  void forward_mla(const LayerCall& call);
  void commit(const LayerCall& call);

  // The tensors of one forward call.
  struct Slot {
    StagedTensor qkv, gate, beta, out;  // KDA
    StagedTensor q, k, mla_out, lse;    // full attention
  };
  Slot& slot(const LayerCall& call) { return slots_[static_cast<size_t>(call.slot)]; }

  KimiInputs inputs_;
  std::vector<int64_t> pool_layer_;
  int64_t kda_layers_;
  KdaBackend backend_;
  std::map<std::pair<GroupKind, int64_t>, std::vector<KdaStepPlan>> plans_;
  StatePool states_;
  std::optional<KvPool> kv_pool_;
  StateSlots state_slots_;
  StepSamples<KimiSample> samples_;

  std::vector<Slot> slots_;
  StagedTensor conv_weight_, conv_bias_, a_log_, dt_bias_;  // per KDA layer
  StagedTensor has_state_, accepted_;                       // per request
};

}  // namespace fovea::internal
