#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "fovea/kv_pool.h"
#include "fovea/msa_backend.h"
#include "src/replay/msa_check.h"
#include "src/replay/msa_inputs.h"
#include "src/replay/staged_tensor.h"
#include "src/replay/step_engine.h"
#include "src/replay/step_samples.h"

namespace fovea::internal {

/// Runs rows through the backend of block-sparse attention.
class MsaEngine final : public StepEngine {
 public:
  MsaEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config);

  int64_t cache_bytes() const override;
  int64_t sample_bytes() const override;
  std::vector<CheckedRow> check_samples() override;

 private:
  void start_step() override { samples_.start_step(); }
  void make_plans(GroupKind kind, int64_t bucket) override;
  void begin(const StepGroup& group) override;
  void stage(const LayerCall& call) override;
  void forward(const LayerCall& call) override;
  Digest read(const LayerCall& call) override;
  void collect_profile() override;
  void commit_step(const StepBatch& /*batch*/) override { samples_.commit_step(); }

  bool is_dense(const LayerCall& call) const { return is_dense_layer(setup().model, call.layer); }
  // The tensors of one forward call; shapes as in MsaForwardTensors.
  struct Slot {
    StagedTensor q, k, v, index_q, index_k, out, lse;
    StagedTensor blocks;  // i32 [T, Hkv, K] in memory
  };
  Slot& slot(const LayerCall& call) { return slots_[static_cast<size_t>(call.slot)]; }
  MsaForwardTensors tensors(const LayerCall& call);
  void take_samples(const LayerCall& call);

  MsaInputs inputs_;
  MsaBackend backend_;
  // A chain has a plan per draft step, the other kinds have one.
  std::map<std::pair<GroupKind, int64_t>, std::vector<MsaStepPlan>> plans_;
  KvPool k_pool_, v_pool_;
  std::optional<KvPool> index_pool_;
  std::vector<int64_t> index_layer_;  // of a simulated layer; -1: dense
  StepSamples<MsaSample> samples_;
  std::vector<Slot> slots_;
};

}  // namespace fovea::internal
