#pragma once

#include "fovea/dsa_backend.h"
#include "src/serving/dsa_plans.h"
#include "src/serving/dsa_step.h"
#include "src/serving/operator_caller.h"

/// One layer's forward of a step that has begun.
namespace fovea::internal {

/// What the operators of one forward hand to one another, at the bounds of the configuration. One
/// for all steps of a backend: its forwards follow one another.
struct ForwardScratch {
  /// Throws Error(kOutOfMemory).
  ForwardScratch(const DsaConfig& config, const StepHome& home);

  TensorView q_fp8, q_scale, head_weight;        ///< Index queries.
  TensorView k_fp8, k_scale;                     ///< New index keys.
  TensorView selection;                          ///< Result of the indexer.
  TensorView slots;                              ///< Without fuse_transform: the mapped selection.
  TensorView contiguous_slots, contiguous_rows;  ///< Of the batch's keys.
  // Of inputs in parts: bf16 [kQueryChunk, H, 576], with fresh keys [max_rows, 576]; or codes.
  TensorView joined_q, joined_k, q_codes, k_codes;

 private:
  void cut(const DsaConfig& config, Workspace memory, size_t* bytes);
  DeviceBuffer memory_;
};

class DsaForward {
 public:
  DsaForward(const DsaConfig& config, const Device& device, const DsaPlans& shared,
             const LayerPlans& layer, const DsaStep& step, ForwardScratch& scratch,
             OperatorCaller& caller)
      : config_(config),
        device_(device),
        shared_(shared),
        layer_(layer),
        step_(step),
        scratch_(scratch),
        caller_(caller) {}

  /// Tensors that passed check_forward_tensors.
  void run(const DsaForwardTensors& tensors);

 private:
  void quantize_index(const DsaForwardTensors& tensors);
  void quantize_index(const DsaForwardTensors& tensors, bool queries, bool keys);
  ConstTensorView whole_keys(const DsaForwardTensors& tensors);
  ConstTensorView joined_queries(const DsaForwardTensors& tensors, int64_t begin, int64_t end);
  void store_rows(const DsaForwardTensors& tensors, const ConstTensorView& keys);
  ConstTensorView select_rows(const DsaForwardTensors& tensors);
  void map_rows(const ConstTensorView& positions, IndexTransform transform,
                const TensorView& indices);
  void attend(const DsaForwardTensors& tensors, const ConstTensorView& keys,
              const ConstTensorView& indices);
  void attend_rows(const SparseMlaTensors& in, int64_t begin, int64_t end);
  ConstTensorView contiguous_keys(const DsaForwardTensors& tensors, const ConstTensorView& keys);
  void attend_one_shot(const DsaForwardTensors& tensors);
  const MetadataFields& host_fields() const { return step_.host_fields(); }

  template <class View>
  View live(const View& tensor) const {
    return slice_rows(tensor, 0, step_.shape.num_rows);
  }
  template <class View>
  View stored(const View& tensor) const {
    return slice_rows(tensor, 0, step_.shape.num_tokens);
  }

  const DsaConfig& config_;
  const Device& device_;
  const DsaPlans& shared_;
  const LayerPlans& layer_;
  const DsaStep& step_;
  ForwardScratch& scratch_;
  OperatorCaller& caller_;
};

}  // namespace fovea::internal
