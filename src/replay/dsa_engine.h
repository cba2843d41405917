#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/kv_pool.h"
#include "src/replay/dsa_check.h"
#include "src/replay/dsa_inputs.h"
#include "src/replay/dsa_row_reader.h"
#include "src/replay/staged_tensor.h"
#include "src/replay/step_engine.h"
#include "src/replay/step_samples.h"

namespace fovea::internal {

/// Runs rows through the backend of DeepSeek sparse attention.
class DsaEngine final : public StepEngine {
 public:
  DsaEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config);

  int64_t cache_bytes() const override { return kv_pool_.bytes() + index_pool_.bytes(); }
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

  std::vector<DsaStepPlan>& plans(const StepGroup& group) {
    return plans_.at({group.kind, group.bucket});
  }
  // The tensors of one forward call; shapes as in DsaForwardTensors.
  struct Slot {
    StagedTensor q, k, index_q, index_k, head_gate, out, lse, indices;
  };
  Slot& slot(const LayerCall& call) { return slots_[static_cast<size_t>(call.slot)]; }
  DsaForwardTensors tensors(const LayerCall& call);

  DsaInputs inputs_;
  DsaBackend backend_;
  // A chain has a plan per draft step, the other kinds have one.
  std::map<std::pair<GroupKind, int64_t>, std::vector<DsaStepPlan>> plans_;
  KvPool kv_pool_;
  KvPool index_pool_;
  DsaRowReader reader_;
  StepSamples<DsaSample> samples_;

  std::vector<Slot> slots_;
  StagedTensor norm_weight_, norm_bias_;  // f32 [simulated layers, Di]
  StagedTensor cos_sin_;
};

}  // namespace fovea::internal
