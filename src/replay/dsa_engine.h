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
  void commit_step(const StepBatch& /*batch*/) override { samples_.commit_step(); }

  std::vector<DsaStepPlan>& plans(const StepGroup& group) {
    return plans_.at({group.kind, group.bucket});
  }
  DsaForwardTensors tensors(const LayerCall& call);

  DsaInputs inputs_;
  DsaBackend backend_;
  // A chain has a plan per draft step, the other kinds have one.
  std::map<std::pair<GroupKind, int64_t>, std::vector<DsaStepPlan>> plans_;
  KvPool kv_pool_;
  KvPool index_pool_;
  DsaRowReader reader_;
  StepSamples<DsaSample> samples_;

  // One forward call, reused; shapes as in DsaForwardTensors.
  HostBuffer q_, k_, index_q_, index_k_, head_gate_, out_, lse_, indices_;
  std::vector<std::vector<float>> norm_weight_, norm_bias_;  // per simulated layer
  std::vector<float> cos_sin_;
};

}  // namespace fovea::internal
