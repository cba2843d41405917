#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "fovea/kv_pool.h"
#include "fovea/state_pool.h"
#include "fovea/v4_backend.h"
#include "src/replay/staged_tensor.h"
#include "src/replay/state_slots.h"
#include "src/replay/step_engine.h"
#include "src/replay/step_samples.h"
#include "src/replay/v4_check.h"
#include "src/replay/v4_inputs.h"

namespace fovea::internal {

/// Simulated layers of this ratio.
int64_t count_layers(const RunSetup& setup, int64_t ratio);

/// The states of a run's compressors: rings as long as its drafts ask for. `csa_slots` in the pools
/// of ratio 4.
struct V4StateConfigs {
  StatePoolConfig csa, indexer, hca;
};
V4StateConfigs v4_states(const RunSetup& setup, int64_t csa_slots, int64_t hca_slots);

/// Runs rows through the backend of DeepSeek-V4.
///
/// A page of tokens is a page of every pool: window rows, entries and index keys live as long as
/// the prefix. Compressors' states: a prefill goes from one slot of a request to the other, a
/// decode or verify works in place (StateSlots). Those of ratio 128 have no snapshots, because a
/// page ends a group.
class V4Engine final : public StepEngine {
 public:
  V4Engine(const RunSetup& setup, const RunPlan& plan, EngineConfig config);

  int64_t cache_bytes() const override;
  int64_t sample_bytes() const override;
  std::vector<CheckedRow> check_samples() override;

 private:
  void start_step() override { samples_.start_step(); }
  void make_plans(GroupKind kind, int64_t bucket) override;
  void prepare(const StepGroup& group) override;
  void begin(const StepGroup& group) override;
  void stage(const LayerCall& call) override;
  void forward(const LayerCall& call) override;
  Digest read(const LayerCall& call) override;
  void collect_profile() override;
  void commit_step(const StepBatch& batch) override;

  int64_t ratio(const LayerCall& call) const { return inputs_.ratio(call.layer); }
  // Index of a simulated layer among those of its ratio.
  int64_t pool_layer(const LayerCall& call) const {
    return pool_layer_[static_cast<size_t>(call.layer_index)];
  }
  void make_slots();
  void make_weights();
  void make_window_stale(const StepGroup& group);
  V4Batch batch_of(const StepGroup& group, size_t index) const;
  V4ForwardTensors tensors(const LayerCall& call);

  // The tensors of one forward call; shapes as in V4ForwardTensors.
  struct Slot {
    StagedTensor q, kv, csa_gate, hca_gate, index_gate, index_q, head_gate, indices, out, lse;
  };
  Slot& slot(const LayerCall& call) { return slots_[static_cast<size_t>(call.slot)]; }

  V4Inputs inputs_;
  std::vector<int64_t> pool_layer_;
  V4StateConfigs states_;
  V4Backend backend_;
  std::map<std::pair<GroupKind, int64_t>, std::vector<V4StepPlan>> plans_;
  KvPool window_pool_;
  std::optional<KvPool> csa_pool_, index_pool_, hca_pool_;
  std::optional<StatePool> csa_states_, index_states_, hca_states_;
  StateSlots state_slots_;
  StepSamples<V4Sample> samples_;

  std::vector<Slot> slots_;
  // Weights: of each simulated layer, or of those of a ratio.
  StagedTensor sink_, csa_ape_, csa_norm_, index_ape_, index_norm_, hca_ape_, hca_norm_;
  StagedTensor swa_cos_sin_, entry_cos_sin_;
};

}  // namespace fovea::internal
